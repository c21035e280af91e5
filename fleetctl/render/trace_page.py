"""Traces for people: a list of requests, and one of them step by step, predicted against actual. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import click
from msgspec.structs import replace

from fleetctl.render.columns import Column, drawn, fitted, shortened
from fleetctl.render.options_table import options_table
from fleetctl.render.plan_words import THIS, division, helpers, local_s, miss, prompt
from fleetctl.render.text import brief, clause, count, labelled, one_line, wrapped
from fleetctl.render.trace_steps import seen_from_here, table
from fleetd.control.prefill_trace import DrafterView, MachineTexts, SourceCounts, TextsWork, Trace

# Characters at the end of a request's id that identify it in a list.
SHORT_ID_CHARS = 8
_NAME_CHARS, _HELPER_CHARS = 20, 12
_COLOURS = {
    "shared": "green",
    "smart": "green",
    "remote": "green",
    "spread": "green",
    "fallback": "yellow",
    "failed": "red",
    "cancelled": "yellow",
}
_OUTCOMES = {
    "shared": "read by several machines",
    "fallback": "begun together, ended here alone",
    "local": "computed here",
    "smart": "a part of the prompt was left out",
    "remote": "answered by another machine",
    "spread": "computed by several machines",
    "cancelled": "cancelled",
    "failed": "failed",
}


def listing(traces: Sequence[Trace], width: int | None) -> str:
    """One line per request and, where it did not go as planned, why."""
    if not traces:
        return "No request has come yet."
    cut = width is not None
    columns = [
        Column("WHEN", [_when(trace.at_s) for trace in traces], 7),
        Column("REQUEST", [one_line(trace.id[-SHORT_ID_CHARS:]) for trace in traces], 8),
        Column("MODEL", [_model(trace.model, cut=cut) for trace in traces], 1),
        Column("TOKENS", [_tokens(trace) for trace in traces], 6, right=True),
        Column("CACHED", [count(trace.cached_tokens) for trace in traces], 2, right=True),
        Column("PLAN", [_plan(trace, cut=cut) for trace in traces], 9),
        Column("PLANNED", [brief(trace.planned_ttft_s) for trace in traces], 4, right=True),
        # Texts have no first token: their vectors and scores come at the end.
        Column(
            "ACTUAL",
            [brief(trace.took_s if trace.texts else trace.ttft_s) for trace in traces],
            8,
            right=True,
        ),
        Column("MISS", [miss(trace.ttft_s, trace.planned_ttft_s) for trace in traces], 5, right=True),
        Column("OUTCOME", [one_line(trace.outcome) for trace in traces], 9),
    ]
    header, *rows = drawn(fitted(columns, width))
    at = header.index("OUTCOME")
    lines = [header]
    for trace, row in zip(traces, rows, strict=True):
        lines.append(row[:at] + click.style(row[at:], fg=_colour(trace)))
        if trace.reason:
            lines.append(wrapped(_why(trace), width, indent="  "))
    return "\n".join(lines)


def page(trace: Trace, width: int | None) -> str:
    """All that is known of one request, on whichever machines it ran."""
    if trace.machine:
        trace = seen_from_here(trace, one_line(trace.machine))
    first = wrapped(one_line(trace.summary), width)
    parts = [click.style(first, fg="yellow" if trace.late else None, bold=True)] if trace.summary else []
    parts.append(_facts(_story(trace), width))
    if trace.there is not None:
        there = seen_from_here(trace.there, trace.answered_by)
        parts.append(f"On {_answering(trace)}:\n" + _facts(_story_there(there), width))
    elif trace.answered_by and trace.texts is None:
        parts.append(wrapped(f"{_answering(trace)} told no steps of its own.", width))
    if steps := table(trace, width):
        parts.append("\n".join(steps))
    if trace.losers:
        found = options_table(trace.losers, local_s([trace.chosen, *trace.losers]), width)
        parts.append("\n".join(["Alternatives:", *found]))
    return "\n\n".join(parts)


def _story(trace: Trace) -> Iterable[tuple[str, str]]:
    """Where it was asked: names of facts and the facts."""
    yield "request", f"{one_line(trace.id)} · {_date(trace.at_s)}"
    if trace.asked_by:
        yield "asked by", one_line(trace.asked_by)
    yield "model", one_line(trace.model)
    if trace.texts is not None:
        yield from _texts(trace, trace.texts)
        return
    if trace.prompt_tokens:
        yield (
            "prompt",
            prompt(
                trace.prompt_tokens,
                trace.cached_tokens,
                trace.kept_tokens,
                trace.restored_tokens,
                trace.fetched_tokens,
                trace.fetched_from,
            ),
        )
    for attempt in trace.earlier:
        yield "tried first", f"{_answering(attempt)}, for {brief(attempt.took_s)}: {_why(attempt)}"
    yield "plan", division(trace.chosen)
    if trace.kept_where:
        yield "known", one_line(trace.kept_where)
    if trace.parked:
        yield "parked", one_line(trace.parked)
    for sentence in trace.capped:
        yield "not believed", one_line(sentence)
    yield "outcome", _outcome(trace)
    yield "first token", _first_token(trace)
    there = trace.there
    if trace.took_s is not None and trace.completion_tokens:
        its_part = _part(there.took_s, trace) if there is not None else ""
        tokens = f"{count(trace.completion_tokens)} token" + ("" if trace.completion_tokens == 1 else "s")
        yield "answer", f"{tokens}, the last one after {brief(trace.took_s)}{its_part}"
    if there is None:
        yield from _stages(trace)
        yield from _drafts(trace)


def _texts(trace: Trace, work: TextsWork) -> Iterable[tuple[str, str]]:
    """Facts of a request for vectors or scores: which machine computed how much of it."""
    what = "document" if work.route == "rerank" else "text"
    yield f"{what}s", f"{count(work.texts)}, {count(trace.prompt_tokens)} tokens"
    yield "plan", one_line(trace.chosen.kind)
    for number, machine in enumerate(work.machines):
        yield "" if number else "machines", _machine_texts(machine, what)
    yield "outcome", _outcome(trace)
    if trace.took_s is not None:
        yield "took", brief(trace.took_s)


def _machine_texts(machine: MachineTexts, what: str) -> str:
    name = "this machine" if machine.name == THIS else one_line(machine.name)
    said = [f"{name}: {count(machine.texts)} {what}{'' if machine.texts == 1 else 's'}"]
    if machine.parts:
        parts = f"{count(machine.parts)} part{'' if machine.parts == 1 else 's'}"
        pace = (
            f" ({count(round(machine.tokens / machine.computed_s))} a second)" if machine.computed_s else ""
        )
        said.append(f"{count(machine.tokens)} tokens in {parts}, {brief(machine.computed_s)}{pace}")
    if machine.loaded_s:
        said.append(f"loaded the model for {brief(machine.loaded_s)}")
    if machine.code:
        said.append(f"then left out: {clause(machine.reason)} ({one_line(machine.code)})")
    return ", ".join(said)


def _story_there(there: Trace) -> Iterable[tuple[str, str]]:
    """Where it was answered, as far as that says more."""
    yield "trace there", one_line(there.id)
    yield "plan", division(there.chosen)
    # How exact it is for who asked has been said.
    alone = there.outcome == "local" and not there.reason
    yield "outcome", "computed there" if alone else _outcome(replace(there, exactness=""))
    yield from _stages(there)
    yield from _drafts(there)


def _facts(facts: Iterable[tuple[str, str]], width: int | None) -> str:
    return "\n".join(labelled(name, value, width, 13) for name, value in facts)


def _answering(trace: Trace) -> str:
    return one_line(trace.answered_by) or "this machine"


def _part(there_s: float | None, trace: Trace) -> str:
    """How much of a time passed on the machine that answered."""
    return "" if there_s is None else f", {brief(there_s)} of it on {_answering(trace)}"


def _drafts(trace: Trace) -> Iterable[tuple[str, str]]:
    """What came of drafts, source by source, and what that did; and what kept a drafter from it."""
    told, drafter = trace.speculation, trace.drafter
    said = []
    if told is not None and told.sources:
        by_source = ", ".join(
            f"{_source(source, drafter)} {_share(found.accepted, found.drafted)} in {_passes(found.passes)}"
            f"{_known(found)}"
            for source, found in sorted(told.sources.items())
        )
        per_pass = f"{told.tokens / told.passes:.2f} tokens per pass" if told.passes else "no pass"
        word = "saved" if told.saved_s >= 0 else "lost"
        said.append(f"right: {by_source}; {per_pass} of up to {told.width}")
        said.append(f"{word} {brief(abs(told.saved_s))}")
    if told is not None:
        said += [f"{_source(source, drafter)} {why}" for source, why in sorted(told.off.items())]
    if drafter is not None and drafter.code:
        said.append(f"{_named(drafter)} did not draft to the end: {clause(drafter.reason)} ({drafter.code})")
    elif drafter is not None and told is None:
        said.append(f"{_named(drafter)} was asked; none of its drafts was verified")
    if said:
        yield "drafts", one_line("; ".join(said))


def _known(found: SourceCounts) -> str:
    """How much of the text a source that drafts from hidden states began with."""
    if not found.known_tokens:
        return ""
    more = f" of {found.wanted_tokens:,}" if found.wanted_tokens > found.known_tokens else ""
    return f" from {found.known_tokens:,}{more} tokens' hidden states on"


def _stages(trace: Trace) -> Iterable[tuple[str, str]]:
    """Which machine had which layers of a model over several, and what a step took there and on the way."""
    for number, stage in enumerate(trace.stages):
        said = [f"layers {stage.first}-{stage.last - 1} on {one_line(stage.name) or 'this machine'}"]
        if stage.steps:
            said.append(f"{brief(stage.computed_s)} a step")
        if stage.steps and number:
            said.append(f"{brief(stage.way_s)} on the way")
        if stage.relayed:
            said.append("reached through this machine")
        yield "" if number else "stages", ", ".join(said)


def _source(name: str, drafter: DrafterView | None) -> str:
    """A source's name in figures; for another worker's drafts also that worker's."""
    return f"drafter ({_named(drafter)})" if name == "drafter" and drafter is not None else one_line(name)


def _named(drafter: DrafterView) -> str:
    return f"{one_line(drafter.model)} on {one_line(drafter.machine)}"


def _share(part: int, whole: int) -> str:
    percent = f" ({100 * part / whole:.0f} %)" if whole else ""
    return f"{count(part)} of {count(whole)}{percent}"


def _passes(number: int) -> str:
    return f"{count(number)} pass" + ("" if number == 1 else "es")


def _outcome(trace: Trace) -> str:
    said = _OUTCOMES.get(trace.outcome, one_line(trace.outcome))
    if trace.answered_by:
        where = {
            "remote": f"answered by {_answering(trace)}",
            "smart": f"{said}, answered by {_answering(trace)}",
        }
        said = where.get(trace.outcome, f"{said} on {_answering(trace)}")
    if trace.outcome == "fallback" and trace.verified_tokens:
        said += f", from {count(trace.verified_tokens)} verified tokens on"
    if trace.exactness:
        said += f" · {one_line(trace.exactness)}"
    if trace.kv_bits:
        said += f" · KV {trace.kv_bits} bits"
    if trace.wire_bits:
        said += f" · wire {trace.wire_bits} bits"
    return f"{said} · {_why(trace)}" if trace.reason or trace.code else said


def _first_token(trace: Trace) -> str:
    """Planned and actual, from the arrival on."""
    planned_s, actual_s = trace.planned_ttft_s, trace.ttft_s
    there_s = trace.there.ttft_s if trace.there is not None else None
    its_part = _part(there_s, trace) if actual_s is not None else ""
    if planned_s is None:
        return f"{brief(actual_s)}, not planned{its_part}"
    off = miss(actual_s, planned_s)
    said = f"{brief(planned_s)} planned, {brief(actual_s)} actual" + (f" ({off})" if off != "-" else "")
    return said + its_part


def _why(trace: Trace) -> str:
    code = f" ({one_line(trace.code)})" if trace.code else ""
    return f"{clause(trace.reason) or 'no reason given'}{code}"


def _plan(trace: Trace, *, cut: bool) -> str:
    """A plan in a list: its kind and its helpers."""
    kind, others = one_line(trace.chosen.kind) or "-", helpers(trace.chosen)
    if trace.chosen.kind == "local" or not others:
        return kind
    if not cut:
        return f"{kind}: {', '.join(others)}"
    more = f" +{len(others) - 1}" if others[1:] else ""
    return f"{kind}: {shortened(others[0], _HELPER_CHARS)}{more}"


def _tokens(trace: Trace) -> str:
    """Tokens in a list: the prefilled ones first, if others were left out."""
    kept = f"{count(trace.kept_tokens)} of " if trace.kept_tokens else ""
    return kept + count(trace.prompt_tokens)


def _colour(trace: Trace) -> str | None:
    colour = _COLOURS.get(trace.outcome)
    return "yellow" if trace.late and colour in (None, "green") else colour


def _model(name: str, *, cut: bool) -> str:
    # Before the slash is the publisher of a model, after it the model itself.
    return shortened(one_line(name.rpartition("/")[2]), _NAME_CHARS) if cut else one_line(name)


def _when(at_s: float) -> str:
    """The time of day, and the day where it is not today."""
    then, now = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%m-%d %H:%M", then)


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
