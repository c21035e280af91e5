"""A model whose layers are divided between workers says what it says whole: the same tokens, by sums that are
added up in another order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked_programs
import psutil
import pytest
from asking import GREEDY
from forked_programs import Programs
from rank_workers import TOKENS, places, ranks
from request_events import RequestEvents
from sharing import LAYERS, prompt, worker_settings, workers, write
from test_group_workers import answered

from fleetd import limits
from fleetd.engine.daemon_side.rank_watch import RankWatch
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Delta, Generate, TextPrompt
from fleetd.engine.settings import GroupMember
from fleetd.errors import FleetError, GroupLost
from fleetd.models.folder import ModelFolder

pytestmark = pytest.mark.one_loop

# How far sums of f32 in another order move a log-probability: 1e-5 over the 60 sums of SmolLM2's 30 layers.
# This is ten times that. Weights that are quantised become the same f32 as on one machine.
ROUNDING = 1e-4


@pytest.fixture(autouse=True)
def patient_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of this process: a thread that beats may wait for its turn on a busy machine."""
    monkeypatch.setattr(limits, "RANK_SILENT_S", 15.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


def requests() -> list[Generate]:
    return [prompt(f"r{n}", 100 + 50 * n, seed=n, shared=False, max_tokens=12) for n in range(4)]


def assert_alike(ours: RequestEvents, theirs: RequestEvents) -> None:
    assert ours.error is None
    assert [token for token, *_ in ours.numbers] == [token for token, *_ in theirs.numbers]
    mine, others = ([logprob for _, logprob, *_ in told.numbers] for told in (ours, theirs))
    assert mine == pytest.approx(others, abs=ROUNDING)


async def expected(path: Path, asked: Sequence[Generate]) -> list[RequestEvents]:
    """What one worker says that has the whole model."""
    async with workers(path, 1, cpu_arithmetic="float32") as (whole,):
        return [await answered(whole, request) for request in asked]


async def test_ranks_answer_as_the_whole_model_alone_and_four_at_a_time(model: Path) -> None:
    right = await expected(model, requests())
    async with ranks(model, 2) as (front, *_):
        assert front.facts is not None
        assert front.facts.speculation.startswith("exact")
        alone = [await answered(front, request) for request in requests()]
        together = await asyncio.gather(*(answered(front, request) for request in requests()))
    for told in (alone, together):
        for ours, theirs in zip(told, right, strict=True):
            assert_alike(ours, theirs)


async def test_a_second_turn_finds_the_first_in_memory_on_every_rank(model: Path) -> None:
    first = prompt("one", 300, seed=3, shared=False, max_tokens=8)
    second = prompt("two", 340, seed=3, shared=False, max_tokens=8)
    right = await expected(model, [first, second])
    async with ranks(model, 2) as (front, *_):
        assert_alike(await answered(front, first), right[0])
        told = await answered(front, second)
        assert told.finished.usage.cached_tokens == right[1].finished.usage.cached_tokens > 0
        assert_alike(told, right[1])


async def test_a_cancelled_answer_leaves_the_ranks_in_step(model: Path) -> None:
    (right,) = await expected(model, [requests()[1]])
    async with ranks(model, 2) as (front, *_):
        events = front.stream(prompt("long", 50, shared=False, max_tokens=2000))
        async for event in events:
            if isinstance(event, Delta):
                break
        await events.aclose()
        assert_alike(await answered(front, requests()[1]), right)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_gone_or_stopped_ends_the_answer_and_every_rank(
    model: Path, rank: int, number: int
) -> None:
    async with ranks(model, 2) as made:
        told, killed = RequestEvents(), asyncio.Event()
        lost = made[rank].pid
        assert lost is not None

        async def ask() -> None:
            try:
                async for event in made[0].stream(prompt("long", 50, shared=False, max_tokens=2000)):
                    told.events.append(event)
                    if len(told.of(Delta)) == 3:
                        os.kill(lost, number)
                        killed.set()
            except FleetError as error:
                told.error = error

        asking, waiting = asyncio.create_task(ask()), asyncio.create_task(killed.wait())
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert killed.is_set(), told.error
        # An engine that is silent without being a rank has a minute.
        await asyncio.wait_for(asking, limits.ENGINE_STALL_S / 2)
        assert told.error is not None
        if number == signal.SIGSTOP or rank:
            assert isinstance(told.error, GroupLost)
        # What the daemon of each machine does once it hears that the group is over.
        await asyncio.gather(*(engine.stop() for engine in made))
        assert not any(engine.pid and psutil.pid_exists(engine.pid) for engine in made)


async def test_a_ring_whose_other_rank_never_comes_is_given_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = places(2)[0]
    asked = (GroupMember(0, LAYERS, "member1", "machine 1"),)
    front = EngineProcess(
        worker_settings(model, group=asked, group_tokens=TOKENS, ring=place, cpu_arithmetic="float32")
    )
    # It accepts, waits without a limit, and none of its threads runs meanwhile.
    monkeypatch.setattr(RankWatch, "late", given_up)
    try:
        await front.start()
        with pytest.raises(GroupLost):
            async for _ in front.loaded():
                pass
    finally:
        await front.stop()
    assert front.pid is not None
    assert not psutil.pid_exists(front.pid)


@pytest.mark.skipif(not forked_programs.AVAILABLE, reason="limits of workers are set as they are forked")
async def test_a_ring_that_is_not_formed_in_time_is_a_loss_of_the_group(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no death of a worker: the request goes another way."""
    programs = Programs(tmp_path / "workers.log", limits={"RING_FORM_S": 1.0})
    monkeypatch.setattr(asyncio, "create_subprocess_exec", programs.exec)
    # So seldom that the kernel would have been first.
    monkeypatch.setattr(limits, "RANK_LOOK_S", 0.5)
    asked = (GroupMember(0, LAYERS, "member1", "machine 1"),)
    settings = worker_settings(model, group=asked, group_tokens=TOKENS, ring=places(2)[0])
    front = EngineProcess(settings)
    try:
        await front.start()
        with pytest.raises(GroupLost, match="did not all come in time"):
            async for _ in front.loaded():
                pass
    finally:
        await front.stop()
        programs.close()


async def given_up(watch: RankWatch, process: Any, silent_s: Any) -> GroupLost:
    """As if the time that ranks have to find each other were over as soon as it begins."""
    while not watch._progress.under_way:  # noqa: ASYNC110 - another process sets it
        await asyncio.sleep(0.05)
    return watch._lost("The ring did not form")


# Three ranks on fewer cores: each waits for another one to have its turn.
@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(600)
async def test_three_ranks_of_smollm2_say_what_it_says_whole(embedded_model: ModelFolder) -> None:
    """Its nine heads and three pairs of keys and values are for three."""
    asked = [
        Generate(f"s{n}", TextPrompt(text), GREEDY, max_tokens=5, top_logprobs=1)
        for n, text in enumerate(("Once upon a time", "The capital of France is", "def add(a, b):"))
    ]
    right = await expected(embedded_model.path, asked)
    async with ranks(embedded_model.path, 3, layers=30, speculation="off") as (front, *_):
        told = await asyncio.gather(*(answered(front, request) for request in asked))
    for ours, theirs in zip(told, right, strict=True):
        assert_alike(ours, theirs)
