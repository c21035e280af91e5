"""The way of events through the steps: what waits, what sees which event, what costs nothing per token."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from fakes import FakeFolder, answer
from requests_driver import answered, passed, request_of

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
    Generate,
    Loading,
    TextPrompt,
    ToolCallPiece,
)
from fleetd.requests.answering_machines import AnsweringMachines
from fleetd.requests.drafting.client import AnswerDrafting
from fleetd.requests.job import Job
from fleetd.requests.kv_fetching.client import BlockFetching
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts
from fleetd.requests.members.members import Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.pipeline import Pipeline, PipelineStep
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.request import Request
from fleetd.requests.smart_prefill.client import SmartPrefill

STEPS = (KeptPrompts, BlockFetching, PrefillSharing, AnswerDrafting, SmartPrefill, AnsweringMachines)


class Noting(PipelineStep):
    """Notes what it is given."""

    def __init__(self, *events: type[Any]) -> None:
        self.events = events  # type: ignore[misc]
        self.seen: list[str] = []

    async def decide(self, request: Request, accepted: Accepted) -> None:
        self.seen.append("decide")

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        self.seen.append(type(event).__name__)
        return event


def asked() -> Request:
    return request_of(Job("m", Generate("r1", TextPrompt("hello")), "socket", "chat"), FakeFolder())


async def test_a_step_sees_the_events_that_it_names_and_decides_once_before_them() -> None:
    drafting, accounting = Noting(Accepted), Noting(Delta, Finished)
    pipeline, request = Pipeline([drafting, accounting]), asked()

    async def stream(asked: Generate) -> Any:
        for event in answer():
            yield event

    told = [event async for event in answered(pipeline, request, stream)]
    assert drafting.seen == ["decide", "Accepted"]
    deltas = sum(isinstance(event, Delta) for event in told)
    assert accounting.seen == ["decide", *["Delta"] * deltas, "Finished"]


async def test_what_a_step_holds_back_no_later_step_sees() -> None:
    class Holding(Noting):
        def on_event(self, request: Request, event: Loading | Event) -> None:
            return None

    later = Noting(Delta)
    assert await passed(Pipeline([Holding(Delta), later]), asked(), Delta("r1", "x")) == []
    assert later.seen == []


@pytest.mark.parametrize("step", STEPS)
def test_only_the_decision_of_a_step_may_wait(step: type[PipelineStep]) -> None:
    assert not inspect.iscoroutinefunction(step.on_event)
    assert inspect.iscoroutinefunction(step.decide)


@pytest.mark.parametrize("event", [Delta("r1", "x"), ToolCallPiece("r1", 0, "c", "f", "{")])
async def test_a_token_passes_all_steps_without_a_coroutine(event: Event) -> None:
    members, pool, metrics = Members(), EnginePool(), Metrics("0")
    unused: Any = None
    pipeline = Pipeline(
        [
            KeptPrompts(unused, lambda model: None),
            BlockFetching(unused, pool, members),
            PrefillSharing(unused, pool, members, metrics),
            AnswerDrafting(None, members, pool, unused, metrics),
            SmartPrefill(unused, members, pool, metrics),
            AnsweringMachines(members),
        ]
    )
    request, called = asked(), list[str]()

    def note(frame: Any, what: str, _: Any) -> None:
        if what == "call" and frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            called.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        told = pipeline.on_event(request, event)
    finally:
        sys.setprofile(before)
    assert told[-1] == event
    assert called == []
