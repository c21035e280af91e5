"""Traces for people: a list of requests, and one of them step by step, predicted against actual. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import click

from fleetctl.render.columns import Column, drawn, fitted, shortened
from fleetctl.render.options_table import options_table
from fleetctl.render.plan_words import THIS, deviation, division, helpers, local_s, prompt
from fleetctl.render.text import brief, clause, count, one_line, size, wrapped
from fleetd.control.prefill_plan import StepView
from fleetd.control.prefill_trace import DrafterView, Speculated, Trace

# Characters at the end of a request's id that identify it in a list.
SHORT_ID_CHARS = 8
_NAME_CHARS, _HELPER_CHARS = 20, 12
_COLOURS = {"shared": "green", "smart": "green", "fallback": "yellow", "failed": "red", "cancelled": "yellow"}
_OUTCOMES = {
    "shared": "shared as planned",
    "fallback": "begun together, ended here alone",
    "local": "computed here",
    "smart": "a part of the prompt was left out",
    "cancelled": "cancelled",
    "failed": "failed",
}


def listing(traces: Sequence[Trace], width: int | None) -> str:
    """One line per request and, where it did not go as planned, why."""
    if not traces:
        return "No request has come yet that another machine could have helped with."
    cut = width is not None
    columns = [
        Column("WHEN", [_when(trace.at_s) for trace in traces], 7),
        Column("REQUEST", [one_line(trace.id[-SHORT_ID_CHARS:]) for trace in traces], 8),
        Column("MODEL", [_model(trace.model, cut=cut) for trace in traces], 1),
        Column("TOKENS", [_tokens(trace) for trace in traces], 6, right=True),
        Column("CACHED", [count(trace.cached_tokens) for trace in traces], 2, right=True),
        Column("PLAN", [_plan(trace, cut=cut) for trace in traces], 9),
        Column("PLANNED", [brief(trace.chosen.predicted_s) for trace in traces], 4, right=True),
        Column("ACTUAL", [brief(trace.prefill_s) for trace in traces], 8, right=True),
        Column(
            "DIFF", [deviation(trace.prefill_s, trace.chosen.predicted_s) for trace in traces], 5, right=True
        ),
        Column("OUTCOME", [one_line(trace.outcome) for trace in traces], 9),
    ]
    header, *rows = drawn(fitted(columns, width))
    at = header.index("OUTCOME")
    lines = [header]
    for trace, row in zip(traces, rows, strict=True):
        lines.append(row[:at] + click.style(row[at:], fg=_COLOURS.get(trace.outcome)))
        if trace.reason:
            lines.append(wrapped(_why(trace), width, indent="  "))
    return "\n".join(lines)


def page(trace: Trace, width: int | None) -> str:
    """All that is known of one request."""
    chosen = trace.chosen
    facts = [
        ("request", f"{one_line(trace.id)} · {_date(trace.at_s)}"),
        ("model", one_line(trace.model)),
        ("prompt", prompt(trace.prompt_tokens, trace.cached_tokens, trace.kept_tokens)),
        ("plan", division(chosen)),
        ("outcome", _outcome(trace)),
        ("prefill", _prefill(trace)),
    ]
    if trace.ttft_s is not None:
        facts.append(("first token", f"{brief(trace.ttft_s)} after the request came"))
    if trace.speculation is not None:
        facts.append(("drafts", _drafts(trace.speculation, trace.drafter)))
    elif trace.drafter is not None:
        facts.append(("drafts", f"{_named(trace.drafter)} was asked; none of its drafts was verified"))
    parts = ["\n".join(_fact(name, value, width) for name, value in facts)]
    if chosen.steps or trace.steps:
        parts.append("\n".join(_steps(chosen.steps, trace.steps, width)))
    if trace.losers:
        found = options_table(trace.losers, local_s([chosen, *trace.losers]), width)
        parts.append("\n".join(["Passed over:", *found]))
    return "\n\n".join(parts)


def _drafts(told: Speculated, drafter: DrafterView | None) -> str:
    """What came of them, source by source, and what that did."""
    by_source = ", ".join(
        f"{_source(source, drafter)} {_share(found.accepted, found.drafted)} in {_passes(found.passes)}"
        for source, found in sorted(told.sources.items())
    )
    per_pass = f"{told.tokens / told.passes:.2f} tokens per pass" if told.passes else "no pass"
    word = "saved" if told.saved_s >= 0 else "lost"
    return f"right: {by_source}; {per_pass} of up to {told.width}; {word} {brief(abs(told.saved_s))}"


def _source(name: str, drafter: DrafterView | None) -> str:
    """As figures call it; of another worker's drafts also whose they are."""
    return f"drafter ({_named(drafter)})" if name == "drafter" and drafter is not None else one_line(name)


def _named(drafter: DrafterView) -> str:
    return f"{one_line(drafter.model)} on {one_line(drafter.machine)}"


def _share(part: int, whole: int) -> str:
    percent = f" ({100 * part / whole:.0f} %)" if whole else ""
    return f"{count(part)} of {count(whole)}{percent}"


def _passes(number: int) -> str:
    return f"{count(number)} pass" + ("" if number == 1 else "es")


def _fact(name: str, value: str, width: int | None) -> str:
    indent = " " * 13
    return f"{name:<13}{wrapped(value, width, indent=indent)[len(indent) :]}"


def _outcome(trace: Trace) -> str:
    said = _OUTCOMES.get(trace.outcome, one_line(trace.outcome))
    if trace.outcome == "fallback" and trace.verified_tokens:
        said += f", from {count(trace.verified_tokens)} verified tokens on"
    if trace.exactness:
        said += f" · {one_line(trace.exactness)}"
    return f"{said} · {_why(trace)}" if trace.reason or trace.code else said


def _prefill(trace: Trace) -> str:
    predicted_s, actual_s = trace.chosen.predicted_s, trace.prefill_s
    difference = f" ({deviation(actual_s, predicted_s)})" if actual_s is not None and predicted_s else ""
    return f"{brief(predicted_s)} planned, {brief(actual_s)} actual{difference}"


def _why(trace: Trace) -> str:
    code = f" ({one_line(trace.code)})" if trace.code else ""
    return f"{clause(trace.reason) or 'no reason given'}{code}"


def _plan(trace: Trace, *, cut: bool) -> str:
    """In a list: the kind and who helps."""
    kind, others = one_line(trace.chosen.kind) or "-", helpers(trace.chosen)
    if trace.chosen.kind == "local" or not others:
        return kind
    if not cut:
        return f"{kind}: {', '.join(others)}"
    more = f" +{len(others) - 1}" if others[1:] else ""
    return f"{kind}: {shortened(others[0], _HELPER_CHARS)}{more}"


def _tokens(trace: Trace) -> str:
    """In a list: those that were prefilled first, where others were left out."""
    kept = f"{count(trace.kept_tokens)} of " if trace.kept_tokens else ""
    return kept + count(trace.prompt_tokens)


def _model(name: str, *, cut: bool) -> str:
    # Before the slash is the publisher of a model, after it the model itself.
    return shortened(one_line(name.rpartition("/")[2]), _NAME_CHARS) if cut else one_line(name)


def _steps(predicted: Sequence[StepView], actual: Sequence[StepView], width: int | None) -> list[str]:
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


def _when(at_s: float) -> str:
    """The time of day, and the day where it is not today."""
    then, now = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%m-%d %H:%M", then)


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
