"""The steps of one request, from what was noted of it on its way. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.step_names import LOADING, PHASES, READING, REQUEST, WAITING, WRITING
from fleetd.requests.job import THIS_NAME
from fleetd.requests.request import WAITS, Attempt, Request
from fleetd.requests.timeline import Span, overlaid, spans_of, with_details

# Stages of a load that would be read as a phase of the request.
_STAGES = {"reading": "reading the files", "waiting": "waiting for memory"}
_LOADS = frozenset((step_names.LOADED, step_names.RELOADED))


def timeline(request: Request, ended_s: float) -> Span:
    """All of the request until ``ended_s``, by this machine's clock."""
    phases = request.phases.spans(ended_s)
    details = list(_prepared(request))
    for name, step in details:
        if name in (LOADING, READING):
            # Nothing but the steps tells what phase it was while the prompt was shortened.
            phases = overlaid(phases, Span(name, step.machine, step.began_s, step.ended_s))
    phases = _earlier_reading(request, phases)
    for attempt in (*request.tried, request.attempt):
        details += _attempted(request, attempt)
    inside = [(name, span) for name, span in details if name != REQUEST]
    # What another machine calls its work is its own affair, but a phase it is not.
    beside = [span for name, span in details if name == REQUEST and span.name not in PHASES]
    parts = (*with_details(phases, inside), *beside)
    return Span(REQUEST, request.here, request.arrived_s, ended_s, parts=parts)


def _prepared(request: Request) -> Iterator[tuple[str, Span]]:
    """What was loaded and scored before the first attempt."""
    if request.smart is not None:
        for span in request.smart.steps:
            yield (LOADING if span.name in _LOADS else READING), _by_name(span, request.here)


def _by_name(span: Span, here: str) -> Span:
    parts = tuple(_by_name(part, here) for part in span.parts)
    machine = here if span.machine == THIS_NAME else span.machine
    return replace(span, machine=machine, parts=parts)


def _earlier_reading(request: Request, phases: list[Span]) -> list[Span]:
    """The phases, with what the engine took from the disk or from another machine as part of reading."""
    times = request.finished.timings if request.finished is not None else None
    first_s = request.first_token_s
    if times is None or first_s is None or request.answered_by or not times.restore_s + times.fetch_s:
        return phases
    began_s = first_s - times.prefill_s - times.restore_s - times.fetch_s
    waits = [phase for phase in phases if phase.name == WAITING and phase.began_s < first_s]
    if not waits or waits[-1].ended_s <= began_s:
        return phases
    last = waits[-1]
    return overlaid(phases, Span(READING, request.here, max(began_s, last.began_s), last.ended_s))


def _attempted(request: Request, attempt: Attempt) -> Iterator[tuple[str, Span]]:
    machine = attempt.machine
    for stage, began_s, ended_s in attempt.loading.stages:
        name = WAITING if stage.startswith(WAITS) else LOADING
        yield name, Span(_STAGES.get(stage, stage), machine, began_s, ended_s)
    yield from _shared(request, attempt)
    if attempt.fetched is not None:
        yield READING, attempt.fetched
    for span in attempt.drafts:
        yield REQUEST, span
    if attempt.there is not None:
        arrived_s = attempt.there_arrived_s
        yield WAITING, Span(step_names.NETWORK, machine, attempt.began_s, arrived_s)
        yield from spans_of(attempt.there.steps, arrived_s, machine)
    elif attempt is request.attempt and not request.answered_by:
        yield from _computed_here(request)


def _shared(request: Request, attempt: Attempt) -> Iterator[tuple[str, Span]]:
    """What was done together, by the accounts of the machines."""
    sharing = attempt.sharing
    if sharing.agreed_at_s:
        yield READING, Span(step_names.AGREED, request.here, attempt.decided_s, sharing.agreed_at_s)
    for span in sharing.spans:
        yield READING, span


def _computed_here(request: Request) -> Iterator[tuple[str, Span]]:
    """What this machine's engine did, by its own figures, which end at the first and at the last token."""
    times = request.finished.timings if request.finished is not None else None
    first_s, here, sharing = request.first_token_s, request.here, request.attempt.sharing
    if times is None:
        return
    end_s = request.ended_s or first_s or request.arrived_s
    first_s = end_s if first_s is None else first_s
    read_s = first_s - times.prefill_s
    fetched_s = read_s - times.fetch_s
    restored_s = fetched_s - times.restore_s
    yield WAITING, Span(step_names.QUEUED, here, restored_s - times.queue_s, restored_s)
    if times.restored_tokens:
        yield READING, Span(step_names.RESTORED, here, restored_s, fetched_s)
    if sharing.agreed_exact is None:
        name = step_names.PREFILLED if request.smart_planned else step_names.COMPUTED
        yield READING, Span(name, here, read_s, first_s)
    elif sharing.report is not None and sharing.report.code:
        yield READING, Span(step_names.PREFILLED, here, sharing.reported_s, first_s)
    yield WRITING, Span(step_names.ANSWERED, here, first_s, first_s + times.decode_s)
