"""Hidden states that members of a group send to each other: the same bytes as through the worker that
answers, which they do not pass; and what is gone is named."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_programs
import mlx.core as mx
import pytest
import set_speeds
import tiny_architectures
from family_params import few
from forked_programs import Programs
from group_machines import Group, group_of
from msgspec.structs import replace
from request_events import RequestEvents
from sharing import prompt, settle, workers, write
from worker_groups import GroupStreams, answered, group

from fleetd import limits
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.failures import MemberLost
from fleetd.engine.groups.messages import HopLost
from fleetd.engine.protocol import HOP_IN, Delta
from fleetd.engine.streams.frames import FrameHeader
from fleetd.errors import FleetError, GroupLost

CUTS = (1, 3)
PROMPT_TOKENS = 300
# Silence that ends a group here: some beats, for a thread that beats may wait for its turn on a busy machine.
# What does not notice it waits for a whole step's time, which is minutes.
SHORT = {"GROUP_SILENT_S": 4.0}
NOTICED_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sooner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers for which a machine is lost after a shorter silence."""
    if not forked_programs.AVAILABLE:
        yield
        return
    log = tmp_path_factory.mktemp("programs") / "log"
    made = Programs(log, limits=set_speeds.LIMITS | SHORT, install=["set_speeds"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", made.exec)
        yield
    made.close()


def hidden_bytes(tokens: int) -> int:
    """Of so many tokens, between two layers on a CPU."""
    return 4 * tokens * int(tiny_architectures.config_of("llama")["hidden_size"])


@pytest.mark.one_loop
async def test_hidden_states_do_not_pass_through_the_worker_that_answers(model: Path) -> None:
    asked = [prompt(f"r{n}", PROMPT_TOKENS, seed=n, shared=False, max_tokens=12) for n in range(3)]
    async with workers(model, 1) as (whole,):
        expected = [(await answered(whole, request)).numbers for request in asked]
    least = hidden_bytes(len(asked) * PROMPT_TOKENS)
    for direct in (True, False):
        streams = GroupStreams()
        async with group(model, *CUTS, direct=direct, streams=streams) as (front, *_):
            several = await asyncio.gather(*(answered(front, request) for request in asked))
            assert [told.numbers for told in several] == expected
            stages = several[0].finished.stages
            assert [stage.relayed for stage in stages] == [False, False, not direct]
            assert all(stage.steps for stage in stages)
        first, last = streams.to
        assert first.carried[0] > least
        if direct:
            (hop,) = streams.hops
            assert hop.carried[0] > least
            # Back comes what steps took, and from the last one hidden states of the answers' tokens alone.
            assert max(first.carried[1], last.carried[0], last.carried[1]) < least / 2
        else:
            assert min(first.carried[1], last.carried[0]) > least


@pytest.mark.one_loop
async def test_streams_between_members_end_with_the_group(model: Path) -> None:
    streams = GroupStreams()
    async with group(model, *CUTS, streams=streams) as (front, *_):
        told = await answered(front, prompt("r", 60, shared=False, max_tokens=3))
        assert told.error is None
        await front.stop()
        await settle(lambda: all(hop.ended for hop in streams.hops))


@pytest.mark.one_loop
async def test_a_cancelled_answer_over_three_machines_leaves_nothing_behind(model: Path) -> None:
    async with workers(model, 1) as (whole,):
        right = await answered(whole, prompt("next", 60, shared=False, max_tokens=8))
    async with group(model, *CUTS) as (front, *_):
        events = front.stream(prompt("long", 50, shared=False, max_tokens=2000))
        async for event in events:
            if isinstance(event, Delta):
                break
        await events.aclose()
        told = await answered(front, prompt("next", 60, shared=False, max_tokens=8))
        assert told.numbers == right.numbers


Fault = Callable[[list[EngineProcess], GroupStreams], None]


def signalled(member: int, number: int) -> Fault:
    def strike(members: list[EngineProcess], _streams: GroupStreams) -> None:
        pid = members[member].pid
        assert pid is not None
        os.kill(pid, number)

    return strike


FAULTS: dict[str, tuple[Fault, str]] = {
    "the first is killed": (signalled(0, signal.SIGKILL), "machine 0"),
    "the last is killed": (signalled(1, signal.SIGKILL), "machine 1"),
    "the first is stopped": (signalled(0, signal.SIGSTOP), "machine 0"),
    "the last is stopped": (signalled(1, signal.SIGSTOP), "machine 1"),
    "their stream is reset": (lambda _, streams: streams.hops[0].cut(), "machine 1"),
    "their cable is pulled": (lambda _, streams: streams.hops[0].hold(), "machine 1"),
}


@pytest.mark.one_loop
@pytest.mark.usefixtures("sooner")
@pytest.mark.parametrize("fault", few(FAULTS, set(FAULTS) - {"the last is killed", "the first is stopped"}))
async def test_what_is_gone_is_named_in_time(model: Path, fault: str) -> None:
    strike, name = FAULTS[fault]
    streams, told, struck = GroupStreams(), RequestEvents(), False
    async with group(model, *CUTS, streams=streams) as (front, *members):
        try:
            async with asyncio.timeout(NOTICED_S):
                async for event in front.stream(prompt("long", 50, shared=False, max_tokens=3000)):
                    told.events.append(event)
                    if len(told.of(Delta)) == 3 and not struck:
                        struck = True
                        strike(members, streams)
        except FleetError as error:
            told.error = error
        for member in members:
            member.kill()
    assert isinstance(told.error, GroupLost), told.error
    assert told.error.message.startswith(name), told.error


# ---- one process -----------------------------------------------------------------------------------------


@pytest.fixture
def three(on_cpu: None) -> Group:
    return group_of(tiny_architectures.tiny("llama"), *CUTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda head, data: [(replace(head, index=7), data)],
            "machine 2 is not reached any more by machine 1",
        ),
        (
            lambda head, data: [(replace(head, sizes=(len(data) - 4, 0)), data[:-4])],
            "machine 2 left the group: Hidden states of .* were due",
        ),
    ],
    ids=["another block", "too few bytes"],
)
def test_a_hop_that_is_not_due_is_refused(
    three: Group, change: Callable[[FrameHeader, bytes], list[tuple[FrameHeader, bytes]]], said: str
) -> None:
    three.hops[0].tamper = change
    three.pipes[0].heard_s = math.inf
    with pytest.raises(MemberLost, match=said):
        three.model(mx.array([[1, 2]]), three.model.make_cache())


@pytest.mark.parametrize("teller", [0, 1])
def test_of_two_members_the_one_that_is_heard_after_their_stream_broke_is_there(
    three: Group, teller: int
) -> None:
    """The last word of the one that is gone may come after that of the other one."""
    stages, pipe, told_s = three.model.members, three.pipes[0], 100.0
    stages.stages[teller].hops_lost.append((HopLost(to_next=teller == 0), told_s))
    for heard_s in (told_s - 0.2, told_s, told_s + limits.GROUP_BEAT_S / 4):
        pipe.heard_s = heard_s
        for after_s in (0.0, limits.GROUP_BEAT_S, limits.GROUP_SILENT_S - 0.01):
            stages._check_hops(heard_s + after_s)
        with pytest.raises(MemberLost, match="machine 1 was silent"):
            stages._check_hops(heard_s + limits.GROUP_SILENT_S + 0.01)
    pipe.heard_s = told_s + limits.GROUP_BEAT_S
    with pytest.raises(MemberLost, match="machine 2 is not reached any more by machine 1"):
        stages._check_hops(pipe.heard_s + 0.01)


def test_a_stream_that_comes_late_is_waited_for(three: Group) -> None:
    """The daemon has handed it over, and the process has not looked yet."""
    late, _ = three.members[1], three.members[0]
    hops = late.hops
    pipe, hops._before = hops._before, None
    cache = three.model.make_cache()
    flight = three.model.begin(mx.array([[1, 2]]), cache)
    three.members[0].step()
    assert not late.ready
    assert late.due_s is not None
    assert pipe is not None
    hops.open(HOP_IN, lambda _name, _place: pipe)
    assert late.ready
    expected = group_of(tiny_architectures.tiny("llama"), *CUTS, direct=False)
    right = expected.model(mx.array([[1, 2]]), expected.model.make_cache())
    assert mx.array_equal(flight.logits(), right)


def test_a_block_that_is_taken_back_is_not_waited_for(three: Group) -> None:
    """Its hidden states come later, and are passed over."""
    model, (first, last) = three.model, three.members
    cache = model.make_cache()
    model(mx.array([[1, 2]]), cache)
    wrong = model.begin(mx.array([[3]]), cache)
    for each in cache:
        each.trim(1)
    model.undo([wrong])
    # The last one knows, before the first has computed or skipped anything.
    assert last.ready
    last.step()
    right = model.begin(mx.array([[4]]), cache)
    first.step()
    expected = group_of(tiny_architectures.tiny("llama"), *CUTS, direct=False)
    other = expected.model.make_cache()
    expected.model(mx.array([[1, 2]]), other)
    assert mx.array_equal(right.logits(), expected.model(mx.array([[4]]), other))
