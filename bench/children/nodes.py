"""Real nodes in a process of their own: keys, TLS, sessions, gossip, and nothing else of a daemon."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench.harness.child import serve
from fleetd import limits
from fleetd.control.model_facts import ModelShape
from fleetd.p2p.link_prober import LinkProber
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.node import Node, NodeSettings
from fleetd.p2p.session.transport import PeerConnection, PeerStream

_ECHO = "bench.echo"
_WITHIN_S = 30.0
_BODY = bytes(64)
# A machine with these models; a card takes one to two kilobytes, as a real one's does.
_MODELS = 8
# In Linux' struct tcp_info: bytes that the other side has taken, and bytes that it has sent.
_TCP_INFO_BYTES, _TAKEN_AT = 136, 120


class _Node(Node):
    """Sets ``pong`` at every pong, and answers ``_ECHO`` with what it was asked."""

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self.pong = asyncio.Event()
        self.handle(_ECHO, self._echo)
        # Answers the daemon's measurements of its links; these nodes measure none themselves.
        LinkProber(self)

    def measured(self, connection: PeerConnection, rtt_s: float) -> None:
        super().measured(connection, rtt_s)
        self.pong.set()

    async def _echo(self, _peer: str, body: bytes, stream: PeerStream) -> None:
        stream.send(body)


class _Nodes:
    """Each method answers one question of the parent."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._sequence = 0

    async def open(self, folders: list[str]) -> list[int]:
        """Start a node per folder, named as its place; returns their ports."""
        for folder in map(Path, folders):
            node = _Node(NodeSettings(folder, folder.parent.name, "bench", "127.0.0.1", 0, mdns=False))
            await node.open()
            self.nodes.append(node)
            self._tasks.append(asyncio.create_task(node.run()))
        return [node.port for node in self.nodes]

    async def meet(self, ports: dict[str, int]) -> None:
        """Tell every node these addresses, and wait until each can use all nodes that it is paired with."""
        for node in self.nodes:
            for node_id, port in ports.items():
                if node_id != node.identity.node_id:
                    node.reached(node_id, ("127.0.0.1", port))
        for node in self.nodes:
            await _until(node, partial(_meets_all, node))

    async def ping(self, count: int, pause_s: float) -> list[float]:
        """Round trips of session pings, one after the other."""
        node, connection = self._first()
        session = connection._session
        assert session is not None
        found = []
        for _ in range(count):
            asked = time.perf_counter()
            # As the session does by itself when it is time.
            nonce = session.ping(time.monotonic())
            connection._flush()
            while nonce in session.life._unanswered:
                node.pong.clear()
                await node.pong.wait()
            found.append(time.perf_counter() - asked)
            await asyncio.sleep(pause_s)
        return found

    async def ask(self, count: int, pause_s: float) -> list[float]:
        """Round trips of requests with a short answer, one after the other."""
        node, connection = self._first()
        found = []
        for _ in range(count):
            asked = time.perf_counter()
            await node.ask(connection.node_id, _ECHO, _BODY, within_s=_WITHIN_S)
            found.append(time.perf_counter() - asked)
            await asyncio.sleep(pause_s)
        return found

    def _first(self) -> tuple[_Node, PeerConnection]:
        node = self.nodes[0]
        connection = node.connection(next(iter(node.mesh.peers)))
        if connection is None:
            raise RuntimeError("the nodes have not met")
        return node, connection

    async def tell_cards(self) -> None:
        """From now on every node tells its card as often as a daemon that has nothing new to say."""

        async def tell() -> None:
            while True:
                self._sequence += 1
                for node in self.nodes:
                    node.publish(self._card(node))
                await asyncio.sleep(limits.CARD_REPEAT_S)

        self._tasks.append(asyncio.create_task(tell()))

    async def passed(self, node_id: str) -> int:
        """Bytes that all sessions with one machine have carried so far, both ways."""
        connections = [node.connection(node_id) for node in self.nodes]
        return sum(_passed(connection) for connection in connections if connection is not None)

    async def admit(self, folder: str) -> float:
        """Seconds from a member's admission at the first node until all know it."""
        identity = await asyncio.to_thread(Identity.load_or_create, Path(folder))
        first, *others = self.nodes
        begun = time.perf_counter()
        first.roster.admit(identity.certificate, "newcomer", True)
        saved = asyncio.create_task(first.roster_changed())
        for node in others:
            await _until(node, partial(_knows, node, identity.node_id))
        took_s = time.perf_counter() - begun
        await saved
        return took_s

    async def publish(self) -> float:
        """Seconds from a new card at the first node until all have it."""
        self._sequence += 1
        first, *others = self.nodes
        me = first.identity.node_id

        def has(node: Node) -> bool:
            card = node.mesh.cards.get(me)
            return card is not None and card.sequence == self._sequence

        begun = time.perf_counter()
        first.publish(self._card(first))
        for node in others:
            await _until(node, partial(has, node))
        return time.perf_counter() - begun

    async def close(self) -> None:
        for node in self.nodes:
            await node.goodbye()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _card(self, node: Node) -> Card:
        models = [
            ModelCard(
                name=f"organisation/model-{number}-instruct-4bit",
                digest=f"{number:064d}",
                revision=f"{number:040d}",
                source="hub",
                roles=["chat"],
                memory_bytes=600_000_000,
                shape=ModelShape("llama", weights_bytes=98_351_304, context_tokens=8192),
            )
            for number in range(_MODELS)
        ]
        machine = MachineFacts("linux", "A machine", "A chip", 8, 16 << 30, "small", "cpu")
        return Card(
            node.identity.node_id,
            node.epoch,
            self._sequence,
            name=node.name,
            software="bench",
            machine=machine,
            models=models,
        )


def _meets_all(node: Node) -> bool:
    return all(peer.usable for peer in node.mesh.peers.values())


def _knows(node: Node, member: str) -> bool:
    return member in node.roster.members


async def _until(node: Node, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not condition():
            await node.changed.wait()


def _passed(connection: PeerConnection) -> int:
    if connection._transport is None:
        return 0
    shared = connection._transport.get_extra_info("socket")
    with socket.socket(fileno=socket.dup(shared.fileno())) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    taken, sent = struct.unpack_from("=QQ", info, _TAKEN_AT)
    return int(taken) + int(sent)


def main() -> None:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def make() -> _Nodes:
        return _Nodes()

    def wait(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    nodes = wait(make())

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        method = question.pop("do")
        return {"found": wait(getattr(nodes, method)(**question))}

    try:
        serve(answer)
    finally:
        wait(nodes.close())


if __name__ == "__main__":
    main()
