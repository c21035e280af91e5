"""Shared prefill as the daemon tells it (`/fleet/v1/plan`, `/fleet/v1/traces`), and how it is worded. Pure.

Every field has a default and unknown ones are ignored, as in ``fleetctl.fleet``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from fleetctl.text import clause, count, one_line

THIS = "this"


class Step(msgspec.Struct, frozen=True):
    name: str = ""
    seconds: float = 0.0
    n_bytes: int = 0
    machine: str = ""


class Option(msgspec.Struct, frozen=True):
    """``predicted_s`` None: it cannot be done at all."""

    kind: str = ""
    nodes: list[str] = []
    predicted_s: float | None = None
    steps: list[Step] = []
    chosen: bool = False
    code: str = ""
    reason: str = ""
    cuts: list[int] = []
    chunk: int = 0

    @property
    def machines(self) -> str:
        return " + ".join(one_line(node) for node in self.nodes) or THIS

    @property
    def helpers(self) -> list[str]:
        return [one_line(node) for node in self.nodes if node != THIS]

    @property
    def division(self) -> str:
        """Who computes what, as a clause; only the kind where that says it all."""
        kind = one_line(self.kind) or "-"
        if self.kind == "whole" and self.helpers:
            who = f"all of it on {self.helpers[0]}"
        elif self.kind in ("layers", "tokens") and len(self.cuts) == len(self.nodes) + 1:
            shares = zip(self.nodes, itertools.pairwise(self.cuts), strict=True)
            parts = [
                f"{one_line(node)} {count(first)} to {count(last - 1)}"
                for node, (first, last) in shares
                if last > first
            ]
            who = ", ".join(parts)
        else:
            return kind
        return f"{kind}: {who}" + (f", in chunks of {count(self.chunk)} tokens" if self.chunk else "")


class Drafts(msgspec.Struct, frozen=True):
    """Who would guess ahead for an answer; without ``sources`` nobody, and ``reason`` says why."""

    verdict: str = ""
    sources: list[str] = []
    width: int = 1
    draft_model: str = ""
    drafters: list[str] = []
    remembers: bool = False
    reason: str = ""

    @property
    def line(self) -> str:
        if not self.sources:
            return f"Drafts: none, {clause(self.reason) or 'nobody guesses'}."
        words = {"lookup": "prompt lookup", "suffix": "suffix", "drafter": self._drafter}
        if self.remembers:
            words["suffix"] = "suffix with past answers"
        named = ", ".join(words.get(source) or one_line(source) for source in self.sources)
        missing = ""
        if self.draft_model and not self.drafters:
            missing = f" No machine can draft with {one_line(self.draft_model)} now."
        return (
            f"Drafts: {named}; up to {self.width} tokens per pass. Verdict: {clause(self.verdict)}.{missing}"
        )

    @property
    def _drafter(self) -> str:
        first, *others = [one_line(machine) for machine in self.drafters] or [THIS]
        instead = f" (else {', '.join(others)})" if others else ""
        return f"{one_line(self.draft_model)} on {first}{instead}"


class Plan(msgspec.Struct, frozen=True):
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    options: list[Option] = []
    drafts: Drafts | None = None

    @property
    def local_s(self) -> float | None:
        return local_s(self.options)


class Guessed(msgspec.Struct, frozen=True):
    """Tokens that a source of drafts guessed, and those that were right."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0


class Speculation(msgspec.Struct, frozen=True):
    """What drafts did for an answer; ``saved_s`` below 0 is time that was lost."""

    width: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    tokens: int = 0
    saved_s: float = 0.0
    sources: dict[str, Guessed] = {}


class Drafter(msgspec.Struct, frozen=True):
    """Whose drafts an answer was given."""

    model: str = ""
    machine: str = ""


class Trace(msgspec.Struct, frozen=True):
    """``prefill_s``: what ``chosen.predicted_s`` predicts. ``ttft_s`` counts from the request's arrival.

    ``kept_tokens``: of the prompt's, those that were prefilled, where some were left out; else 0.
    """

    id: str = ""
    at_s: float = 0.0
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chosen: Option = Option()
    losers: list[Option] = []
    steps: list[Step] = []
    outcome: str = ""
    exactness: str = ""
    prefill_s: float | None = None
    ttft_s: float | None = None
    code: str = ""
    reason: str = ""
    verified_tokens: int = 0
    speculation: Speculation | None = None
    kept_tokens: int = 0
    drafter: Drafter | None = None


class Traces(msgspec.Struct, frozen=True):
    traces: list[Trace] = []


def local_s(options: Sequence[Option]) -> float | None:
    """What this machine alone would take."""
    return next((option.predicted_s for option in options if option.kind == "local"), None)


def prompt(tokens: int, cached: int, kept: int = 0) -> str:
    read = f", {count(kept)} of them kept" if kept else ""
    known = f", {count(cached)} of them known already" if cached else ""
    return f"{count(tokens)} tokens{read}{known}"


def deviation(actual_s: float | None, predicted_s: float | None) -> str:
    """1.1 against 1.0 → "+10 %"; "-" where one of them is not known."""
    if actual_s is None or not predicted_s:
        return "-"
    percent = 100 * (actual_s / predicted_s - 1)
    return f"{percent:+.0f} %" if abs(percent) < 999.5 else f"{actual_s / predicted_s:,.0f}x"
