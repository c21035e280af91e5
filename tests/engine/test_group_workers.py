"""A model over several workers: real processes, real sockets; only the daemons are played here."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from asking import folder_of
from msgspec.structs import replace
from request_events import RequestEvents
from sharing import LAYERS, prompt, workers, write
from worker_groups import LABEL, TOKENS, answered, group

from fleetd import limits
from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.protocol import Delta
from fleetd.engine.sampling.parameters import Sampling
from fleetd.errors import FleetError, GroupLost, OutOfMemory
from fleetd.models import digest as digests

pytestmark = pytest.mark.one_loop


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("cuts", [pytest.param((2,), marks=pytest.mark.long), (1, 3)])
async def test_a_group_of_workers_answers_as_the_whole_model(model: Path, cuts: tuple[int, ...]) -> None:
    requests = [prompt(f"r{n}", 100 + 50 * n, seed=n, shared=False, max_tokens=12) for n in range(4)]
    async with workers(model, 1) as (whole,):
        expected = [(await answered(whole, request)).numbers for request in requests]
    async with group(model, *cuts) as (front, *_):
        for request, right in zip(requests, expected, strict=True):
            told = await answered(front, request)
            assert told.error is None
            assert told.numbers == right
            check_stages(told.finished.stages, cuts)
        several = await asyncio.gather(*(answered(front, request) for request in requests))
        assert [told.numbers for told in several] == expected


async def test_a_prompt_for_which_the_other_machines_have_no_room_is_refused(tmp_path: Path) -> None:
    """Windows take little here, and other machines promised rows for so many tokens."""
    async with group(write(tmp_path / "windows", "gemma3_text"), 2) as (front, *_):
        told = await answered(front, prompt("long", 3 * TOKENS // 4, shared=False, max_tokens=1))
        assert isinstance(told.error, OutOfMemory)
        assert f"room for {3 * TOKENS // 4}" in told.error.message
        assert (await answered(front, prompt("fits", 300, shared=False, max_tokens=9))).error is None


def check_stages(stages: Sequence[GroupStage], cuts: tuple[int, ...]) -> None:
    """Each machine has its layers, its name and its times."""
    ends = [0, *cuts, LAYERS]
    assert [(stage.first, stage.last) for stage in stages] == list(itertools.pairwise(ends))
    assert [stage.name for stage in stages] == ["", *(f"machine {n}" for n in range(len(cuts)))]
    assert all(stage.steps and stage.computed_s > 0 for stage in stages)
    assert [stage.way_s > 0 for stage in stages] == [False] + [True] * len(cuts)


async def test_sampled_answers_are_those_of_the_whole_model(model: Path) -> None:
    asked = [
        prompt(f"s{n}", 90, seed=n, shared=False, max_tokens=10, sampling=Sampling(temperature=1.0, seed=n))
        for n in range(3)
    ]
    async with workers(model, 1) as (whole,):
        expected = [(await answered(whole, request)).numbers for request in asked]
    async with group(model, 2) as (front, *_):
        assert [(await answered(front, request)).numbers for request in asked] == expected
        several = await asyncio.gather(*(answered(front, request) for request in asked))
        assert [told.numbers for told in several] == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_member_that_is_gone_ends_the_answer_with_its_name(model: Path, number: int) -> None:
    async with group(model, 2) as (front, member):
        told = RequestEvents()

        async def ask() -> None:
            try:
                async for event in front.stream(prompt("long", 50, shared=False, max_tokens=2000)):
                    told.events.append(event)
                    if len(told.of(Delta)) == 3 and member.pid is not None:
                        os.kill(member.pid, number)
            except FleetError as error:
                told.error = error

        await asyncio.wait_for(ask(), 60)
        assert isinstance(told.error, GroupLost)
        assert "machine 0" in told.error.message
        assert front.state == "failed"
        member.kill()


@pytest.mark.parametrize("cuts", [pytest.param((2,), marks=pytest.mark.long), (1, 3)])
async def test_a_prompt_comes_back_from_the_disks_after_a_restart(
    model: Path, tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    # One disk for all: what is kept there has other names for each part.
    blocks = DiskCacheSettings(str(tmp_path / "kv"), str(tmp_path / "kv.key"), limits.GIB)
    store = BlockStore(blocks)
    store.add_origin(LABEL, "asker")
    asked = prompt("first", 3 * limits.CACHE_BLOCK_TOKENS + 20, shared=False, max_tokens=12)
    kept = {"blocks": blocks, "cache": str(tmp_path / "cache"), "record": str(tmp_path / "record.json")}
    digests.records(folder_of(model), Path(kept["record"]))
    async with group(model, *cuts, **kept) as (front, *_):
        first = await answered(front, asked)
        assert first.error is None
    assert sum(each.blocks for each in store.report().models) == 3 * (len(cuts) + 1)
    async with group(model, *cuts, **kept) as (front, *_):
        again = await answered(front, replace(asked, id="again"))
    assert again.numbers == first.numbers
    assert again.finished.timings.restored_tokens == 3 * limits.CACHE_BLOCK_TOKENS
    # What the machine that asks had written goes with it.
    assert store.forget_machine("asker") == [LABEL]
    store.close()
    async with group(model, *cuts, **kept) as (front, *_):
        anew = await answered(front, replace(asked, id="anew"))
    assert anew.numbers == first.numbers
    assert anew.finished.timings.restored_tokens == 0


async def test_a_group_does_not_believe_the_verdict_of_the_whole_model(model: Path, tmp_path: Path) -> None:
    kept = {"cache": str(tmp_path / "cache"), "record": str(tmp_path / "record.json")}
    digests.digest(folder_of(model), Path(kept["record"]))
    verdicts = tmp_path / "cache" / "verdicts"
    async with workers(model, 1, **kept):
        (whole,) = verdicts.iterdir()
    async with group(model, 2, **kept) as (front, *_):
        assert front.facts is not None
        assert front.facts.speculation.startswith("exact")
    assert len([*verdicts.iterdir()]) == 2
    assert whole.exists()


async def test_a_cancelled_answer_frees_the_members_for_the_next(model: Path) -> None:
    async with group(model, 2) as (front, _):
        events = front.stream(prompt("long", 50, shared=False, max_tokens=2000))
        async for event in events:
            if isinstance(event, Delta):
                break
        await events.aclose()
        told = await answered(front, prompt("next", 60, shared=False))
        assert told.error is None
        assert told.finished.reason == "length"
