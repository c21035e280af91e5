"""When each step of a request began and ended, by one clock: its phases, with their details inside.

    request ─┬─ waiting ── queued
             ├─ loading ── starting, verifying, measuring …
             ├─ reading ── agreed, computed (on each machine), fetched …
             └─ writing ── decoded

The phases follow one another without a gap, so they add up to the request. Times are this machine's monotonic
clock until ``steps_of`` counts them from the request's arrival. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from fleetd import limits
from fleetd.control.prefill_plan import StepView
from fleetd.control.prefill_trace import TraceStep
from fleetd.engine.protocol import StepTime
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.step_names import LOADING, PHASES, READING, REQUEST, WAITING

# The phase in which a planned step falls; the others are part of reading.
_PHASE_OF = {
    step_names.WOKEN: WAITING,
    step_names.QUEUED: WAITING,
    step_names.NETWORK: WAITING,
    step_names.LOADED: LOADING,
    step_names.RELOADED: LOADING,
    step_names.PULLED: LOADING,
}


@dataclass(frozen=True, slots=True)
class Span:
    """One step on one machine, with the steps that it consists of."""

    name: str
    machine: str
    # Monotonic seconds of this machine.
    began_s: float
    ended_s: float
    # Spent on it; None if it is all of the time from begin to end.
    seconds: float | None = None
    # That crossed a link.
    n_bytes: int = 0
    parts: tuple[Span, ...] = ()

    def overlap_s(self, other: Span) -> float:
        """Seconds that both have in common; below 0, how far apart they are."""
        return min(self.ended_s, other.ended_s) - max(self.began_s, other.began_s)


class Phases:
    """The phases of one request, as they begin. Each ends when the next one begins."""

    def __init__(self, machine: str, now_s: float) -> None:
        self._begun = [(WAITING, machine, now_s)]

    @property
    def name(self) -> str:
        """The present one."""
        return self._begun[-1][0]

    def enter(self, name: str, machine: str, now_s: float) -> None:
        """``name`` goes on or begins."""
        if (name, machine) != self._begun[-1][:2] and len(self._begun) < limits.TRACE_PHASES:
            self._begun.append((name, machine, now_s))

    def spans(self, ended_s: float) -> list[Span]:
        """All of them, the last one until ``ended_s``."""
        ends = [*(began_s for _, _, began_s in self._begun[1:]), ended_s]
        return [
            Span(name, machine, began_s, end_s)
            for (name, machine, began_s), end_s in zip(self._begun, ends, strict=True)
        ]


def overlaid(phases: Iterable[Span], known: Span) -> list[Span]:
    """The phases with ``known`` in the place of what they have of its time."""
    found, placed = list[Span](), False
    for phase in phases:
        if known.began_s < phase.began_s == phase.ended_s < known.ended_s:
            continue
        if phase.overlap_s(known) <= 0:
            found.append(phase)
            continue
        if phase.began_s < known.began_s:
            found.append(replace(phase, ended_s=known.began_s))
        if not placed:
            found.append(known)
            placed = True
        if phase.ended_s > known.ended_s:
            found.append(replace(phase, began_s=known.ended_s))
    return found


def with_details(phases: Sequence[Span], details: Iterable[tuple[str, Span]]) -> list[Span]:
    """The phases, with each detail in the phase of its name that has most of it.

    A detail whose phase was not seen goes into the phase that has most of it.
    """
    parts: list[list[Span]] = [list(phase.parts) for phase in phases]
    for name, detail in details:
        named = [at for at, phase in enumerate(phases) if phase.name == name]
        best = max(named or range(len(phases)), key=lambda at: phases[at].overlap_s(detail), default=None)
        if best is not None:
            parts[best].append(detail)
    return [replace(phase, parts=tuple(inner)) for phase, inner in zip(phases, parts, strict=True)]


def steps_of(request: Span, planned: Sequence[StepView] = ()) -> list[TraceStep]:
    """The steps for people, each behind the one that it is part of, in the order in which they began.

    Args:
        request: all of the request; its parts are the phases and what went on beside them.
        planned: what was planned, with the names of machines.
    """
    placing = _Placing(request.began_s)
    placing.put(request, None, request.began_s, request.ended_s, request.ended_s - request.began_s)
    return _planned(placing.steps, planned)


class _Placing:
    """Clocks of machines are never quite alike, and a machine may report anything. So a step that seems to
    leave the one that it is part of is cut to it, and the steps of one machine share the time that there is.
    """

    def __init__(self, origin_s: float) -> None:
        self.steps: list[TraceStep] = []
        self._origin_s = origin_s

    def put(self, span: Span, parent: int | None, low_s: float, high_s: float, room_s: float) -> float:
        """Append a step and its parts; returns the seconds that it takes of ``room_s``."""
        began_s = min(max(span.began_s, low_s), high_s)
        ended_s = min(max(span.ended_s, began_s), high_s)
        length_s = ended_s - began_s
        seconds = min(length_s if span.seconds is None else max(0.0, span.seconds), length_s, room_s)
        if parent is not None and not (seconds or span.n_bytes or span.parts) and span.name in PHASES:
            return 0.0
        at, begin_s, end_s = len(self.steps), began_s - self._origin_s, ended_s - self._origin_s
        self.steps.append(TraceStep(span.name, span.machine, begin_s, end_s, seconds, span.n_bytes, parent))
        left: dict[str, float] = {}
        for part in sorted(span.parts, key=lambda part: part.began_s):
            if parent is None and part.name in PHASES:
                self.put(part, at, began_s, ended_s, length_s)
            else:
                room = left.get(part.machine, length_s)
                left[part.machine] = max(0.0, room - self.put(part, at, began_s, ended_s, room))
        return seconds


def _planned(steps: list[TraceStep], planned: Sequence[StepView]) -> list[TraceStep]:
    """The steps, each with what was planned for it."""
    left, sums = list(planned), dict[str, float]()
    for each in planned:
        phase = _PHASE_OF.get(each.name, READING)
        sums[phase] = sums.get(phase, 0.0) + each.seconds
    found = []
    for step in steps:
        plan = sums.pop(step.name, None) if step.parent == 0 else None
        if step.parent and (same := next((each for each in left if _same(each, step)), None)) is not None:
            left.remove(same)
            plan = same.seconds
        found.append(step if plan is None else msgspec.structs.replace(step, planned_s=plan))
    return found


def _same(planned: StepView, step: TraceStep) -> bool:
    return (planned.name, planned.machine) == (step.name, step.machine)


def spans_of(steps: Sequence[TraceStep], arrived_s: float, machine: str) -> list[tuple[str, Span]]:
    """What another machine told of a request: each detail with the phase in which it fell there.

    Args:
        arrived_s: when the request arrived there, by this machine's clock.
        machine: its name, for steps that name none.
    """
    parts: dict[int, list[Span]] = {}
    found: list[tuple[str, Span]] = []
    # A step comes behind the one that it is part of, so from the end all parts of a step are known.
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        span = Span(
            step.name,
            step.machine or machine,
            arrived_s + step.begin_s,
            arrived_s + step.end_s,
            step.seconds,
            step.n_bytes,
            tuple(reversed(parts.get(at, []))),
        )
        parent = step.parent
        if parent is None or not 0 <= parent < at or (parent == 0 and step.name in PHASES):
            continue
        owner = steps[parent]
        if parent == 0 or (owner.parent == 0 and owner.name in PHASES):
            found.append((owner.name if parent else REQUEST, span))
        else:
            parts.setdefault(parent, []).append(span)
    return found[::-1]


def told_spans(
    steps: Iterable[StepTime], machine: str, offset_s: float | None, within: tuple[float, float]
) -> list[Span]:
    """A worker's account of a part of the work, by this machine's clock.

    Args:
        offset_s: the clock of ``machine`` less this machine's; None if not known.
        within: monotonic seconds, for steps whose times are not known.
    """
    began_s, ended_s = within
    return [
        Span(each.name, machine, each.began_s - offset_s, each.ended_s - offset_s, each.seconds, each.n_bytes)
        if each.ended_s and offset_s is not None
        else Span(each.name, machine, began_s, ended_s, each.seconds, each.n_bytes)
        for each in steps
    ]
