"""Pairing between real nodes on loopback: two services, one connection, two rosters on two disks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet_nodes import running, settings, together, until
from kept_objects import without_collector

from fleetd import limits
from fleetd.control.pairing_events import CodeShown, Crowded, Meeting, Paired, PairingEvent, WrongCode
from fleetd.errors import Overloaded, PairingClosed, PairingFailed, PeerUnreachable
from fleetd.p2p.discovery.discovered import DiscoveredPeer
from fleetd.p2p.links import Address
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile
from fleetd.p2p.node import Node
from fleetd.p2p.pairing import finding, roles
from fleetd.p2p.pairing import service as pairing
from fleetd.p2p.pairing.code import PairingCode
from fleetd.p2p.pairing.roles import Joiner
from fleetd.p2p.pairing.service import PairingService
from fleetd.p2p.port import PAIRING


def host(node: Node) -> str:
    return f"127.0.0.1:{node.port}"


async def invite(
    service: PairingService,
    shown: asyncio.Future[CodeShown],
    *,
    admit: bool = True,
    sees_prompts: bool = True,
) -> list[PairingEvent]:
    """`fleetctl pair` with a person who answers at once."""
    seen: list[PairingEvent] = []
    async with aclosing(service.pair()) as events:
        async for event in events:
            seen.append(event)
            if isinstance(event, CodeShown):
                shown.set_result(event)
            elif isinstance(event, Meeting):
                service.answer(event.node_id, admit=admit, sees_prompts=sees_prompts)
    return seen


async def collect(events: AsyncGenerator[PairingEvent, None]) -> list[PairingEvent]:
    async with aclosing(events):
        return [event async for event in events]


def saved(node: Node) -> set[str]:
    """Who is in the roster on the disk."""
    records = RosterFile(node.settings.folder / "roster").load()
    return set(Roster(node.identity, records).members)


async def pair(
    a: Node, b: Node, *, joiner_allows: bool = True, **answers: Any
) -> tuple[list[PairingEvent], list[PairingEvent]]:
    shown: asyncio.Future[CodeShown] = asyncio.get_running_loop().create_future()
    inviting = asyncio.create_task(invite(PairingService(a), shown, **answers))
    join = PairingService(b).join((await shown).code, host(a), sees_prompts=joiner_allows)
    joined = await collect(join)
    return await inviting, joined


async def test_a_code_pairs_two_machines(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        ours, theirs = await pair(a, b)
        assert [type(event) for event in ours] == [CodeShown, Meeting, Paired]
        assert [type(event) for event in theirs] == [Meeting, Paired]
        meeting_here, meeting_there = ours[1], theirs[0]
        assert isinstance(meeting_here, Meeting)
        assert isinstance(meeting_there, Meeting)
        assert meeting_here.phrase == meeting_there.phrase
        assert (meeting_here.name, meeting_there.name) == ("b", "a")
        # Before anybody is told, it is on both disks.
        assert saved(a) == {b.identity.node_id}
        assert saved(b) == {a.identity.node_id}
        await together([a, b])


async def test_the_inviters_answer_about_prompts_is_in_the_roster_of_the_fleet(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        ours, theirs = await pair(a, b, sees_prompts=False)
        assert not a.roster.members[b.identity.node_id].sees_prompts
        assert b.roster.members[a.identity.node_id].sees_prompts
        assert isinstance(ours[-1], Paired)
        assert isinstance(theirs[-1], Paired)
        assert (ours[-1].sees_prompts, theirs[-1].sees_prompts) == (False, True)


async def test_the_joiners_answer_about_prompts_is_a_rule_of_its_own(tmp_path: Path) -> None:
    """It speaks of prompts typed there; the other machines go on sending the inviter theirs."""
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    async with running(a, b, c):
        await pair(a, c)
        inviter = a.identity.node_id
        _, theirs = await pair(a, b, joiner_allows=False)
        assert isinstance(theirs[-1], Paired)
        assert not theirs[-1].sees_prompts
        await until(c, lambda: b.identity.node_id in c.roster.members)
        assert not b.prompt_rules.allows(inviter)
        assert all(node.roster.members[inviter].sees_prompts for node in (b, c))
        assert a.prompt_rules.allows(b.identity.node_id)
        # Paired again with another answer; what the fleet says is not the joiner's to change.
        c.roster.allow_prompts(inviter, False)
        await c.roster_changed()
        await until(b, lambda: not b.roster.members[inviter].sees_prompts)
        await pair(a, b)
        assert b.prompt_rules.allows(inviter)
        assert not any(node.roster.members[inviter].sees_prompts for node in (b, c))


@contextlib.asynccontextmanager
async def strangers(node: Node, count: int) -> AsyncGenerator[list[asyncio.StreamReader], None]:
    """Connections to the window that say nothing."""
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            stack.callback(writer.close)
            writer.write(PAIRING)
            await reader.read(1)  # the inviter's hello: it has a place
            readers.append(reader)
        yield readers


async def test_attack_silent_connections_do_not_keep_a_machine_from_pairing(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        shown: asyncio.Future[CodeShown] = asyncio.get_running_loop().create_future()
        inviting = asyncio.create_task(invite(PairingService(a), shown))
        code = (await shown).code
        async with strangers(a, 2 * limits.PAIRING_CONNECTIONS) as readers:
            async with asyncio.timeout(60):
                await readers[0].read()  # the oldest was closed
            joined = await collect(PairingService(b).join(code, host(a), sees_prompts=True))
        assert isinstance(joined[-1], Paired)
        seen = await inviting
        assert [type(event) for event in seen] == [CodeShown, Crowded, Meeting, Paired]
        assert seen[1] == Crowded(["127.0.0.1"]), "the person is told, once"


@pytest.mark.one_loop
async def test_fifty_calls_that_break_while_a_code_is_shown_are_freed_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    a, calls = Node(settings(tmp_path, "a")), limits.PAIRING_CONNECTIONS
    async with running(a):
        async with aclosing(PairingService(a).pair()) as events:
            assert isinstance(await anext(events), CodeShown)
            async with strangers(a, calls):
                pass
            with without_collector() as kept:
                for _ in range(-(-50 // calls)):
                    async with strangers(a, calls):
                        pass
                await kept.until_few(calls)
                assert kept.n_bytes < 1 << 20


async def test_attack_a_machine_that_has_the_code_does_not_give_way(tmp_path: Path) -> None:
    """However many connect while a person compares the phrase."""
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        service = PairingService(a)
        async with aclosing(service.pair()) as events:
            shown = await anext(events)
            assert isinstance(shown, CodeShown)
            join = PairingService(b).join(shown.code, host(a), sees_prompts=True)
            joining = asyncio.create_task(collect(join))
            met = await anext(events)
            assert isinstance(met, Meeting)
            async with strangers(a, 2 * limits.PAIRING_CONNECTIONS):
                service.answer(met.node_id, admit=True, sees_prompts=True)
                assert isinstance((await joining)[-1], Paired)
            assert [type(event) async for event in events] == [Crowded, Paired]


async def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        shown: asyncio.Future[CodeShown] = asyncio.get_running_loop().create_future()
        inviting = asyncio.create_task(invite(PairingService(a), shown, admit=False))
        with pytest.raises(PairingFailed, match="declined"):
            await collect(PairingService(b).join((await shown).code, host(a), sees_prompts=True))
        with pytest.raises(PairingFailed, match="declined"):
            await inviting
        assert saved(a) == saved(b) == set()
        assert not a.roster.members
        assert not b.roster.members


async def test_a_window_that_nobody_uses_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_WINDOW_S", 0.2)
    a = Node(settings(tmp_path, "a"))
    async with running(a):
        service = PairingService(a)
        with pytest.raises(PairingClosed, match="The code was not used"):
            await collect(service.pair())
        assert not service.is_open
        assert a.on_pairing_connection is None


@pytest.mark.one_loop
async def test_a_promised_change_that_cannot_be_kept_is_withdrawn_from_the_disk(tmp_path: Path) -> None:
    """The fleet was filled meanwhile."""
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        full = False

        def change(roster: Roster) -> object:
            if full:
                raise Overloaded("The fleet is full.")
            return roster.admit(b.identity.certificate, "b", True)

        await a.keeper.promise(change)
        assert saved(a) == {b.node_id}
        full = True
        with pytest.raises(Overloaded):
            a.keeper.keep(change)
        assert a.keeper._save_due.is_set()
        await a.keeper.save()
        assert saved(a) == set()


@pytest.mark.one_loop
async def test_a_person_may_answer_after_the_time_in_which_a_code_can_be_used(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b), asyncio.TaskGroup() as group:
        service, seen = PairingService(a), []
        async with aclosing(service.pair()) as events:
            async for event in events:
                seen.append(type(event))
                if isinstance(event, CodeShown):
                    join = PairingService(b).join(event.code, host(a), sees_prompts=True)
                    joining = group.create_task(collect(join))
                elif isinstance(event, Meeting):
                    assert service._open is not None
                    service._open.window.expires = 0.0
                    answer = partial(service.answer, event.node_id, admit=True, sees_prompts=True)
                    asyncio.get_running_loop().call_soon(answer)
        assert seen == [CodeShown, Meeting, Paired]
        await joining
    assert saved(a) == {b.node_id}


@pytest.mark.one_loop
async def test_a_person_who_never_answers_ends_the_pairing_on_both_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAIRING_ANSWER_S", 0.2)
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b), asyncio.TaskGroup() as group:
        shown: asyncio.Future[CodeShown] = asyncio.get_running_loop().create_future()
        service = PairingService(a)
        monkeypatch.setattr(service, "answer", lambda *_, **__: None)
        inviting = group.create_task(failure(invite(service, shown)))
        join = PairingService(b).join((await shown).code, host(a), sees_prompts=True)
        assert "gave up" in await failure(collect(join))
        assert "No person answered" in await inviting


async def failure(pairing: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(PairingFailed) as found:
        await pairing
    return found.value.message


@pytest.mark.one_loop
async def test_a_machine_that_breaks_off_with_the_right_code_has_used_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person is told so, and does not wait for another machine with a code that none can use."""

    def breaks(self: Joiner, message: object, now: float) -> list[roles.Event]:
        raise PairingFailed("It breaks off.")

    monkeypatch.setattr(Joiner, "_on_confirm", breaks)
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        shown: asyncio.Future[CodeShown] = asyncio.get_running_loop().create_future()
        inviting = asyncio.create_task(failure(invite(PairingService(a), shown)))
        join = PairingService(b).join((await shown).code, host(a), sees_prompts=True)
        assert await failure(collect(join)) == "It breaks off."
        assert "was changed on the way" in await inviting, "what is not sealed any more cannot be told apart"


@pytest.mark.one_loop
async def test_a_connection_that_tried_no_code_is_not_told_as_a_wrong_one(tmp_path: Path) -> None:
    """It was there while another one did."""
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        service = PairingService(a)
        shown: asyncio.Future[CodeShown] = asyncio.get_running_loop().create_future()
        inviting = asyncio.create_task(invite(service, shown))
        code = (await shown).code
        opened = service._open
        assert opened is not None
        with socket.create_connection(("127.0.0.1", a.port)) as idle:
            idle.sendall(PAIRING)
            await turns(lambda: opened.connections)
            wrong = code[:-1] + ("b" if code[-1] != "b" else "d")
            await failure(collect(PairingService(b).join(wrong, host(a), sees_prompts=True)))
        await turns(lambda: not opened.connections)
        await collect(PairingService(b).join(code, host(a), sees_prompts=True))
        assert [type(event) for event in await inviting] == [CodeShown, WrongCode, Meeting, Paired]


async def turns(condition: Callable[[], object]) -> None:
    """Turns of the loop until something holds that has no event."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.one_loop
async def test_attack_addresses_that_swallow_calls_hide_no_machine_and_prolong_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger announces the code's number at hundreds of them."""
    right, _ = ours = socket.socketpair()
    calls = most = 0

    async def open_socket(address: Address) -> socket.socket:
        nonlocal calls, most
        calls += 1
        most = max(most, calls)
        try:
            if address == ("10.0.0.9", 1):
                return right
            await asyncio.sleep(0 if address[0] == "10.0.0.8" else 3600)
            raise PeerUnreachable("It is silent.")
        finally:
            calls -= 1

    def claim(*addresses: Address) -> DiscoveredPeer:
        return DiscoveredPeer("a" * 56, "n", addresses, (1, 1), "42")

    monkeypatch.setattr("fleetd.p2p.session.transport.open_socket", open_socket)
    lies = [("10.0.0.8", port) for port in range(1, 200)]
    truth = ("10.0.0.9", 1)
    silent = [("10.0.0.7", port) for port in range(1, limits.DIALS_AT_ONCE)]
    seen = [claim(*lies), claim(*silent, truth)]
    with contextlib.ExitStack() as stack:
        for each in ours:
            stack.enter_context(each)
        assert await finding.find("42", lambda: seen) == (truth, right)
        assert most == limits.DIALS_AT_ONCE
        monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 0.2)
        with pytest.raises(PeerUnreachable, match="42 was found"):
            await finding.find("42", lambda: [claim(*silent, *silent, ("10.0.0.7", 99))])
    for _ in range(3):  # turns of the loop in which the calls end
        await asyncio.sleep(0)
    assert calls == 0


async def test_only_one_window_at_a_time(tmp_path: Path) -> None:
    a = Node(settings(tmp_path, "a"))
    async with running(a):
        service = PairingService(a)
        async with aclosing(service.pair()) as first:
            await anext(first)
            with pytest.raises(PairingClosed, match="open already"):
                await collect(service.pair())
        assert not service.is_open


async def test_nobody_there_is_said_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 0.2)
    a = Node(settings(tmp_path, "a"))
    async with running(a):
        with pytest.raises(PeerUnreachable, match="nothing listens"):
            await collect(PairingService(a).join("42-lusab-babad", "127.0.0.1:1", sees_prompts=True))
        with pytest.raises(PeerUnreachable, match="42"):
            await collect(PairingService(a).join("42-lusab-babad", None, sees_prompts=True))
        with pytest.raises(PairingFailed, match="not a pairing code"):
            await collect(PairingService(a).join("hello", None, sees_prompts=True))


async def test_a_removed_machine_can_be_paired_again(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        await pair(a, b)
        await together([a, b])
        a.roster.remove(b.identity.node_id)
        await a.roster_changed()
        await until(b, lambda: b.roster.removed_by is not None)
        await pair(a, b)
        await together([a, b])


async def test_a_machine_that_another_fleet_removed_can_be_let_in(tmp_path: Path) -> None:
    """Its records carry the removal of itself, by somebody whom the inviter never met."""
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    async with running(a, b, c):
        await pair(c, b)
        await together([b, c])
        c.roster.remove(b.identity.node_id)
        await c.roster_changed()
        await until(b, lambda: b.roster.removed_by is not None)
        await pair(a, b)
        await together([a, b])
        assert set(a.roster.members) == {b.identity.node_id}


async def test_an_inviter_that_was_removed_begins_a_fleet_of_its_own(tmp_path: Path) -> None:
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    async with running(a, b, c):
        await pair(a, c)
        await together([a, c])
        c.roster.remove(a.identity.node_id)
        await c.roster_changed()
        await until(a, lambda: a.roster.removed_by is not None)
        await pair(a, b)
        await together([a, b])
        assert set(b.roster.members) == {a.identity.node_id}
        assert a.roster.removed_by is None


async def test_a_machine_that_resets_the_connection_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However early the reset comes; when it does is a matter of luck."""

    async def reset(*_: Any) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_sendall", reset)
        with pytest.raises(PairingFailed, match="broke off"):
            await collect(
                PairingService(b).join(str(PairingCode.new(os.urandom)), host(a), sees_prompts=True)
            )
        monkeypatch.undo()


async def test_a_machine_that_takes_nothing_ends_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A roster may be longer than what the network holds for a reader that has stopped."""
    monkeypatch.setattr(limits, "PAIRING_STEP_S", 0.1)
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        side = Joiner(
            Identity.load_or_create(tmp_path / "b"),
            "b",
            PairingCode.new(os.urandom),
            loop.time(),
            random_bytes=os.urandom,
        )
        with contextlib.suppress(BlockingIOError):
            while True:
                here.send(bytes(1 << 16))
        async with asyncio.timeout(60):
            (event,) = [event async for event in pairing.exchange(side, here)]
    assert isinstance(event, roles.PairingBroke)
    assert "took too long" in str(event.error)
