"""The steps of one request in time, planned against actual, on whichever machine each of them ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import click
from msgspec.structs import replace

from fleetctl.render.columns import Column, drawn, fitted, total
from fleetctl.render.plan_words import THIS, miss
from fleetctl.render.text import brief, count, one_line, size, wrapped
from fleetd.control.prefill_trace import Trace, TraceStep

# Of the request's time; steps that took less are folded.
_LEAST = 0.01
# Characters of the picture: at most, at least, and as many as are kept free for it.
_PICTURE, _NARROWEST, _FREE = 40, 12, 22
_PHASES = ("waiting", "loading", "reading", "writing")


def table(trace: Trace, width: int | None) -> list[str]:
    """The phases of a request, then machine by machine what each did; no line for a trace without steps."""
    took_s = trace.took_s or 0.0
    if not trace.steps or not took_s:
        return []
    shown = list(_shown(trace.steps, took_s))
    if not shown:
        return []
    folded = sum(step.parent not in (None, 0) or step.name not in _PHASES for step in trace.steps[1:])
    folded -= sum(1 for _, step in shown if not _is_phase(step))
    columns = [
        Column("STEP", [_name(depth, step) for depth, step in shown], 9),
        Column("MACHINE", [one_line(step.machine) for _, step in shown], 8),
        Column("PLANNED", [brief(step.planned_s) for _, step in shown], 7, right=True),
        Column("ACTUAL", [brief(step.seconds) for _, step in shown], 7, right=True),
        Column("MISS", [miss(step.seconds, step.planned_s) for _, step in shown], 4, right=True),
        Column("BYTES", [size(step.n_bytes) if step.n_bytes else "-" for _, step in shown], 3, right=True),
    ]
    columns = fitted(columns, None if width is None else width - _FREE)
    room = _PICTURE if width is None else width - total(columns) - 2
    if room >= _NARROWEST:
        room = min(room, _PICTURE)
        bars = [_bar(step, took_s, room) for _, step in shown]
        columns.append(Column(_axis(took_s, room), bars, 1))
    lines = drawn(columns)
    if folded > 0:
        said = f"{count(folded)} step{'' if folded == 1 else 's'} of less than 1 % not shown; --json has all."
        lines.append(click.style(wrapped(said, width), dim=True))
    return lines


def seen_from_here(trace: Trace, machine: str) -> Trace:
    """A trace in which the machine that wrote it has its name instead of "this"."""
    chosen, *losers = (
        replace(option, nodes=[machine if node == THIS else node for node in option.nodes])
        for option in (trace.chosen, *trace.losers)
    )
    drafter = trace.drafter
    if drafter is not None and drafter.machine == THIS:
        drafter = replace(drafter, machine=machine)
    stages = [replace(stage, name=stage.name or machine) for stage in trace.stages]
    return replace(trace, chosen=chosen, losers=losers, drafter=drafter, stages=stages)


def _is_phase(step: TraceStep) -> bool:
    return step.parent == 0 and step.name in _PHASES


def _shown(steps: Sequence[TraceStep], took_s: float) -> Iterator[tuple[int, TraceStep]]:
    """(depth, step): the phases, then one machine after the other."""
    phases = [step for step in steps if _is_phase(step)]
    for name in _PHASES:
        found = [step for step in phases if step.name == name]
        if found:
            yield 0, _joined(found)
    least_s = _LEAST * took_s
    details = [step for step in steps[1:] if not _is_phase(step) and step.seconds >= least_s]
    for machine in dict.fromkeys(step.machine for step in details):
        for step in details:
            if step.machine == machine:
                yield 1, step


def _joined(phases: Iterable[TraceStep]) -> TraceStep:
    """One row for a phase that came several times."""
    first, *more = phases
    last = more[-1] if more else first
    seconds = first.seconds + sum(step.seconds for step in more)
    return replace(first, end_s=last.end_s, seconds=seconds)


def _name(depth: int, step: TraceStep) -> str:
    return "  " * depth + one_line(step.name)


def _bar(step: TraceStep, took_s: float, room: int) -> str:
    """Where the step lies in the time of the request."""
    first = min(room - 1, round(room * step.begin_s / took_s))
    last = max(first + 1, min(room, round(room * step.end_s / took_s)))
    # A step that other work came between is drawn lighter.
    whole = step.seconds >= (step.end_s - step.begin_s) / 2
    return " " * first + ("█" if whole else "▒") * (last - first)


def _axis(took_s: float, room: int) -> str:
    end = brief(took_s)
    return "0 s" + end.rjust(room - 3) if room > len(end) + 4 else end.rjust(room)
