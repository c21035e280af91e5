"""Signs of life alone do not keep a request with another machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import pytest
from peer_streams import FakeStream, OnlyAlive
from virtual_loop import VirtualLoop

from fleetd import limits
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Loading,
    Prefill,
    TextPrompt,
    Timings,
    ToolCall,
    ToolCallPiece,
    Usage,
)
from fleetd.errors import PeerLost
from fleetd.requests.job import LOCAL, Job
from fleetd.requests.remote import messages, remote
from fleetd.requests.remote.answer_deadline import AnswerDeadline
from fleetd.requests.remote.messages import RanAt

STALL_S, TOK_S = limits.JOB_STALL_S, limits.JOB_LEAST_TOK_S


@pytest.mark.parametrize(
    ("before", "event", "due_s"),
    [
        ([], Loading("reading", 1, 9), limits.ENGINE_LOAD_S),
        ([], Accepted("r", 800), STALL_S + 800 / TOK_S),
        ([Accepted("r", 800)], Prefill("r", 300, 800), STALL_S + 500 / TOK_S),
        ([Prefill("r", 300, 800)], Prefill("r", 300, 800, image_steps=1), STALL_S + 500 / TOK_S),
        (
            [Prefill("r", 300, 800, image_steps=9)],
            Prefill("r", 310, 800, image_steps=9),
            STALL_S + 490 / TOK_S,
        ),
        ([Prefill("r", 800, 800)], Delta("r", "a"), STALL_S),
        ([], ToolCallPiece("r", 0, "c", "n", "{"), STALL_S),
        ([], ToolCall("r", 0, "c", "n", "{}"), STALL_S),
    ],
    ids=lambda value: type(value).__name__,
)
def test_progress_gives_time_for_the_next_step(before: list[Any], event: Any, due_s: float) -> None:
    deadline = AnswerDeadline(0.0, busy=False)
    for earlier in before:
        deadline.on_event(earlier, 5.0)
    deadline.on_event(event, 10.0)
    assert deadline.due_s == 10.0 + due_s


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ([Loading("reading", 5, 9)], Loading("reading", 5, 9)),
        ([Loading("reading", 5, 9)], Loading("reading", 4, 9)),
        ([Loading("reading", 5, 9)], Loading("reading", 6, 9)),
        ([Loading("reading", 5, 9)], Loading("warming up")),
        ([Accepted("r", 800)], Accepted("r", 800)),
        ([Delta("r", "a")], Prefill("r", 800, 800)),
        ([Prefill("r", 300, 800)], Prefill("r", 300, 800)),
        ([Prefill("r", 300, 800)], Prefill("r", 200, 800)),
        ([Prefill("r", 300, 800, image_steps=2)], Prefill("r", 300, 800, image_steps=2)),
        ([Prefill("r", 300, 800, image_steps=2)], Prefill("r", 300, 800, image_steps=1)),
        ([Prefill("r", 300, 800)], Prefill("r", 200, 800, image_steps=1)),
        ([Delta("r", "a")], Delta("r", "a", tokens=0)),
        ([], RanAt(("air",))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_progress_gives_no_time(before: list[Any], event: Any) -> None:
    deadline = AnswerDeadline(0.0, busy=False)
    for earlier in before:
        deadline.on_event(earlier, 5.0)
    due_s = deadline.due_s
    deadline.on_event(event, 10.0)
    assert deadline.due_s == due_s


def test_a_load_has_time_for_each_step_and_not_more_than_its_whole_time() -> None:
    deadline = AnswerDeadline(0.0, busy=True, load_within_s=60.0)
    deadline.on_event(Loading("waiting for another to load"), 1.0)
    assert deadline.due_s == 1.0 + limits.JOB_QUEUE_S
    deadline.on_event(Loading("reading", 5, 9), 10.0)
    assert deadline.due_s == 70.0
    for same in (Loading("reading", 5, 9), Loading("reading", 4, 9)):
        deadline.on_event(same, 20.0)
        assert deadline.due_s == 70.0
    deadline.on_event(Loading("reading", 6, 9), 30.0)
    assert deadline.due_s == 90.0
    deadline.on_event(Loading("warming up"), 40.0)
    assert deadline.due_s == 100.0


def test_attack_a_load_that_is_called_something_else_for_ever_is_over() -> None:
    deadline = AnswerDeadline(0.0, busy=True, load_within_s=60.0)
    crawls = (Loading(f"waiting for {n}", n, n) if n % 2 else Loading("reading", n, n) for n in range(4096))
    assert over(deadline, crawls, 1.0) == limits.ENGINE_LOAD_S


async def test_attack_a_load_that_stands_still_on_another_machine_is_given_up() -> None:
    stream = OnlyAlive([messages.encode(Loading("reading", 1, 9))])
    job = Job("m", Generate("r", TextPrompt("x")), "client", "chat")
    asked = remote.RemoteJob(lambda method, body: stream, job, "m", "", LOCAL, load_within_s=0.05)
    with pytest.raises(PeerLost, match="gets no further"):
        async for _ in asked.events():
            pass
    assert stream.cancelled


def test_a_machine_with_a_queue_has_longer_to_begin() -> None:
    assert AnswerDeadline(1.0, busy=False).due_s == 1.0 + limits.JOB_BEGIN_S
    assert AnswerDeadline(1.0, busy=True).due_s == 1.0 + limits.JOB_QUEUE_S


def test_images_are_sent_and_decoded_before_a_prompt_is_accepted() -> None:
    begin_s = limits.JOB_BEGIN_S + 3 * limits.JOB_IMAGE_BEGIN_S
    assert AnswerDeadline(1.0, busy=False, images=3).due_s == 1.0 + begin_s
    assert AnswerDeadline(1.0, busy=True, images=3).due_s == 1.0 + limits.JOB_QUEUE_S
    assert AnswerDeadline(1.0, busy=False, images=64).due_s == 1.0 + limits.JOB_QUEUE_S


def over(deadline: AnswerDeadline, events: Iterable[Any], every_s: float) -> float:
    """When a machine is given up that sends one of these in so many seconds."""
    now_s = 0.0
    for event in events:
        if now_s > deadline.due_s:
            return deadline.due_s
        deadline.on_event(event, now_s)
        now_s += every_s
    return math.inf


@pytest.mark.parametrize("planned_s", [None, 20.0])
def test_attack_a_prefill_that_crawls_is_over_by_the_plans_figures(planned_s: float | None) -> None:
    deadline = AnswerDeadline(0.0, busy=False, prefill_s=planned_s)
    crawls = [Accepted("r", 4000), *(Prefill("r", done, 4000) for done in range(4000))]
    whole_s = 4000 / TOK_S if planned_s is None else limits.JOB_LATE * planned_s
    assert over(deadline, crawls, STALL_S - 1) == limits.JOB_QUEUE_S + STALL_S + whole_s


def test_a_prompt_with_images_may_wait_before_they_are_read() -> None:
    """For memory, or for the same prompt of another client: that is told by nothing."""
    deadline = AnswerDeadline(0.0, busy=False, images=2)
    for event in (Accepted("r", 800), Prefill("r", 0, 800)):
        deadline.on_event(event, 10.0)
        assert deadline.due_s == 10.0 + STALL_S + 800 / TOK_S + 2 * limits.JOB_IMAGE_S
    deadline.on_event(Prefill("r", 0, 800, image_steps=1), 20.0)
    assert deadline.due_s == 20.0 + STALL_S + 800 / TOK_S


def test_each_image_has_its_time_and_not_more() -> None:
    deadline = AnswerDeadline(0.0, busy=False, images=2)
    steps = (Prefill("r", 0, 800, image_steps=n) for n in range(4096))
    most_s = limits.JOB_QUEUE_S + 2 * limits.JOB_IMAGE_S + STALL_S + 800 / TOK_S
    assert over(deadline, [Accepted("r", 800), *steps], STALL_S - 1) == most_s


def test_attack_an_answer_of_a_token_a_minute_is_over_before_long() -> None:
    crawls = [Accepted("r", 10), *[Delta("r", "a")] * 4096]
    over_s = over(AnswerDeadline(0.0, busy=False), crawls, STALL_S - 1)
    assert over_s < 2 * limits.JOB_QUEUE_S


@pytest.mark.parametrize("tok_s", [2 * limits.JOB_DECODE_TOK_S, 1.0, 15.0])
def test_a_slow_machine_has_the_time_that_its_answer_takes(tok_s: float) -> None:
    steady = [Accepted("r", 10), *[Delta("r", "a")] * 4096]
    assert over(AnswerDeadline(0.0, busy=False), steady, 1 / tok_s) == math.inf


@pytest.mark.parametrize("first", [(), (Accepted("r", 1), Delta("r", "a"))], ids=["at once", "after a token"])
async def test_attack_signs_of_life_without_progress(
    monkeypatch: pytest.MonkeyPatch, first: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(limits, "JOB_BEGIN_S", 0.05)
    monkeypatch.setattr(limits, "JOB_STALL_S", 0.05)
    monkeypatch.setattr(limits, "JOB_LEAST_TOK_S", 1e9)
    stream = OnlyAlive(messages.encode(event) for event in first)
    job = Job("m", Generate("r", TextPrompt("x")), "client", "chat")
    asked = remote.RemoteJob(lambda method, body: stream, job, "m", "", LOCAL, busy=False)
    with pytest.raises(PeerLost, match="gets no further"):
        async for _ in asked.events():
            pass
    assert stream.cancelled


def test_a_client_that_reads_slowly_costs_its_machine_nothing() -> None:
    """Longer than a machine without progress has, though no step of it."""
    events = [Accepted("r", 1), *[Delta("r", "a")] * 5, Finished("r", "stop", Usage(1, 0, 5, 0), Timings())]
    stream = FakeStream([messages.encode(event) for event in events])
    job = Job("m", Generate("r", TextPrompt("x"), max_tokens=5), "client", "chat")
    asked = remote.RemoteJob(lambda method, body: stream, job, "m", "", LOCAL, busy=False)

    async def read() -> list[Any]:
        seen = []
        async for event in asked.events():
            seen.append(event)
            await asyncio.sleep(limits.JOB_QUEUE_S)
        return seen

    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        assert loop.run(read()) == events
    assert not stream.cancelled
