"""A ring seen from the machine that answers: what the loss of a rank comes to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fleetd import limits
from fleetd.engine.protocol import CONNECTING, WAITING, Loading
from fleetd.errors import (
    FleetError,
    GroupLost,
    MemberGone,
    ModelUnsupported,
    OutOfMemory,
    Overloaded,
    PeerLost,
)
from fleetd.p2p.link_prober import Invitation
from fleetd.requests.promised_memory import OwnPromise
from fleetd.requests.ranks import messages
from fleetd.requests.ranks.client import FleetRanks, RankMachine
from fleetd.requests.ranks.messages import NextRank, RankTold
from fleetd.requests.remote.message_codec import ALIVE

pytestmark = pytest.mark.one_loop


class EndedStream:
    """A rank's stream, at its end."""

    def __init__(self, error: FleetError) -> None:
        self._error = error

    async def receive(self) -> bytes | None:
        raise self._error

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    "error",
    [OutOfMemory("No memory is left."), ModelUnsupported("It has no part of it."), PeerLost("It is gone.")],
)
async def test_a_rank_that_is_lost_later_is_a_loss_of_the_group_whatever_it_ended_with(
    error: FleetError,
) -> None:
    """A rank without memory may be heard of before its broken ring: the request goes another way all the
    same."""
    partners: Any = None
    ranks = FleetRanks(partners, "tiny", "digest", [RankMachine("node", "kitchen")], 2, 64)
    stream: Any = EndedStream(error)
    ranks._ranks[0].stream = stream
    try:
        with pytest.raises(GroupLost, match=f"kitchen: {error.message}"):
            await ranks.watch()
    finally:
        ranks.close()


class BrokenStream(EndedStream):
    """A rank's stream that ends once ``over`` is set."""

    def __init__(self, error: FleetError, over: asyncio.Event) -> None:
        super().__init__(error)
        self._over = over

    async def receive(self) -> bytes | None:
        await self._over.wait()
        return await super().receive()


async def test_the_rank_that_failed_is_named_and_not_one_that_saw_it_go() -> None:
    partners: Any = None
    machines = [RankMachine("node-b", "kitchen"), RankMachine("node-a", "studio")]
    ranks = FleetRanks(partners, "tiny", "digest", machines, 3, 64)
    over = asyncio.Event()
    saw: Any = EndedStream(MemberGone("Another rank is gone."))
    failed: Any = BrokenStream(GroupLost("A sum over the ranks was wrong."), over)
    ranks._ranks[0].stream, ranks._ranks[1].stream = saw, failed
    asyncio.get_running_loop().call_soon(over.set)
    try:
        with pytest.raises(GroupLost, match="studio: A sum over the ranks was wrong"):
            await ranks.watch()
    finally:
        ranks.close()


async def test_a_rank_that_saw_another_go_is_a_loss_if_no_other_says_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MEMBER_TELLS_S", 0.01)
    partners: Any = None
    ranks = FleetRanks(partners, "tiny", "digest", [RankMachine("node", "kitchen")], 2, 64)
    saw: Any = EndedStream(MemberGone("Another rank is gone."))
    ranks._ranks[0].stream = saw
    try:
        with pytest.raises(GroupLost, match="kitchen: Another rank is gone"):
            await ranks.watch()
    finally:
        ranks.close()


class LivingStream:
    """A rank's stream: it says that it waits for the others, and then that it is alive."""

    def __init__(self) -> None:
        self._told = [messages.encode(RankTold(f"{WAITING}the other ranks"))]
        self.beats = 0

    async def receive(self) -> bytes | None:
        if self._told:
            return self._told.pop()
        self.beats += 1
        await asyncio.sleep(0)
        return ALIVE

    def cancel(self) -> None:
        pass


async def test_a_rank_that_reads_its_weights_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RANKS_LOAD_S", 0.01)
    partners: Any = None
    ranks = FleetRanks(partners, "tiny", "digest", [RankMachine("node", "kitchen")], 2, 64)
    engine: Any = SimpleNamespace(facts=None, loading=SimpleNamespace(stage="reading"))
    stream: Any = LivingStream()
    ranks._ranks[0].stream = stream
    with pytest.raises(GroupLost, match="kitchen: It says that it is alive, and gets no further"):
        await ranks.connect(engine)
    ranks.close()


async def test_a_machine_that_never_says_where_a_rank_is_expected_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LOAD_STALL_S", 0.01)
    partners: Any = SimpleNamespace(request=lambda *_: LivingStream())
    ranks = FleetRanks(partners, "tiny", "d" * 64, [RankMachine("node", "kitchen")], 2, 64)
    following = NextRank("this", Invitation(bytes(32), bytes(32)))
    with pytest.raises(GroupLost, match="kitchen: It says that it is alive, and gets no further"):
        await ranks._asked(ranks._ranks[0], 1, following)
    ranks.close()


async def test_ranks_that_all_wait_for_each_other_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do over a link that carries nothing any more: a rank that reads its weights is waited for."""
    monkeypatch.setattr(limits, "RANKS_MEET_S", 0.01)
    partners: Any = None
    ranks = FleetRanks(partners, "tiny", "digest", [RankMachine("node", "kitchen")], 2, 64)
    engine: Any = SimpleNamespace(facts=None, loading=SimpleNamespace(stage="reading"))
    stream: Any = LivingStream()
    ranks._ranks[0].stream = stream
    connecting = asyncio.create_task(ranks.connect(engine))
    try:
        while stream.beats < 1000:  # noqa: ASYNC110  (each is a turn of the loop)
            await asyncio.sleep(0)
        assert not connecting.done()
        engine.loading.stage = CONNECTING
        with pytest.raises(GroupLost, match="kitchen: It says that it is alive, and gets no further"):
            await connecting
    finally:
        ranks.close()


class PromisingStream(EndedStream):
    """A rank's stream: there is memory for it."""

    def __init__(self) -> None:
        super().__init__(PeerLost("It says no more."))

    async def receive(self) -> bytes | None:
        return messages.encode(RankTold(before=Invitation(bytes(32), bytes(32))))


async def test_machines_promise_a_ring_memory_in_the_order_of_any_group() -> None:
    """Of two rings over the same machines one gets all of them: neither has what the other one waits for."""
    asked = list[str]()

    @contextlib.contextmanager
    def promise(_held: object) -> Iterator[None]:
        asked.append("home")
        yield

    @contextlib.contextmanager
    def expect() -> Iterator[object]:
        yield SimpleNamespace(ticket=bytes(32), key=bytes(32))

    def request(node_id: str, *_: object) -> PromisingStream:
        asked.append(node_id)
        return PromisingStream()

    async def connect(*_: object) -> None:
        raise PeerLost("There is no tunnel.")

    partners: Any = SimpleNamespace(node_id="home", request=request, expect=expect, connect=connect)
    machines = [RankMachine(node_id, node_id) for node_id in ("garage", "kitchen", "attic")]
    ranks = FleetRanks(partners, "tiny", "d" * 64, machines, 2, 64, OwnPromise(promise))
    with pytest.raises(GroupLost, match="kitchen: There is no tunnel"):
        await ranks.form(lambda told: None)
    ranks.close()
    assert asked == ["attic", "garage", "home", "kitchen"]


@pytest.mark.parametrize("ends", [True, False])
async def test_a_machine_whose_group_has_just_ended_is_asked_again(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank may take a while to end. One that stays a rank of another group says so."""
    if not ends:
        monkeypatch.setattr(limits, "TICKET_S", 0.0)
    busy = EndedStream(Overloaded("This machine is a rank of another group already."))
    answers: list[Any] = [busy, PromisingStream()]
    partners: Any = SimpleNamespace(request=lambda *_: answers.pop(0))
    ranks = FleetRanks(partners, "tiny", "d" * 64, [RankMachine("node", "kitchen")], 2, 64)
    following = NextRank("this", Invitation(bytes(32), bytes(32)))
    try:
        if ends:
            assert (await ranks._asked(ranks._ranks[0], 1, following)).node_id == "node"
        else:
            with pytest.raises(GroupLost, match="kitchen: This machine is a rank of another group already"):
                await ranks._asked(ranks._ranks[0], 1, following)
    finally:
        ranks.close()


class LoadingStream(PromisingStream):
    """A rank's stream: its machine loads another model first, until ``over`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()
        self._told = [RankTold(f"{WAITING}llama to load"), RankTold(before=Invitation(bytes(32), bytes(32)))]

    async def receive(self) -> bytes | None:
        if self._told:
            return messages.encode(self._told.pop())
        await self.over.wait()
        return messages.encode(RankTold("starting"))


async def test_no_rank_waits_in_vain_for_one_whose_machine_loads_another_model_first() -> None:
    """A process that waits for the others is ended after a while."""

    @contextlib.contextmanager
    def expect() -> Iterator[object]:
        yield SimpleNamespace(ticket=bytes(32), key=bytes(32), socket=nothing)

    async def nothing(*_: object) -> None:
        pass

    stream = LoadingStream()
    partners: Any = SimpleNamespace(node_id="home", request=lambda *_: stream, expect=expect, connect=nothing)
    ranks = FleetRanks(partners, "tiny", "d" * 64, [RankMachine("node", "kitchen")], 2, 64)
    ranks._links.close()
    links: Any = SimpleNamespace(
        goes_to=lambda *_: None, comes_from=lambda *_: None, agree=nothing, close=lambda: None
    )
    ranks._links = links
    said, waits = list[str](), asyncio.Event()

    def told(step: Loading) -> None:
        said.append(step.stage)
        if WAITING in step.stage:
            waits.set()

    forming = asyncio.create_task(ranks.form(told))
    await asyncio.wait({forming, wait := asyncio.create_task(waits.wait())}, return_when="FIRST_COMPLETED")
    assert not forming.done()
    await wait
    assert said[-1] == "kitchen: waiting for llama to load"
    stream.over.set()
    await forming
    ranks.close()
