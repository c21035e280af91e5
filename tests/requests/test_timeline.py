"""The picture of a request: no step leaves the one that it is part of, whatever machines report."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from fakes import FakeFolder, job
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from requests_driver import request_of
from timelines import check_steps

from fleetd import limits
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import Trace, TraceStep
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Finished,
    Loading,
    Prefill,
    PrefillReport,
    StepTime,
    Timings,
    Tokenized,
    Usage,
)
from fleetd.errors import PeerLost
from fleetd.requests.job import Planned
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement.placement import Placement
from fleetd.requests.request import Request, Shortening
from fleetd.requests.request_views import trace_of
from fleetd.requests.summary import summary
from fleetd.requests.timeline import Phases, Span, overlaid, steps_of, told_spans

# What honest machines report, and what others may.
SECONDS = st.floats(0, 1e9) | st.sampled_from([0.0, 1e-9, 0.5, 1.0, 3.0, 1e9])
GAPS = st.floats(0, 1e4) | st.just(0.0)
MACHINES = st.sampled_from(["alpha", "beta", "gamma"])
NAMES = st.sampled_from(["computed", "waited", "loaded", "scored", "request", "reading", "writing"])

accounts = st.lists(
    st.builds(StepTime, NAMES, SECONDS, st.integers(0, 2**53), SECONDS, SECONDS), max_size=limits.SHARE_STEPS
)
told_steps = st.lists(
    st.builds(
        TraceStep, NAMES, MACHINES | st.just(""), SECONDS, SECONDS, SECONDS, st.integers(0, 2**53),
        st.none() | st.integers(0, 9),
    ),
    max_size=12,
)  # fmt: skip
events = st.sampled_from(
    [
        Loading("starting"), Loading("reading", 1, 2), Loading("waking beta"),
        Loading("waiting for m to load"),
        Tokenized("r1", 4096), Accepted("r1", 4096), Prefill("r1", 1, 4096), Delta("r1", "word", tokens=2),
    ]
)  # fmt: skip
timings = st.builds(
    Timings, SECONDS, SECONDS, SECONDS, st.integers(0, 9), SECONDS, st.integers(0, 9), SECONDS, MACHINES
)


METRICS = Metrics("0")
PLAIN = request_of(job(), FakeFolder())


class Played:
    """A request that is played on a clock of its own."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.now_s = data.draw(st.floats(1.0, 1e6))
        self.request = Request(
            PLAIN.job, PLAIN.model, PLAIN.placement, METRICS, arrived_s=self.now_s, at_s=1.0, here="alpha"
        )

    def later(self) -> float:
        self.now_s += self.data.draw(GAPS)
        return self.now_s

    def span(self, name: str, machine: str) -> Span:
        began_s = self.now_s
        return Span(name, machine, began_s, self.later(), self.data.draw(st.none() | SECONDS))

    def attempt(self, *, remote: bool) -> None:
        if remote:
            self.request.placement = Placement("b" * 56, Planned("remote", ("beta",), "exact"))
        self.request.begin(self.later())
        for event in self.data.draw(st.lists(events, max_size=12)):
            self.request.on_event(event, self.later())

    def shared(self) -> None:
        sharing, data = self.request.attempt.sharing, self.data
        self.request.attempt.decided_s = self.later()
        sharing.agreed_at_s, sharing.agreed_exact = self.later(), True
        offset_s = data.draw(st.none() | st.floats(-1e9, 1e9))
        within = (sharing.agreed_at_s, self.later())
        sharing.reported_s = self.now_s
        sharing.report = PrefillReport(
            "r1", data.draw(accounts), code=data.draw(st.sampled_from(["", "lost"]))
        )
        sharing.spans = [
            *told_spans(data.draw(accounts), "beta", offset_s, within),
            *told_spans(sharing.report.steps, "alpha", 0.0, within),
        ]

    def ended(self) -> Trace:
        self.request.ended_s = self.later()
        return trace_of(self.request)


def smart(played: Played) -> None:
    parts = (played.span("loaded", "gamma"), played.span("computed", "gamma"))
    scored = replace_parts(played.span("scored", "gamma"), parts)
    steps = [played.span("loaded", "this"), scored, played.span("scored", "this")]
    result = SmartPrefillResult("text", "small", ("gamma",), 4096, 100)
    played.request.smart = Shortening(result, steps=steps)


def replace_parts(span: Span, parts: tuple[Span, ...]) -> Span:
    return Span(span.name, span.machine, parts[0].began_s, span.ended_s, span.seconds, parts=parts)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    kind=st.sampled_from(
        ["local", "remote", "shared", "smart", "fetched", "drafted", "moved", "failed", "cancelled"]
    ),
)
def test_no_step_of_any_request_leaves_its_parent(data: st.DataObject, kind: str) -> None:
    played = Played(data)
    request = played.request
    if kind == "smart":
        smart(played)
    if kind == "moved":
        played.attempt(remote=True)
        request.failed(PeerLost("It went away."))
        request.failed_trace = trace_of(request)
        request.placement = PLAIN.placement
    played.attempt(remote=kind == "remote" or (kind == "smart" and data.draw(st.booleans())))
    if kind == "shared":
        played.shared()
    if kind == "fetched":
        request.attempt.fetched = played.span("fetched", "beta")
    if kind == "drafted":
        offset_s = data.draw(st.none() | st.floats(-1e9, 1e9))
        drafted = told_spans(data.draw(accounts), "beta", offset_s, (request.arrived_s, played.now_s))
        request.attempt.drafts = drafted
    if kind == "failed":
        request.failed(PeerLost("It went away."))
    elif kind != "cancelled":
        told = Timings() if request.answered_by else data.draw(timings)
        request.on_event(Finished("r1", "stop", Usage(7, 0, 2), told), played.later())
    if request.answered_by:
        there = Trace(
            "r1.x", steps=data.draw(told_steps), took_s=data.draw(SECONDS), clock_s=data.draw(SECONDS)
        )
        request.attempt.there, request.attempt.there_arrived_s = there, data.draw(st.floats(-1e9, 1e9))
    trace = played.ended()
    check_steps(trace)
    assert trace.summary
    assert all(math.isfinite(step.begin_s + step.end_s + step.seconds) for step in trace.steps)


def test_the_phases_of_a_request_add_up_to_it() -> None:
    phases = Phases("alpha", 10.0)
    phases.enter("loading", "beta", 11.0)
    phases.enter("loading", "beta", 12.0)
    phases.enter("reading", "beta", 13.0)
    assert [(span.name, span.machine, span.began_s, span.ended_s) for span in phases.spans(20.0)] == [
        ("waiting", "alpha", 10.0, 11.0),
        ("loading", "beta", 11.0, 13.0),
        ("reading", "beta", 13.0, 20.0),
    ]


@given(
    cuts=st.lists(st.floats(0, 100), min_size=2, max_size=6),
    known=st.tuples(st.floats(0, 100), st.floats(0, 100)),
)
def test_what_is_laid_over_phases_leaves_no_gap(cuts: list[float], known: tuple[float, float]) -> None:
    edges = sorted(cuts)
    phases = [Span("waiting", "a", *pair) for pair in itertools.pairwise(edges)]
    low, high = (min(max(at, edges[0]), edges[-1]) for at in sorted(known))
    found = overlaid(phases, Span("reading", "a", low, high))
    assert (found[0].began_s, found[-1].ended_s) == (edges[0], edges[-1])
    assert all(one.ended_s == two.began_s for one, two in itertools.pairwise(found))


def test_a_report_that_leaves_its_step_is_cut_to_it() -> None:
    late = Span("computed", "beta", 11.0, 99.0, 50.0)
    reading = Span("reading", "alpha", 10.0, 14.0, parts=(late, Span("computed", "beta", 12.0, 13.0)))
    steps = steps_of(Span("request", "alpha", 10.0, 14.0, parts=(reading,)))
    assert [(step.begin_s, step.end_s, step.seconds) for step in steps[2:]] == [
        (1.0, 4.0, 3.0),
        (2.0, 3.0, 1.0),
    ]


def test_the_clock_of_another_machine_is_converted_by_its_offset() -> None:
    step = StepTime("computed", 2.0, 0, 1003.0, 1006.0)
    (span,) = told_spans([step], "beta", 1000.0, (0.0, 9.0))
    assert (span.began_s, span.ended_s, span.seconds) == (3.0, 6.0, 2.0)
    (unknown,) = told_spans([step], "beta", None, (0.0, 9.0))
    assert (unknown.began_s, unknown.ended_s, unknown.seconds) == (0.0, 9.0, 2.0)


@pytest.mark.parametrize("machine", ["studio", "this"])
def test_a_step_has_what_was_planned_for_it_on_its_machine(machine: str) -> None:
    loading = Span("loading", "studio", 0.0, 14.0, parts=(Span("measuring", "studio", 8.0, 14.0),))
    reading = Span("reading", "studio", 14.0, 30.0, parts=(Span("computed", "studio", 15.0, 30.0),))
    planned = [StepView("loaded", 3.0, machine="studio"), StepView("computed", 9.0, machine=machine)]
    steps = steps_of(Span("request", "vm", 0.0, 30.0, parts=(loading, reading)), planned)
    found: dict[str, Any] = {step.name: step.planned_s for step in steps}
    assert found == {
        "request": None, "loading": 3.0, "measuring": None, "reading": 9.0,
        "computed": 9.0 if machine == "studio" else None,
    }  # fmt: skip


SHARED = Trace(
    "r1", machine="vm", chosen=OptionView("tokens", ["studio", "this"], 18.2), outcome="shared", took_s=31.4,
    ttft_s=31.4, planned_ttft_s=21.2, alone_s=29.3,
    steps=[
        TraceStep("request", "vm", 0.0, 31.4, 31.4),
        TraceStep("waiting", "vm", 0.0, 0.9, 0.9, parent=0),
        TraceStep("loading", "studio", 0.9, 15.2, 14.3, parent=0, planned_s=3.0),
        TraceStep("reading", "vm", 15.2, 31.4, 16.2, parent=0, planned_s=18.2),
    ],
)  # fmt: skip


def test_one_sentence_says_where_the_time_went_against_the_plan_and_against_one_machine() -> None:
    assert summary(SHARED) == (
        "31 s: 14 s loading the model on studio (planned 3), 16 s reading together. Alone: about 29 s."
    )
    slow = replace(SHARED, planned_ttft_s=12.0, steps=[replace(s, planned_s=None) for s in SHARED.steps])
    assert "That is 2.6x the planned time (12 s)." in summary(slow)
    failed = replace(SHARED, outcome="failed", ttft_s=None, reason="studio went away.")
    assert summary(failed) == "Failed after 31 s, while reading: studio went away."
