"""How plans and traces of `/fleet/v1/plan` and `/fleet/v1/traces` are worded. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fleetctl.render.text import clause, count, listed, one_line
from fleetd.control.prefill_plan import DraftsView, OptionView

THIS = "this"
_LEAST, _LEAST_S = 0.05, 0.1


def machines(option: OptionView) -> str:
    """The machines of an option, joined; this one if the daemon names none."""
    return " + ".join(one_line(node) for node in option.nodes) or THIS


def helpers(option: OptionView) -> list[str]:
    """The machines of an option other than this one."""
    return [one_line(node) for node in option.nodes if node != THIS]


def way(option: OptionView) -> str:
    """The kind of an option; of smart prefill also in which form and how what is kept is answered."""
    kind, then = one_line(option.kind), one_line(option.prefill)
    if kind in ("", "any"):
        return "-"  # a machine that cannot help at all
    bits = f" ({option.wire_bits} bits)" if option.wire_bits else ""
    form = f" {one_line(option.form)}" if option.form else ""
    several = kind in ("smart", "remote") and then not in ("", "local")
    return f"{kind}{form}" + (f" + {then}" if several else "") + bits


def division(option: OptionView) -> str:
    """Which machine computes what, as a clause; the kind alone if that says it all."""
    kind, others = one_line(option.kind) or "-", helpers(option)
    if option.kind == "remote" and others:
        how = one_line(option.prefill)
        by = f", {how} with {listed(others[1:])}" if how else f", helped by {listed(others[1:])}"
        who = f"{others[0]} answers" + (by if others[1:] else "")
    elif option.kind == "whole" and others:
        who = f"all of it on {others[0]}"
    elif option.kind != "smart" and len(option.cuts) == len(option.nodes) + 1:
        shares = zip(option.nodes, itertools.pairwise(option.cuts), strict=True)
        parts = [
            f"{one_line(node)} {count(first)} to {count(last - 1)}"
            for node, (first, last) in shares
            if last > first
        ]
        who = ", ".join(parts)
    else:
        return way(option)
    chunks = f", in chunks of {count(option.chunk)} tokens" if option.chunk else ""
    wire = f", rows sent in {option.wire_bits} bits" if option.wire_bits else ""
    return f"{kind}: {who}{chunks}{wire}"


def drafts_line(drafts: DraftsView) -> str:
    """Which sources would draft for the answer; where there are none, why."""
    if not drafts.sources:
        return f"Drafting: off, {clause(drafts.reason) or 'no source can draft'}."
    words = {"lookup": "prompt lookup", "drafter": _drafter(drafts), "mtp": "its own MTP head"}
    named = ", ".join(words.get(source) or one_line(source) for source in drafts.sources)
    missing = ""
    if drafts.draft_model and not drafts.drafters:
        missing = f" No machine can draft with {one_line(drafts.draft_model)} now."
    if drafts.no_room:
        missing += f" {one_line(drafts.no_room)}"
    same = ", same text" if drafts.verdict.startswith("exact") else ""
    return f"Drafting: on, up to {drafts.width} tokens at a time{same}. Sources: {named}.{missing}"


def _drafter(drafts: DraftsView) -> str:
    first, *others = [one_line(machine) for machine in drafts.drafters] or [THIS]
    instead = f" (else {', '.join(others)})" if others else ""
    return f"{one_line(drafts.draft_model)} on {first}{instead}"


def local_s(options: Sequence[OptionView]) -> float | None:
    """Seconds that this machine alone would take; None if that is not known."""
    return next((option.predicted_s for option in options if option.kind == "local"), None)


def prompt(
    tokens: int, cached: int, kept: int = 0, restored: int = 0, fetched: int = 0, fetched_from: str = ""
) -> str:
    """A prompt's length, with the tokens that were kept of it and those that were known already, some of
    which may have been ``restored`` from the disk or ``fetched`` from another machine."""
    read = f", {count(kept)} of them kept" if kept else ""
    known = f", {count(cached)} of them known already" if cached else ""
    sources = [f"{count(restored)} from the disk"] if restored else []
    if fetched:
        sources.append(f"{count(fetched)} from {one_line(fetched_from) or 'another machine'}")
    if sources:
        known += f" ({', '.join(sources)})"
    return f"{count(tokens)} tokens{read}{known}"


def miss(actual_s: float | None, planned_s: float | None) -> str:
    """The ``deviation`` in percent; "-" also for one of at most 5 % or 100 ms, which says nothing."""
    if actual_s is None or not planned_s:
        return "-"
    off_s = abs(actual_s - planned_s)
    return deviation(actual_s, planned_s) if off_s > max(_LEAST_S, _LEAST * planned_s) else "-"


def deviation(actual_s: float | None, predicted_s: float | None) -> str:
    """1.1 against 1.0 → "+10 %"; "-" where one of them is not known."""
    if actual_s is None or not predicted_s:
        return "-"
    percent = 100 * (actual_s / predicted_s - 1)
    return f"{percent:+.0f} %" if abs(percent) < 999.5 else f"{actual_s / predicted_s:,.0f}x"
