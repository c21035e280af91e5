"""Nodes that really talk: sessions, requests, cards, roster changes, restarts, over TLS on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from fleet_nodes import card, introduce, running, settings, together, until

from fleetd.errors import Draining, IdentityRefused, InvalidValue, NotFound, NotPaired, PeerUnreachable
from fleetd.p2p import node as node_module
from fleetd.p2p.membership.roster_file import AddressFile
from fleetd.p2p.node import Node
from fleetd.p2p.overview import condition
from fleetd.p2p.session.transport import PeerConnection, PeerStream


async def echo(_peer: str, body: bytes, stream: PeerStream) -> None:
    stream.send(body)
    while (message := await stream.receive()) is not None:
        stream.send(message)


async def test_two_nodes_meet_and_answer_each_other(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    b.handle("echo", echo)
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        me, other = a.identity.node_id, b.identity.node_id
        assert await a.ask(other, "echo", b"hello", within_s=60) == b"hello"
        big = bytes(range(256)) * 12_000
        assert await a.ask(other, "echo", big, within_s=60) == big
        with pytest.raises(NotFound, match="nothing called 'nope'"):
            await b.ask(me, "nope", b"", within_s=60)


async def test_round_trips_are_finer_than_the_milliseconds_of_an_event_loop(tmp_path: Path) -> None:
    trips: asyncio.Queue[float] = asyncio.Queue()

    class Measuring(Node):
        def measured(self, connection: PeerConnection, rtt_s: float) -> None:
            trips.put_nowait(rtt_s)

    a, b = Measuring(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        await introduce(a, b)
        async with asyncio.timeout(60):
            rtt_s = await trips.get()
        assert rtt_s > 0
        assert round(rtt_s, 3) != pytest.approx(rtt_s, abs=1e-7)


async def test_what_a_handler_raises_arrives_with_its_code(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))

    async def refuse(_peer: str, _body: bytes, _stream: PeerStream) -> None:
        raise InvalidValue("It is too long.", hint="Make it shorter.", param="body")

    b.handle("refuse", refuse)
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        with pytest.raises(InvalidValue, match="too long") as caught:
            await a.ask(b.identity.node_id, "refuse", b"", within_s=60)
        assert (caught.value.hint, caught.value.param) == ("Make it shorter.", "body")


async def test_cancelling_a_request_cancels_its_handler(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    began, ended = asyncio.Event(), asyncio.Event()

    async def hang(_peer: str, _body: bytes, _stream: PeerStream) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    b.handle("hang", hang)
    async with running(a, b), asyncio.timeout(60):
        await introduce(a, b)
        await together([a, b])
        stream = a.request(b.identity.node_id, "hang", b"")
        await began.wait()
        stream.cancel()
        await ended.wait()


async def test_cards_reach_everybody_and_leave_with_their_node(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a):
        async with running(b):
            await introduce(a, b)
            await together([a, b])
            b.publish(card(b, running=3))
            await until(a, lambda: a.mesh.cards.get(b.identity.node_id) is not None)
            found = a.mesh.cards.get(b.identity.node_id)
            assert found is not None
            assert found.running == 3
        # It said good-bye.
        await until(a, lambda: a.mesh.cards.get(b.identity.node_id) is None)
        assert not a.mesh.peers[b.identity.node_id].usable
        with pytest.raises(PeerUnreachable):
            a.request(b.identity.node_id, "echo", b"")


async def test_a_third_node_becomes_known_to_all_by_gossip(tmp_path: Path) -> None:
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    async with running(a, b, c):
        await introduce(a, b)
        await together([a, b])
        await introduce(a, c)  # b hears of c, and where it is, from a
        await until(b, lambda: c.identity.node_id in b.mesh.peers)
        await together([a, b, c])
        assert set(c.roster.members) == {a.identity.node_id, b.identity.node_id}


async def test_where_a_machine_was_reached_is_kept_for_the_next_start(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        a.roster.admit(b.identity.certificate, "b", True)
        await a.roster_changed()
        b.roster.admit(a.identity.certificate, "a", True)
        await b.roster_changed()
        b.reached(a.identity.node_id, ("127.0.0.1", a.port))
        await together([a, b])
        # a was called, and has learned from that where b is.
        kept = {b.identity.node_id: [("127.0.0.1", b.port)]}
        async with asyncio.timeout(60):
            while AddressFile(tmp_path / "a" / "addresses.json").load() != kept:  # noqa: ASYNC110  files tell nobody
                await asyncio.sleep(0.01)


async def test_a_card_that_is_told_before_the_node_runs_waits_for_it(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    await a.open()
    await b.open()
    for node, other in ((a, b), (b, a)):
        node.roster.admit(other.identity.certificate, other.name, True)
        await node.roster_changed()
    # It knows whom to call, so it would do so at once.
    a.reached(b.identity.node_id, ("127.0.0.1", b.port))
    a.publish(card(a))
    async with running(a, b):
        await together([a, b])
        await until(b, lambda: a.identity.node_id in {known.node_id for known in b.mesh.cards})


async def test_unpairing_closes_live_sessions_at_once_everywhere(tmp_path: Path) -> None:
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    b.handle("echo", echo)
    async with running(a, b, c):
        await introduce(a, b, c)
        await together([a, b, c])
        stream = c.request(b.identity.node_id, "echo", b"x")
        assert await stream.receive() == b"x"
        a.roster.remove(c.identity.node_id)
        await a.roster_changed()
        await until(b, lambda: c.identity.node_id not in b.mesh.peers)
        assert b.connection(c.identity.node_id) is None
        with pytest.raises(NotPaired, match="unpaired"):
            await stream.receive()
        await until(c, lambda: c.roster.removed_by is not None)
        assert c.mesh.peers == {}
        # By name, although it belongs to c's fleet no more.
        assert c.name_of(c.roster.removed_by or "") == "a"
        assert b.name_of(c.identity.node_id) == "c"


async def test_a_copied_home_is_told_that_its_identity_is_in_use(tmp_path: Path) -> None:
    a, first = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, first):
        await introduce(a, first)
        await together([a, first])
        # Files that are just being written have other names.
        shutil.copytree(tmp_path / "b", tmp_path / "copy" / "b", ignore=shutil.ignore_patterns("*.new"))
        copy = Node(settings(tmp_path / "copy", "b"))
        async with running(copy):
            copy.reached(a.identity.node_id, ("127.0.0.1", a.port))
            peer = first.mesh.peers[a.identity.node_id]
            await until(first, lambda: isinstance(peer.trouble, IdentityRefused))
            loop = asyncio.get_running_loop()
            state, reason, _ = condition(peer, None, loop.time())
            assert state == "refused"
            assert "copy of its home" in reason
            link = a.mesh.peers[first.identity.node_id].link
            assert link is not None
            assert link.epoch == copy.epoch


async def test_each_side_hears_which_machine_it_is_that_stops(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    served = asyncio.Event()

    async def hang(_peer: str, _body: bytes, _stream: PeerStream) -> None:
        served.set()
        await asyncio.Event().wait()

    a.handle("hang", hang)
    async with running(a, b), asyncio.timeout(60):
        await introduce(a, b)
        await together([a, b])
        theirs = b.request(a.identity.node_id, "hang", b"")
        await served.wait()
        ours = a.request(b.identity.node_id, "nothing", bytes(1 << 20))
        await a.goodbye()
        with pytest.raises(Draining, match="This machine stops"):
            await ours.receive()
        with pytest.raises(Draining, match="This machine is stopping"):
            await theirs.receive()


async def test_a_machine_is_out_at_once_though_the_key_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making new TLS contexts reads files, and descriptors may be short; the session must not live on."""
    monkeypatch.setattr(node_module, "_RENEW_AGAIN_S", 0.05)
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    async with running(a, b, c):
        await introduce(a, b)
        await together([a, b])
        key, away = a.identity.key_file, tmp_path / "away"
        key.rename(away)
        a.roster.remove(b.identity.node_id)
        await a.roster_changed()
        assert not a.mesh.links
        await until(b, lambda: not b.mesh.links)
        # A newcomer gets in as soon as the file is back. However many changes failed, one timer tries again.
        timer = a._renewal
        await introduce(a, c)
        assert timer is not None
        assert timer.cancelled() or timer.when() < asyncio.get_running_loop().time()
        away.rename(key)
        await together([a, c])


async def test_a_node_that_is_cancelled_without_a_goodbye_takes_nothing_more(tmp_path: Path) -> None:
    """While its last tasks ended it was given requests and connections, for which nobody made a task."""
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    begun, over, broken = asyncio.Event(), asyncio.Event(), list[dict[str, Any]]()

    async def lingers(_peer: str, _body: bytes, _stream: PeerStream) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await over.wait()

    b.handle("linger", lingers)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    async with running(a):
        await b.open()
        await introduce(a, b)
        life = asyncio.create_task(b.run())
        await together([a, b])
        connection = a.connection(b.node_id)
        assert connection is not None
        connection.request("linger", b"")
        async with asyncio.timeout(60):
            await begun.wait()
            life.cancel()
            await asyncio.sleep(0)
            connection.request("linger", b"another")
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", b.port)).close()
            await connection.gone.wait()
            over.set()
            await asyncio.wait([life])
    assert not broken
