"""Memory of groups: all machines promise it, or none; real sessions, workers that only look like workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import tiny_architectures
from fakes import WITHIN_S
from sharing_fakes import DIGEST, HelperMachine, HomePartners, machines, own_card

from fleetd import limits
from fleetd.engine.protocol import HOP_IN, HOP_OUT, STAGE, Accepted, Event, ServeStage, StreamTag
from fleetd.engine.settings import GroupMember, WorkerSettings
from fleetd.errors import GroupLost, InvalidValue, MembersApart, NotFound, OutOfMemory, PeerUnreachable
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.memory_need import WeightRules, layer_bytes
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.node import Node
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupPart
from fleetd.requests.admission import ServingContext
from fleetd.requests.groups import messages
from fleetd.requests.groups.client import FleetGroup, _AskedMember
from fleetd.requests.groups.known_hops import KnownHops
from fleetd.requests.groups.messages import LinkQuestion, StageQuestion, StageTold
from fleetd.requests.groups.server import StageServer, _HeldStage
from fleetd.requests.promised_memory import OwnPromise, PromisedMemory
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.remote.peer_stream import next_message

LAYERS = 3
GPU = WeightRules("metal", budget_bytes=1 << 40)


class StageWorker:
    """Holds layers until it is cancelled."""

    facts = None

    def __init__(self, first: int, last: int) -> None:
        self.settings = WorkerSettings(name="m", path="m", first_layer=first, last_layer=last)
        self.given: list[str] = []

    async def serve(self, stage: ServeStage) -> AsyncGenerator[Event, None]:
        yield Accepted(stage.id, stage.tokens)
        await asyncio.Event().wait()

    async def give_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        self.given.append(tag.name)
        sock.close()


class StagePool:
    """Loads what it is asked for, at once or when ``loads`` is set; ``used``: the parts that are held now."""

    def __init__(self) -> None:
        self.loads = asyncio.Event()
        self.loads.set()
        self.used: list[tuple[int, int]] = []
        self.worker = StageWorker(0, 0)

    @contextlib.asynccontextmanager
    async def assisting(
        self, folder: Any, first: int, last: int, *, progress: Any, asked_by: str
    ) -> AsyncIterator[StageWorker]:
        self.used.append((first, last))
        try:
            await asyncio.sleep(0)
            await self.loads.wait()
            self.worker = StageWorker(first, last)
            yield self.worker
        finally:
            self.used.remove((first, last))

    def held_of(self, folder: Any, first: int, last: int) -> int:
        return 0

    async def let_go(self, folder: Any, first: int, last: int) -> None:
        pass


class OneModel:
    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder

    def resolve(self, ref: str) -> ModelFolder:
        return self._folder


class MemberMachine:
    """A machine that has room for one part."""

    def __init__(self, machine: HelperMachine, folder: ModelFolder, room_bytes: int) -> None:
        self.node, self.pool, self.promised = machine.node, StagePool(), PromisedMemory()
        card = own_card(machine.node.name)
        context = ServingContext(OneModel(folder), lambda: card, draining=lambda: False)  # type: ignore[arg-type]
        self.server = StageServer(
            BulkDialer(machine.node),
            self.pool,  # type: ignore[arg-type]
            context,
            promised=self.promised,
            free_bytes=lambda: room_bytes,
            rules=lambda: GPU,
        )
        machine.node.handle(messages.SERVE, self.server)
        machine.node.handle(messages.LINK, self.server.link)

    @property
    def idle(self) -> bool:
        return not self.pool.used and not self.promised.outstanding_bytes and not self.server._held


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("tiny")
    tiny_architectures.write(path, "llama", num_hidden_layers=LAYERS)
    return read_folder(path, name="m", source="folder", revision=None)


def group(front: Node, *members: Node, fetching: Sequence[str] = (), **options: Any) -> FleetGroup:
    """A layer on each machine, this one first. ``fetching``: the names of those that lack their layers."""
    names = [(front.identity.node_id, front.name), *((node.identity.node_id, node.name) for node in members)]
    parts = [
        GroupPart(
            GroupMachine(node_id, name, 1 << 30, 1e9, 1000, LAYERS if name in fetching else None),
            number,
            number + 1,
        )
        for number, (node_id, name) in enumerate(names)
    ]
    return FleetGroup(HomePartners(front), "m", DIGEST, GroupCut(tuple(parts), 16), **options)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  (states of several servers, which announce nothing)
            await asyncio.sleep(0.01)


async def until_idle(members: list[MemberMachine]) -> None:
    await until(lambda: all(member.idle for member in members))


@pytest.mark.parametrize("turned", [False, True])
async def test_of_two_groups_over_the_same_machines_one_gets_all_and_the_other_none(
    tmp_path: Path, folder: ModelFolder, turned: bool
) -> None:
    async with machines(tmp_path, 3) as (one, (other, *helpers)):
        # For one layer and the tokens, not for two.
        room = 3 * max(layer_bytes(folder.path, folder.config, "").layers) // 2
        members = [MemberMachine(helper, folder, room) for helper in helpers]
        nodes = [member.node for member in members]
        groups = [group(one, *nodes), group(other.node, *(reversed(nodes) if turned else nodes))]
        async with asyncio.timeout(WITHIN_S):
            forming = (each.form(lambda told: None) for each in groups)
            outcomes = await asyncio.gather(*forming, return_exceptions=True)
        assert sorted(type(outcome) for outcome in outcomes if outcome is not None) == [OutOfMemory]
        refused = groups[next(n for n, outcome in enumerate(outcomes) if outcome is not None)]
        refused.close()
        (held,) = [each for each in groups if each is not refused]
        await until(lambda: all(len(member.pool.used) == 1 for member in members))
        # Once it has ended, the other one may have all of them.
        held.close()
        await until_idle(members)
        again = group(one, *nodes)
        async with asyncio.timeout(WITHIN_S):
            await again.form(lambda told: None)
        again.close()
        await until_idle(members)
        for member in members:
            await member.server.close()


class FetchingServer(StageServer):
    """Lacks the layers until ``fetched`` is set."""

    def __init__(self, machine: MemberMachine) -> None:
        vars(self).update(vars(machine.server))
        self.fetched, self.asked = asyncio.Event(), asyncio.Event()

    async def _folder(self, peer: str, ask: StageQuestion, stream: Any) -> ModelFolder:
        if not self.fetched.is_set():
            stream.send(messages.encode(StageTold("copying", 1, 2)))
            self.asked.set()
            await self.fetched.wait()
        return await super()._folder(peer, ask, stream)


async def test_no_memory_is_promised_while_a_machine_fetches_its_layers(
    tmp_path: Path, folder: ModelFolder
) -> None:
    async with machines(tmp_path, 2) as (front, helpers):
        members = [MemberMachine(each, folder, folder.weights_bytes) for each in helpers]
        server = FetchingServer(members[1])
        members[1].node.handle(messages.SERVE, server)
        members[1].node.handle(messages.FETCH, server.fetch)
        made = group(front, *(each.node for each in members), fetching=[members[1].node.name])
        partners: Any = made._partners
        forming = asyncio.create_task(made.form(lambda told: None))
        await asyncio.wait_for(server.asked.wait(), WITHIN_S)
        assert [method for _, method in partners.asked] == [messages.FETCH]
        assert not any(each.promised.outstanding_bytes for each in members)
        server.fetched.set()
        await asyncio.wait_for(forming, WITHIN_S)
        assert [method for _, method in partners.asked][1:3] == [messages.SERVE] * 2
        assert all(each.promised.outstanding_bytes for each in members)
        made.close()
        await until_idle(members)
        for member in members:
            await member.server.close()


async def test_a_group_that_has_ended_ends_once(tmp_path: Path, folder: ModelFolder) -> None:
    """Members that lost each other are left apart from then on, not from when their model is unloaded."""
    now = [1000.0]
    hops = KnownHops(lambda: now[0])
    async with machines(tmp_path, 2) as (front, helpers):
        made = group(front, *(each.node for each in helpers), hops=hops)
        made._engine = SimpleNamespace(error=MembersApart("helper1 is not reached any more"))  # type: ignore[assignment]
        made.close()
        with pytest.raises(PeerUnreachable):
            hops.check(made._pairs)
        now[0] += limits.GROUP_RELAY_S + 1
        made.close()
        hops.check(made._pairs)


async def test_a_machine_without_room_is_named_and_the_others_give_theirs_back(
    tmp_path: Path, folder: ModelFolder
) -> None:
    async with machines(tmp_path, 2) as (home, helpers):
        rooms = (folder.weights_bytes, 1000)
        members = [MemberMachine(helper, folder, room) for helper, room in zip(helpers, rooms, strict=True)]
        made = group(home, *(member.node for member in members))
        with pytest.raises(OutOfMemory, match=r"helper1: Layers 2 to 3 of m need .* promised to no group"):
            async with asyncio.timeout(WITHIN_S):
                await made.form(lambda told: None)
        made.close()
        await until_idle(members)
        for member in members:
            await member.server.close()


async def test_a_member_that_is_alive_and_never_loads_ends_the_group_and_its_promise(
    tmp_path: Path, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUP_LOAD_S", 3 * limits.GROUP_BEAT_S)
    async with machines(tmp_path, 2) as (home, helpers):
        members = [MemberMachine(helper, folder, folder.weights_bytes) for helper in helpers]
        members[1].pool.loads = asyncio.Event()
        lost: list[str] = []
        made = group(
            home,
            *(member.node for member in members),
            failed=lambda node_id, error: lost.append(node_id),
            load_s=lambda part: 0.0,
        )
        with pytest.raises(GroupLost, match="helper1: It says that it is alive, and gets no further"):
            async with asyncio.timeout(WITHIN_S):
                await made.form(lambda told: None)
        assert lost == [members[1].node.identity.node_id]
        assert members[1].promised.outstanding_bytes
        made.close()
        await until_idle(members)
        for member in members:
            await member.server.close()


async def test_members_open_streams_to_each_other(tmp_path: Path, folder: ModelFolder) -> None:
    async with formed(tmp_path, folder) as (made, members):
        assert [member.direct for member in made.members] == [True, True]
        await until(lambda: all(len(member.pool.worker.given) == 2 for member in members))
        assert sorted(members[0].pool.worker.given) == [HOP_OUT, STAGE]
        assert sorted(members[1].pool.worker.given) == [HOP_IN, STAGE]


async def test_members_that_do_not_reach_each_other_are_reached_from_here(
    tmp_path: Path, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = BulkDialer.connect

    async def refused(self: BulkDialer, node_id: str, invited: Invitation) -> socket.socket:
        if self._node.name == "helper0":
            raise PeerUnreachable("No route to host.")
        return await connect(self, node_id, invited)

    monkeypatch.setattr(BulkDialer, "connect", refused)
    with structlog.testing.capture_logs() as logs:
        async with formed(tmp_path, folder) as (made, members):
            assert [member.direct for member in made.members] == [False, False]
            await until(lambda: all(member.pool.worker.given == [STAGE] for member in members))
    (told,) = [line for line in logs if line["event"] == "group.relayed"]
    assert told["reason"] == (
        "Hidden states from helper0 to helper1 pass through this machine: No route to host."
    )


def test_members_that_lost_each_other_are_linked_again_after_a_while() -> None:
    now_s = [0.0]
    hops = KnownHops(lambda: now_s[0])
    hops.broke([("a", "b"), ("b", "c")])
    with pytest.raises(PeerUnreachable, match="a short while ago"):
        hops.check([("x", "a"), ("b", "c")])
    hops.check([("b", "a"), ("a", "c")])
    now_s[0] = limits.GROUP_RELAY_S
    hops.check([("a", "b")])


async def test_a_stream_is_opened_once_and_for_those_who_asked(tmp_path: Path, folder: ModelFolder) -> None:
    async with formed(tmp_path, folder) as (made, members):
        stranger = messages.encode(LinkQuestion("another"))
        again = messages.encode(LinkQuestion(made.id))
        for body in (stranger, again):
            stream = made._partners.request(members[1].node.identity.node_id, messages.LINK, body)
            with pytest.raises(NotFound, match="No such layers wait"):
                await stream.receive()


async def test_a_machine_that_asks_twice_under_one_name_gets_the_layers_once(
    tmp_path: Path, folder: ModelFolder
) -> None:
    async with formed(tmp_path, folder) as (made, members):
        member = members[0]
        ask = messages.encode(StageQuestion("m", DIGEST, made.id, 1, 2, 1))
        stream = made._partners.request(member.node.identity.node_id, messages.SERVE, ask)
        assert messages.decode(await next_message(stream) or b"", StageTold).stage == "promised"
        with pytest.raises(InvalidValue, match="for this group already"):
            await next_message(stream)
        # The first ones are still those of the group, and are let go of with it.
        assert list(member.server._held) == [(made._partners.node_id, made.id)]
    assert not member.server._held


async def test_layers_of_a_group_that_has_just_ended_are_let_go_of_before_the_server_ends(
    tmp_path: Path, folder: ModelFolder
) -> None:
    async with machines(tmp_path, 1) as (_, (helper,)):
        member = MemberMachine(helper, folder, folder.weights_bytes)
        held = member.server._held["home", "group"] = _HeldStage()
        # As the end of its request does, of which no step was made when the daemon ends.
        member.server._background.start(member.server._free(("home", "group"), folder, (0, 1)))
        await member.server.close()
        assert held.freed.is_set()
        assert member.idle


@contextlib.asynccontextmanager
async def formed(
    tmp_path: Path, folder: ModelFolder
) -> AsyncIterator[tuple[FleetGroup, list[MemberMachine]]]:
    """A group of three machines; then it ends, and nothing is left of it."""
    async with machines(tmp_path, 2) as (home, helpers):
        members = [MemberMachine(helper, folder, folder.weights_bytes) for helper in helpers]
        made = group(home, *(member.node for member in members))
        try:
            async with asyncio.timeout(WITHIN_S):
                await made.form(lambda told: None)
            yield made, members
        finally:
            made.close()
            await until_idle(members)
            for member in members:
                await member.server.close()


def test_what_a_worker_holds_by_now_is_not_counted_twice() -> None:
    promised, held = PromisedMemory(), [0]
    with promised.promise("these", 100, 150, lambda: held[0]):
        with pytest.raises(OutOfMemory), promised.promise("those", 60, 150):
            pass
        assert promised.outstanding_bytes == 100
        held[0] = 100
        # Of 150 bytes, 100 are held by now.
        with promised.promise("those", 50, 50):
            assert promised.outstanding_bytes == 50
            # One that holds more than it was promised takes nothing of what others were.
            held[0] = 130
            assert promised.outstanding_bytes == 50
    assert promised.outstanding_bytes == 0


def test_this_machine_promises_its_own_part_once_and_only_when_its_turn_has_come() -> None:
    promised = PromisedMemory()
    own = OwnPromise(partial(promised.promise, "ours", 100, 150))
    assert promised.outstanding_bytes == 0
    for _ in range(2):
        own.make(lambda: 30)
        assert promised.outstanding_bytes == 70
    for _ in range(2):
        own.close()
        assert promised.outstanding_bytes == 0
    with pytest.raises(OutOfMemory):
        OwnPromise(partial(promised.promise, "ours", 151, 150)).make(lambda: 0)


def test_of_layers_that_are_copied_first_the_bytes_that_came_are_said() -> None:
    machine = GroupMachine("n1", "kitchen", 1000, 0, layer_bytes=100)
    asked = _AskedMember(GroupPart(machine, 15, 30), GroupMember(15, 30, "m1", "kitchen"))
    said = []
    for told in (StageTold("copying", 4, 10), StageTold("verifying"), StageTold("reading", 1, 2)):
        asked.hear(told, 0.0)
        said.append((asked.progress.stage, asked.progress.done_bytes, asked.progress.total_bytes))
    assert said == [("copying", 4, 10), ("verifying", 0, 1500), ("reading", 750, 1500)]
