"""Measures each path to a peer: a few echoes and short bursts on a sealed stream.

The session's pings measure only the path of the session; a peer may have better ones. So every known address
is measured when a peer connects, and its round trip again from time to time. Bursts are repeated only while
what they showed is doubtful: twenty megabytes every few minutes would be most of an idle fleet's traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import FleetError, Overloaded, ProtocolError
from fleetd.limits import KIB, MIB
from fleetd.p2p import bulk_connections
from fleetd.p2p.link_speeds import Burst, ProbeSchedule, again
from fleetd.p2p.links import Address, PeerPath
from fleetd.p2p.message_reader import reader
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerStream
from fleetd.process.joined_threads import joined
from fleetd.process.observe import get_logger
from fleetd.process.used_socket import shut_down
from fleetd.sealed.stream import SealedReceiver, SealedSender

log = get_logger("fleetd.p2p")

METHOD = "link.probe"
_ECHO = bytes(16)
_ECHOES = 4
# Each burst shows whether the next one would take too long on this path.
_BURSTS = (128 * KIB, MIB, 8 * MIB)
_SIZE_BYTES = 8
_LONGEST_S = 1.0
# A delay after connecting, so that requests go before measurements.
_SETTLE_S = 1.0


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """The answer: the ticket for the peer port, and the key of the stream."""

    ticket: Annotated[bytes, Meta(min_length=32, max_length=32)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]


# Raises ProtocolError.
invitation: Callable[[bytes], Invitation] = reader(
    Invitation, "A peer's invitation", limits.SMALL_MESSAGE_BYTES
)


class LinkProber:
    """Measures this machine's paths, and answers the measurements of others."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._schedules: defaultdict[tuple[str, Address], ProbeSchedule] = defaultdict(ProbeSchedule)
        self._answering = 0
        # One measurement at a time for each peer: a peer may ask for the next before the last has ended.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        node.handle(METHOD, self.answer)

    async def run(self) -> None:
        """Measure each path that is new or due, one at a time, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SETTLE_S)
            self._forget_old_paths()
            for node_id, peer in list(self._node.mesh.peers.items()):
                epoch = peer.link.epoch if peer.link is not None else 0
                for path in list(peer.paths) if peer.usable else ():
                    schedule, now = self._schedules[node_id, path.address], loop.time()
                    bursts = schedule.wants_bursts(path.speeds, epoch, now, idle=self._idle(node_id))
                    if bursts or schedule.wants_echoes(now):
                        schedule.began(epoch, now, bursts=bursts)
                        await self._measure(node_id, path, schedule, _BURSTS if bursts else ())
                self._node.prefer_best_path(node_id)

    def _forget_old_paths(self) -> None:
        peers = self._node.mesh.peers.items()
        known = {(node_id, path.address) for node_id, peer in peers for path in peer.paths}
        for gone in self._schedules.keys() - known:
            del self._schedules[gone]

    def _idle(self, node_id: str) -> bool:
        """True while neither this session nor the peer has other work that would slow a measurement."""
        connection, card = self._node.connection(node_id), self._node.mesh.cards.get(node_id)
        return not (connection is not None and connection.busy) and not (card is not None and card.running)

    async def _measure(
        self, node_id: str, path: PeerPath, schedule: ProbeSchedule, bursts: Sequence[int]
    ) -> None:
        peer, address = self._node.mesh.peers.get(node_id), path.address
        if peer is None:
            return
        loop = asyncio.get_running_loop()
        try:
            rtt_s, speeds = await self.measure(node_id, address, bursts)
        except Overloaded:
            self._schedules.pop((node_id, address), None)  # no fault of this path; measure it again soon
            return
        except FleetError as error:
            if self._node.connection(node_id) is not None:  # else the path is not at fault
                peer.paths.failed(address, error.message, loop.time(), 0.0)
            return
        peer.paths.succeeded(address, loop.time())
        peer.paths.round_trip(address, rtt_s, loop.time())
        if (found := schedule.judged(speeds, path.usual_bytes_per_s)) is not None:
            (count, seconds), sure = found
            peer.paths.transferred(address, count, seconds, loop.time(), sure=sure)

    async def measure(
        self, node_id: str, address: Address, bursts: Sequence[int] = _BURSTS
    ) -> tuple[float, list[Burst]]:
        """Round trip in seconds, and (bytes, seconds) of each burst. Raises FleetError."""
        stream = self._node.request(node_id, METHOD, b"")
        try:
            async with asyncio.timeout(limits.LINK_PROBE_WITHIN_S):
                answer = await stream.receive()
                if answer is None:
                    raise ProtocolError("A peer gave no invitation.")
                invited = invitation(answer)
                sock = await bulk_connections.connect(address, invited.ticket)
                with contextlib.closing(sock):
                    return await joined(
                        partial(_burst, sock, invited.key, bursts), stop=partial(shut_down, sock)
                    )
        except TimeoutError:
            raise ProtocolError("A measurement took too long.") from None
        finally:
            stream.cancel()

    async def answer(self, peer: str, _body: bytes, stream: PeerStream) -> None:
        """Handle METHOD. Raises Overloaded, ProtocolError, PeerLost."""
        try:
            async with asyncio.timeout(limits.LINK_PROBE_WITHIN_S), self._turns[peer]:
                if self._answering >= limits.LINK_PROBES:
                    raise Overloaded(f"{limits.LINK_PROBES} measurements run here already.")
                self._answering += 1
                try:
                    await self._serve_measurement(stream)
                finally:
                    self._answering -= 1
        except TimeoutError:
            raise ProtocolError("A measurement took too long.") from None

    async def _serve_measurement(self, stream: PeerStream) -> None:
        with self._node.bulk.expect() as expected:
            stream.send(msgspec.msgpack.encode(Invitation(expected.ticket, expected.key)))
            with contextlib.closing(await expected.socket()) as sock:
                await joined(partial(serve_burst, sock, expected.key), stop=partial(shut_down, sock))


def _burst(sock: socket.socket, key: bytes, bursts: Sequence[int]) -> tuple[float, list[Burst]]:
    sender, receiver = SealedSender(sock, key, "connector"), SealedReceiver(sock, key, "connector")
    echo = bytearray(len(_ECHO))
    trips = []
    for _ in range(_ECHOES):
        began = time.perf_counter()
        sender.send(_ECHO)
        receiver.receive_into(echo)
        trips.append(time.perf_counter() - began)
    # Imported late: a daemon without peers probes no link.
    from statistics import median

    rtt_s = median(trips)
    speeds: list[Burst] = []

    def send(size: int) -> None:
        began = time.perf_counter()
        sender.send(size.to_bytes(_SIZE_BYTES, "big"))
        sender.send(bytes(size))
        receiver.receive_into(echo)
        speeds.append((size, max(1e-6, time.perf_counter() - began - rtt_s)))

    for size in bursts:
        if speeds and size * speeds[-1][1] / speeds[-1][0] > _LONGEST_S:
            break
        send(size)
    while again(speeds):
        send(speeds[-1][0])
    sender.finish()
    return rtt_s, speeds


def serve_burst(sock: socket.socket, key: bytes) -> None:
    """The other end: return the echoes and confirm each announced burst, until the end."""
    sender, receiver = SealedSender(sock, key, "acceptor"), SealedReceiver(sock, key, "acceptor")
    echoes = 0
    left = -1  # bytes of the burst still to come; -1 before its size is known
    for chunk in receiver.chunks():
        if echoes < _ECHOES:
            echoes += 1
            sender.send(chunk)
        elif left < 0:
            left = int.from_bytes(chunk, "big")
            if len(chunk) != _SIZE_BYTES or not 0 < left <= _BURSTS[-1]:
                raise ProtocolError("A measurement announces what is no size of a burst.")
        else:
            left -= len(chunk)
            if left <= 0:
                sender.send(_ECHO)
                left = -1
