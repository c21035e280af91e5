"""Pairing with sockets and people: the window of `fleetctl pair`, and `fleetctl join`.

``roles`` has the exchange itself. This module moves its bytes, asks people, and writes the result to disk
before the other side is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from fleetd import limits
from fleetd.config import DEFAULT_PEER_PORT
from fleetd.control.pairing_events import (
    CodeShown,
    Crowded,
    Meeting,
    Paired,
    PairingEvent,
    Searching,
    WrongCode,
)
from fleetd.errors import FleetError, PairingClosed, PairingFailed
from fleetd.p2p.discovery import interfaces
from fleetd.p2p.giving_way import gives_way
from fleetd.p2p.links import Address
from fleetd.p2p.membership.identity import short_id
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.node import Node
from fleetd.p2p.pairing import finding, roles
from fleetd.p2p.pairing.code import PairingCode, PairingWindow
from fleetd.p2p.pairing.roles import Inviter, Joiner
from fleetd.p2p.port import PAIRING
from fleetd.p2p.session import transport
from fleetd.process.observe import get_logger

log = get_logger("fleetd.pairing")

_READ_BYTES = 16 * 1024


class _PersonsAnswer(msgspec.Struct, frozen=True):
    admit: bool
    sees_prompts: bool


class _Connection(msgspec.Struct, frozen=True):
    address: str
    side: Inviter


@dataclass(slots=True)
class _OpenWindow:
    """The open window. ``events``: for the caller of ``pair``, who was told that it is ``crowded``."""

    code: PairingCode
    window: PairingWindow
    events: asyncio.Queue[PairingEvent | FleetError] = field(default_factory=asyncio.Queue)
    asked: dict[str, asyncio.Future[_PersonsAnswer]] = field(default_factory=dict)
    connections: dict[asyncio.Task[None], _Connection] = field(default_factory=dict)
    crowded: bool = False


class PairingService:
    """Pairs machines: at most one window at a time, and any number of joins."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._open: _OpenWindow | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    # ---- inviting ----------------------------------------------------------------------------------------

    async def pair(self) -> AsyncGenerator[PairingEvent, None]:
        """Show a code and pair with the machine that has it; ``aclose()`` closes the window.

        Raises:
            PairingClosed: another window is open, or this one ran out of time or tries.
            PairingFailed: the machine that had the code did not finish.
        """
        if self._open is not None:
            raise PairingClosed(
                "A pairing window is open already.", hint="Use its code, or close it first (Ctrl-C)."
            )
        now = asyncio.get_running_loop().time()
        code = PairingCode.new(os.urandom)
        opened = self._open = _OpenWindow(code, PairingWindow(code, now))
        self._node.on_pairing_connection = self._on_connection
        try:
            await self._announce(code.nameplate)
            yield CodeShown(
                str(code),
                limits.PAIRING_WINDOW_S,
                limits.PAIRING_TRIES,
                self._node.name,
                self._node.port,
                own_addresses(self._node.settings.host),
            )
            while True:
                event = await self._next(opened)
                yield event
                if isinstance(event, Paired):
                    return
        finally:
            opened.window.close()
            self._node.on_pairing_connection = None
            self._open = None
            for task in list(opened.connections):
                task.cancel()
            await self._announce("")

    async def _next(self, opened: _OpenWindow) -> PairingEvent:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(opened.window.expires):
                event = await opened.events.get()
        except TimeoutError:
            if opened.window.state(loop.time()) != "used":
                raise PairingClosed(
                    f"The code was not used within {limits.PAIRING_WINDOW_S / 60:.0f} minutes.",
                    hint="Run `fleetctl pair` again for a new one.",
                ) from None
            # Each step of the exchange with the machine that used it has a deadline of its own.
            event = await opened.events.get()
        if isinstance(event, FleetError):
            raise event
        if isinstance(event, WrongCode) and opened.window.state(loop.time()) == "exhausted":
            raise PairingClosed(
                f"The code was tried {limits.PAIRING_TRIES} times; the window is closed.",
                hint="Run `fleetctl pair` again for a new one; the machine that tried does not know it.",
            )
        return event

    def answer(self, node_id: str, *, admit: bool, sees_prompts: bool) -> None:
        """Pass on the answer of the person here. Raises PairingClosed if no pairing waits for it."""
        asked = self._open.asked.get(node_id) if self._open is not None else None
        if asked is None or asked.done():
            raise PairingClosed("No pairing waits for an answer.", hint="`fleetctl pair` opens a window.")
        asked.set_result(_PersonsAnswer(admit, sees_prompts))

    async def _on_connection(self, sock: socket.socket) -> None:
        """Handle a connection to the open window."""
        opened, task, now = self._open, asyncio.current_task(), asyncio.get_running_loop().time()
        with contextlib.closing(sock):
            if opened is None or task is None:
                return
            try:
                address = str(sock.getpeername()[0])
            except OSError:  # it is closed already
                return
            self._make_room(opened, address)
            side = Inviter(opened.window, self._node.identity, self._node.name, now, random_bytes=os.urandom)
            opened.connections[task] = _Connection(address, side)
            try:
                await self._invite(opened, side, sock)
            except FleetError as error:
                log.info("pairing.failed", error=str(error))
            finally:
                opened.connections.pop(task, None)
                # A cancelled task keeps the error, and the error this frame.
                task = None

    @staticmethod
    def _make_room(opened: _OpenWindow, address: str) -> None:
        """Close a connection that has not tried the code, if there are too many of them."""
        held = {task: each.address for task, each in opened.connections.items() if not each.side.tried}
        most, per_address = limits.PAIRING_CONNECTIONS, limits.PAIRING_CONNECTIONS_PER_ADDRESS
        oldest = gives_way(held, address, per_address=per_address, most=most)
        if oldest is None:
            return
        del opened.connections[oldest]
        oldest.cancel()
        if not opened.crowded:
            opened.crowded = True
            opened.events.put_nowait(Crowded(sorted(set(held.values()))))

    async def _invite(self, opened: _OpenWindow, side: Inviter, sock: socket.socket) -> None:
        node, loop = self._node, asyncio.get_running_loop()
        meeting: roles.CodeAccepted | None = None
        answer = _PersonsAnswer(admit=False, sees_prompts=False)
        failure: FleetError | None = None
        async for event in exchange(side, sock):
            try:
                match event:
                    case roles.CodeAccepted():
                        meeting = event
                        answer = await self._ask(opened, event, side.deadline)
                        if answer.admit:
                            # Sent, not yet used: no other machine learns of it before the joiner confirms.
                            trial = Roster(node.identity, node.roster.records())
                            trial.join(event.certificate, event.name, answer.sees_prompts, ())
                            side.approve(trial.records(), loop.time())
                        else:
                            side.cancel("Pairing was declined at this machine.")
                    case roles.Joined(records) if meeting is not None:
                        change = partial(_enter, meeting, answer.sees_prompts, records, loop.time())
                        await node.keeper.promise(change)
                        await self._use(change)
                        side.saved()
            except FleetError as error:
                failure = error
                side.give_up(error.message)
        # The window may close on the event, so the last frame has to be sent before.
        if side.done and meeting is not None:
            opened.events.put_nowait(self._paired(meeting))
        elif side.failed is not None and side.used:
            opened.events.put_nowait(failure or side.failed)
        elif side.tried:
            opened.events.put_nowait(WrongCode(opened.window.tries_left))

    async def _ask(
        self, opened: _OpenWindow, met: roles.CodeAccepted, deadline: float | None
    ) -> _PersonsAnswer:
        asked: asyncio.Future[_PersonsAnswer] = asyncio.get_running_loop().create_future()
        opened.asked[met.node_id] = asked
        opened.events.put_nowait(Meeting(met.node_id, short_id(met.node_id), met.name, met.phrase))
        try:
            async with asyncio.timeout_at(deadline):
                return await asked
        except TimeoutError:
            raise PairingFailed(
                f"No person answered at this machine within {limits.PAIRING_ANSWER_S / 60:.0f} minutes."
            ) from None
        finally:
            del opened.asked[met.node_id]

    async def _use(self, change: Callable[[Roster], tuple[RosterRecord, ...]]) -> None:
        """Use a promised change of the roster. Raises DiskFull or ConfigError, as ``Node.roster_changed``."""
        self._node.keeper.keep(change)
        await self._node.roster_changed()

    def _paired(self, met: roles.CodeAccepted) -> Paired:
        members = self._node.roster.members
        known = members.get(met.node_id)
        sees_prompts = known is not None and known.sees_prompts and self._node.allowed_here(known)
        names = [self._node.name, *(member.name for member in members.values())]
        brought = [
            member.name for member in members.values() if member.through == met.node_id != member.node_id
        ]
        return Paired(met.node_id, short_id(met.node_id), met.name, sees_prompts, names, brought)

    # ---- joining -----------------------------------------------------------------------------------------

    async def join(
        self, code: str, host: str | None, *, sees_prompts: bool
    ) -> AsyncGenerator[PairingEvent, None]:
        """Join the fleet of the machine that shows ``code``.

        Args:
            host: its address, HOST or HOST:PORT; None looks for it by mDNS.
            sees_prompts: whether that machine may see prompts typed here; a rule of this machine alone.

        Raises:
            PairingFailed, PairingClosed: a wrong code, or the other side ended it.
            PeerUnreachable: no machine on this network shows the code, or the address does not answer.
        """
        parsed = PairingCode.parse(code)
        if host is None:
            yield Searching(parsed.nameplate)
        address, sock = await self._find(parsed, host)
        with contextlib.closing(sock):
            async for event in self._join(parsed, address, sock, sees_prompts):
                yield event

    async def _join(
        self, code: PairingCode, address: Address, sock: socket.socket, sees_prompts: bool
    ) -> AsyncGenerator[PairingEvent, None]:
        node, loop = self._node, asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # reading fails as well
            await loop.sock_sendall(sock, PAIRING)
        side = Joiner(node.identity, node.name, code, loop.time(), random_bytes=os.urandom)
        meeting: roles.CodeAccepted | None = None
        change: Callable[[Roster], tuple[RosterRecord, ...]] | None = None
        failure: FleetError | None = None
        try:
            async for event in exchange(side, sock):
                match event:
                    case roles.CodeAccepted():
                        meeting = event
                        yield Meeting(event.node_id, short_id(event.node_id), event.name, event.phrase)
                    case roles.Admitted(records) if meeting is not None:
                        promised = partial(_enter, meeting, None, records, loop.time())
                        try:
                            if not sees_prompts:
                                # First, so that no prompt goes there in between. It stays if pairing fails.
                                await node.prompt_rules.allow(meeting.node_id, False)
                            side.saved(await node.keeper.promise(promised), loop.time())
                            change = promised
                        except FleetError as error:
                            failure = error
                            side.give_up(error.message)
                    case roles.PairingBroke(error):
                        failure = error
        finally:
            # Only a refusal proves that the other side has not added this machine.
            if change is not None and side.refused:
                node.keeper.drop(change)
            elif change is not None:
                await self._use(change)
        if failure is not None:
            raise failure
        if meeting is not None:
            await node.prompt_rules.allow(meeting.node_id, sees_prompts)
            node.reached(meeting.node_id, address)
            yield self._paired(meeting)

    async def _find(self, code: PairingCode, host: str | None) -> tuple[Address, socket.socket]:
        if host is not None:
            address = _address(host)
            return address, await transport.open_socket(address)
        discovery = self._node.discovery
        return await finding.find(code.nameplate, lambda: discovery.seen.values() if discovery else ())

    async def _announce(self, nameplate: str) -> None:
        if self._node.discovery is not None:
            await self._node.discovery.announce_pairing(nameplate)


def _enter(
    met: roles.CodeAccepted,
    sees_prompts: bool | None,
    records: Sequence[RosterRecord],
    now: float,
    roster: Roster,
) -> tuple[RosterRecord, ...]:
    """Add a machine and its records to the roster, as ``Roster.join``; returns this machine's own records.

    Both sides do it. It ends a removal on either side, and joins two fleets.
    """
    return roster.join(met.certificate, met.name, sees_prompts, records, now)


async def exchange(side: Inviter | Joiner, sock: socket.socket) -> AsyncIterator[roles.Event]:
    """Move bytes between a socket and one side of the exchange until it ends, yielding its events.

    The last event is PairingDone or PairingBroke. While a person is asked, nothing is read: a connection that
    was closed meanwhile is noticed afterwards.
    """
    loop = asyncio.get_running_loop()
    while True:
        # The timeout has no name: the task keeps the error that cancels it, the error this frame, and a
        # timeout the task.
        with contextlib.suppress(OSError):  # reading fails as well
            async with asyncio.timeout_at(side.deadline or loop.time() + limits.PAIRING_STEP_S):
                await loop.sock_sendall(sock, side.data_to_send())
        if side.done or side.failed is not None:
            return
        try:
            async with asyncio.timeout_at(side.deadline):
                data = await loop.sock_recv(sock, _READ_BYTES)
            events = side.receive(data, loop.time()) if data else side.disconnected()
        except TimeoutError:
            events = side.tick(loop.time())
        except OSError:
            events = side.disconnected()
        for event in events:
            yield event


def own_addresses(host: str) -> list[str]:
    """Addresses of this machine for people to type, the most useful first."""
    if host not in ("*", "0.0.0.0", "::"):  # noqa: S104  compared with, not bound
        return [host]
    return [address for found in interfaces.read() if found.is_shared for address in found.addresses]


def _address(host: str) -> Address:
    """HOST, HOST:PORT, an IPv6 address, or [IPv6]:PORT."""
    bare, colon, port = host.rpartition(":")
    if not colon or (":" in bare.strip("[]") and not bare.startswith("[")):
        return host.strip("[]"), DEFAULT_PEER_PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise PairingFailed(f"{host!r} is not an address.", hint="Write HOST or HOST:PORT.")
    return bare.strip("[]"), int(port)
