"""The steps of one request, predicted against actual, on whichever machine each of them ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click
from msgspec.structs import replace

from fleetctl.render.columns import Column, drawn, fitted
from fleetctl.render.plan_words import THIS, deviation
from fleetctl.render.text import brief, one_line, size, wrapped
from fleetd.control.prefill_plan import StepView
from fleetd.control.prefill_trace import Trace


def table(trace: Trace, width: int | None) -> list[str]:
    """The steps of a trace, of the machine that answered, and of the one that drafted; none: no line."""
    told = [trace] if trace.there is None else [trace, seen_from_here(trace.there, trace.answered_by)]
    predicted = [step for each in told for step in each.chosen.steps]
    actual = [step for each in reversed(told) for step in (*each.steps, *_drafted(each))]
    return _drawn(predicted, actual, width) if predicted or actual else []


def seen_from_here(trace: Trace, machine: str) -> Trace:
    """Another machine's trace, in which that machine has its name instead of "this"."""
    chosen = replace(
        trace.chosen,
        nodes=[machine if node == THIS else node for node in trace.chosen.nodes],
        steps=[_at(step, machine) for step in trace.chosen.steps],
    )
    drafter = trace.drafter
    if drafter is not None and drafter.machine == THIS:
        drafter = replace(drafter, machine=machine)
    return replace(trace, chosen=chosen, drafter=drafter, steps=[_at(step, machine) for step in trace.steps])


def _at(step: StepView, machine: str) -> StepView:
    """Predicted steps of a machine do not name it."""
    return replace(step, machine=machine) if step.machine in ("", THIS) else step


def _drafted(trace: Trace) -> list[StepView]:
    return [] if trace.drafter is None else trace.drafter.steps


def _drawn(predicted: Sequence[StepView], actual: Sequence[StepView], width: int | None) -> list[str]:
    """Both kinds side by side; what only one of them knows has a row as well."""
    pairs = list(_paired(predicted, actual))
    columns = [
        Column("STEP", [one_line(step.name) for step, _, _ in pairs], 9),
        Column("MACHINE", [one_line(step.machine) for step, _, _ in pairs], 8),
        Column("PLANNED", [_step_s(found) for _, found, _ in pairs], 7, right=True),
        Column("ACTUAL", [_step_s(found) for _, _, found in pairs], 7, right=True),
        Column("DIFF", [_difference(mine, found) for _, mine, found in pairs], 4, right=True),
        Column("BYTES", [_bytes(found or mine) for _, mine, found in pairs], 3, right=True),
    ]
    lines = drawn(fitted(columns, width))
    if _several(predicted, actual):
        legend = "Steps of several machines run at the same time."
        lines.append(click.style(wrapped(legend, width), dim=True))
    return lines


def _paired(
    predicted: Sequence[StepView], actual: Sequence[StepView]
) -> Iterable[tuple[StepView, StepView | None, StepView | None]]:
    """(either of them, predicted, actual), the predicted ones in their order first.

    Predictions are about the machine that answers, which they do not name.
    """
    left = list(actual)
    for step in predicted:
        mine = (step.machine or THIS, step.name)
        same = next((one for one in left if (one.machine, one.name) == mine), None)
        if same is not None:
            left.remove(same)
        yield same or step, step, same
    for step in left:
        yield step, None, step


def _several(*steps: Sequence[StepView]) -> bool:
    return len({step.machine for group in steps for step in group if step.machine}) > 1


def _difference(predicted: StepView | None, actual: StepView | None) -> str:
    if predicted is None or actual is None:
        return "-"
    return deviation(actual.seconds, predicted.seconds)


def _step_s(step: StepView | None) -> str:
    return "-" if step is None else brief(step.seconds)


def _bytes(step: StepView | None) -> str:
    return size(step.n_bytes) if step is not None and step.n_bytes else "-"
