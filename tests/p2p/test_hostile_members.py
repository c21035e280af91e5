"""What a paired machine that means ill, or is broken, tries; tests are named after it. The victim is real."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_nodes import card, introduce, running, settings, together, until
from structlog.testing import capture_logs

from fleetd import limits
from fleetd.errors import FleetError, ModelNotFound, Overloaded, PeerUnreachable
from fleetd.models.copy import client
from fleetd.models.copy.messages import CopyOffer, OfferedFile
from fleetd.models.folder import ModelFolder
from fleetd.models.pull_lines import PullProgress
from fleetd.p2p import bulk_connections, link_prober
from fleetd.p2p.actions import Dial
from fleetd.p2p.link_prober import LinkProber
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.node import Node
from fleetd.p2p.peers import PeerSession
from fleetd.p2p.session import tls, transport
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Hello
from fleetd.p2p.session.transport import PeerConnection, PeerStream
from fleetd.requests.model_copies import MODEL_OFFER, MODEL_SEND, ModelCopies, Order
from fleetd.sealed.chunks import HEADER_BYTES, TAG_BYTES, Sealer

PATIENCE_S = 60.0


class Nobody:
    """An owner that hears nothing and keeps none of the rules of a mesh."""

    def __getattr__(self, name: str) -> Any:
        return lambda *told: None


class Villain:
    """A member with a key of its own, and as many sessions as it likes."""

    def __init__(self, folder: Path, victim: Node) -> None:
        self.identity = Identity.load_or_create(folder)
        self.victim = victim
        self.sessions: list[PeerConnection] = []

    async def call(self) -> PeerConnection:
        me, it = self.identity, self.victim.identity
        hello = Hello(PROTOCOL_VERSIONS, me.node_id, "villain", 1, "x", bytes(16), 1)
        dial = Dial(("127.0.0.1", self.victim.port), it.node_id)
        made = PeerConnection(Nobody(), hello, {it.node_id}, dialled=dial)
        context = tls.client_context(me, [it.certificate])
        await transport.connect(made, dial.address, context)
        self.sessions.append(made)
        return made


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(settings(tmp_path, "victim"))
    async with running(node):
        yield node


Recruit = Callable[[str], Awaitable[Villain]]


@pytest.fixture
async def recruit(tmp_path: Path, victim: Node) -> AsyncIterator[Recruit]:
    made: list[Villain] = []

    async def one(name: str) -> Villain:
        made.append(Villain(tmp_path / name, victim))
        victim.roster.admit(made[-1].identity.certificate, name, True)
        await victim.roster_changed()
        return made[-1]

    yield one
    for session in [session for each in made for session in each.sessions]:
        session.abort(PeerUnreachable("The test is over."))
        await session.gone.wait()


@pytest.fixture
async def villain(recruit: Recruit) -> Villain:
    return await recruit("villain")


def sessions(node: Node) -> int:
    return len(node.connections)


# ---- sessions and requests -------------------------------------------------------------------------------


async def test_one_machine_cannot_open_sessions_without_end(victim: Node, villain: Villain) -> None:
    """Requests run on each of them, so that none may be closed merely for having been replaced."""
    victim.handle("hang", hang)
    for _ in range(limits.SESSIONS_PER_PEER):
        (await villain.call()).request("hang", b"")
    await until(victim, lambda: sessions(victim) == limits.SESSIONS_PER_PEER)
    assert not any(session.is_closed for session in villain.sessions)
    last = await villain.call()
    async with asyncio.timeout(PATIENCE_S):
        await villain.sessions[0].gone.wait()
    assert not last.is_closed
    await until(victim, lambda: sessions(victim) == limits.SESSIONS_PER_PEER)


async def hang(_peer: str, _body: bytes, _stream: PeerStream) -> None:
    await asyncio.Event().wait()


async def outcome(stream: PeerStream) -> type[FleetError] | None:
    """What a request is refused with, None for one that is served."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await stream.receive()
    except FleetError as error:
        return type(error)
    return None


async def say_so(_peer: str, _body: bytes, stream: PeerStream) -> None:
    stream.send(b"served")
    await asyncio.Event().wait()


async def test_requests_are_counted_over_all_sessions_of_a_machine(victim: Node, villain: Villain) -> None:
    left = asyncio.Event()

    async def leaving(peer: str, body: bytes, stream: PeerStream) -> None:
        try:
            await say_so(peer, body, stream)
        finally:
            left.set()

    victim.handle("say so", leaving)
    asked = []
    for _ in range(2):
        session = await villain.call()
        asked += [session.request("say so", b"") for _ in range(limits.PEER_REQUESTS // 2)]
    assert {await outcome(stream) for stream in asked} == {None}
    assert await outcome(villain.sessions[0].request("say so", b"")) is Overloaded
    asked[0].cancel()
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()
    assert await outcome(villain.sessions[0].request("say so", b"")) is None


async def test_bodies_of_requests_at_work_count_as_memory(
    victim: Node, villain: Villain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SESSION_HELD_BYTES", 100_000)
    victim.handle("say so", say_so)
    session = await villain.call()
    first = session.request("say so", bytes(60_000))
    assert await outcome(first) is None
    assert await outcome(session.request("say so", bytes(60_000))) is Overloaded
    assert await outcome(session.request("say so", bytes(30_000))) is None


async def test_a_request_that_is_worked_off_frees_its_bytes(
    victim: Node, villain: Villain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the asker never ends its side; and a handler that reads on gets messages of any size."""
    monkeypatch.setattr(limits, "SESSION_HELD_BYTES", 2_000_000)

    async def length(_peer: str, _body: bytes, stream: PeerStream) -> None:
        stream.send(b"%d" % len(await stream.receive() or b""))

    victim.handle("length", length)
    victim.handle("deaf", deaf)
    session = await villain.call()
    for _ in range(4):
        stream = session.request("length", bytes(700_000))
        stream.send(bytes(900_000))
        async with asyncio.timeout(PATIENCE_S):
            assert await stream.receive() == b"900000"
            assert await stream.receive() is None
            assert await session.request("deaf", bytes(700_000)).receive() is None


async def deaf(_peer: str, _body: bytes, _stream: PeerStream) -> None:
    """Done without a word."""


# ---- handshakes ------------------------------------------------------------------------------------------


async def test_handshakes_that_break_leave_nothing_behind(victim: Node) -> None:
    def flood() -> None:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", victim.port)) as sock:
                sock.sendall(b"\x16\x03\x01\x00\x05hello")
                with contextlib.suppress(OSError):
                    sock.recv(100)

    await asyncio.to_thread(flood)
    async with asyncio.timeout(PATIENCE_S):
        while victim.connections:  # noqa: ASYNC110  nobody is told of it
            await asyncio.sleep(0.01)


# ---- measurements ----------------------------------------------------------------------------------------


async def take_up(session: PeerConnection) -> tuple[socket.socket, bytes]:
    """Begin a measurement: its stream, and what seals it."""
    stream = session.request(link_prober.METHOD, b"")
    async with asyncio.timeout(PATIENCE_S):
        answer = await stream.receive()
    assert answer is not None
    assert session.address is not None
    invited = link_prober.invitation(answer)
    return await bulk_connections.connect(session.address, invited.ticket), invited.key


async def test_stalled_measurements_cannot_take_all_threads(
    victim: Node, recruit: Recruit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of one machine, which take turns, nor those of several together."""
    monkeypatch.setattr(limits, "LINK_PROBE_WITHIN_S", 100.0)  # none ends by itself meanwhile
    LinkProber(victim)
    with contextlib.ExitStack() as held:
        for number in range(limits.LINK_PROBES):
            session = await (await recruit(f"{number}")).call()
            held.enter_context(contextlib.closing((await take_up(session))[0]))
            for _ in range(limits.PEER_REQUESTS - 1):
                session.request(link_prober.METHOD, b"")
        assert (
            await outcome((await (await recruit("late")).call()).request(link_prober.METHOD, b""))
            is Overloaded
        )
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(lambda: None)


async def test_a_stalled_measurement_ends_in_time(
    victim: Node, villain: Villain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though bytes trickle in: then no single read would ever time out."""
    monkeypatch.setattr(limits, "LINK_PROBE_WITHIN_S", 3.0)
    LinkProber(victim)
    over = threading.Event()
    swallow = link_prober.serve_burst

    def swallowing(sock: socket.socket, key: bytes) -> None:
        try:
            swallow(sock, key)
        finally:
            over.set()

    monkeypatch.setattr(link_prober, "serve_burst", swallowing)
    sock, key = await take_up(await villain.call())
    sealed = bytearray(HEADER_BYTES + 1000 + TAG_BYTES)
    Sealer(key, "connector").seal_into(memoryview(bytes(1000)), memoryview(sealed))
    with contextlib.closing(sock):
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                for byte in sealed:
                    await loop.sock_sendall(sock, bytes([byte]))
                    await asyncio.sleep(0.02)
    assert await asyncio.to_thread(over.wait, PATIENCE_S)
    (await take_up(villain.sessions[0]))[0].close()


async def test_an_address_that_resets_connections_does_not_end_the_daemon(
    victim: Node, villain: Villain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is on the network can claim by mDNS that a member is there."""

    async def reset(*_: Any) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    await villain.call()
    peer = victim.mesh.peers[villain.identity.node_id]
    claimed = ("127.0.0.1", victim.port)
    peer.paths.add(claimed, "mdns", asyncio.get_running_loop().time())
    # What the kernel says when the reset is faster than the first byte, which is a matter of luck.
    monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_sendall", reset)
    with pytest.raises(PeerUnreachable, match=r"closed at once \(Connection reset by peer\)"):
        await bulk_connections.connect(claimed, bytes(32))


# ---- copies of models ------------------------------------------------------------------------------------

DIGEST = "d" * 64


class Library:
    """``ModelStore``, as far as copies of one model go."""

    models_dir = Path("nowhere")

    def __init__(self, *names: str) -> None:
        self.names = names

    def resolve(self, ref: str) -> ModelFolder:
        if ref not in self.names:
            raise ModelNotFound(f"There is no {ref}.")
        return ModelFolder(ref, Path("nowhere"), "folder", None, {}, 1, 0.0)

    async def pull(self, ref: str) -> AsyncIterator[PullProgress]:
        yield PullProgress("from where it was published", 1, 1, "downloading")

    def drop_parts(self) -> None:
        """There are none."""


def copies(node: Node, *names: str) -> ModelCopies:
    own = card(node, models=[ModelCard(name, digest=DIGEST) for name in names])
    return ModelCopies(node, Library(*names), lambda: own)  # type: ignore[arg-type]


async def test_attack_machines_that_a_member_invented_do_not_outvote_one_that_is_known(
    victim: Node, villain: Villain, tmp_path: Path
) -> None:
    """Of a model's name alone: which files bear it is what most of the machines say that have it."""
    known = Identity.load_or_create(tmp_path / "known")
    victim.roster.admit(known.certificate, "known", True)
    invented = [Identity.load_or_create(tmp_path / f"invented {number}") for number in range(2)]
    for each in invented:
        entry = RosterRecord(each.certificate, "invented", villain.identity.node_id, 1, False, True, b"")
        signed = msgspec.structs.replace(entry, signature=villain.identity.sign(entry.signed_bytes()))
        victim.roster.merge([signed])
    await victim.roster_changed()
    now = asyncio.get_running_loop().time()
    for digest, holders in ((DIGEST, [known]), ("e" * 64, invented)):
        for each in holders:
            victim.mesh.peers[each.node_id].link = PeerSession(0, each.node_id, False, 1, None, b"", now)
            models = [ModelCard("ours/chat", digest=digest)]
            victim.mesh.cards.accept(Card(each.node_id, 1, 1, models=models), each.node_id, now)
    with capture_logs() as lines:
        async for _ in copies(victim).pull("ours/chat"):
            pass
    assert [line["peer"] for line in lines if line["event"] == "copy.begins"] == ["known"]


async def test_copies_do_not_start_processes_without_end(
    victim: Node, villain: Villain, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = asyncio.Event()

    async def send(_folder: Path, _needs: list[Any], sock: socket.socket, _key: bytes) -> None:
        with sock:
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

    monkeypatch.setattr(client, "send", send)
    copies(victim, "big")
    session = await villain.call()
    order = msgspec.msgpack.encode(Order(DIGEST, []))
    asked = [session.request(MODEL_SEND, order) for _ in range(limits.COPIES_GIVEN)]
    for stream in asked:
        async with asyncio.timeout(PATIENCE_S):
            invited = link_prober.invitation(await stream.receive() or b"")
        (await bulk_connections.connect(("127.0.0.1", victim.port), invited.ticket)).close()
    assert await outcome(session.request(MODEL_SEND, order)) is Overloaded
    asked[0].cancel()
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()
    assert await outcome(session.request(MODEL_SEND, order)) is None


async def test_a_machine_that_never_answers_holds_up_no_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COPY_OFFER_S", 0.2)
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    offer = CopyOffer("folder", None, [OfferedFile("model.safetensors", 1, "0" * 64)])

    async def offering(_peer: str, _body: bytes, stream: PeerStream) -> None:
        stream.send(msgspec.msgpack.encode(offer))

    async def receive(*told: Any, **_: Any) -> AsyncIterator[PullProgress]:
        sock, _key = await told[2]([])
        sock.close()
        yield PullProgress("a copy", 1, 1, "copying")

    monkeypatch.setattr(client, "receive", receive)
    b.handle(MODEL_OFFER, offering)
    b.handle(MODEL_SEND, hang)
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        b.publish(card(b, models=[ModelCard("big", digest=DIGEST)]))
        await until(a, lambda: len(a.mesh.cards))
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(copies(a).pull("big")) as steps:
            assert [step.file async for step in steps] == ["from where it was published"]
