"""The body of GET /fleet/v1/traces: where each request ran, what was planned for it, and what came of it.

Times are seconds, ``at_s`` is Unix time. A trace never holds a word of a prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.text.bounded import Natural, SignedSeconds, Text

# shared: as planned. fallback: begun together, ended here. local: computed here from the start, by plan or
# because no agreement was reached (then with a code). smart: a part of the prompt was left out. remote:
# another machine answered.
Outcome = Literal["shared", "fallback", "local", "cancelled", "failed", "smart", "remote"]


class SourceCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens that one source drafted, those of them that were right, and the passes that verified them."""

    drafted: Natural = 0
    accepted: Natural = 0
    passes: Natural = 0


class Speculated(msgspec.Struct, frozen=True, omit_defaults=True):
    """What drafts did for an answer.

    ``width``: most tokens one pass could verify. ``passes`` and ``tokens``: all of them while the answer was
    decoded alone, those without a draft included. ``saved_s``: estimated from the measured cost of plain
    steps; below 0 where time was lost.
    """

    width: Natural = 0
    drafted: Natural = 0
    accepted: Natural = 0
    passes: Natural = 0
    tokens: Natural = 0
    saved_s: SignedSeconds = 0.0
    sources: Annotated[dict[Text, SourceCounts], Meta(max_length=16)] = {}


class DrafterView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model that drafted for an answer, and the machine on which it ran.

    ``steps``: that machine's, from when it was asked; empty if it told none. ``code`` and ``reason``: why it
    did not draft, or stopped before the answer ended.
    """

    model: str = ""
    machine: str = ""
    steps: list[StepView] = []
    code: str = ""
    reason: str = ""


class Trace(msgspec.Struct, frozen=True):
    """One request: where it ran, what was planned for its prompt, and what came of it. ``outcome`` is an
    ``Outcome``.

    ``prefill_s``: from the decision to the first token, to be compared with ``chosen.predicted_s``.
    ``ttft_s``: from the request's arrival, so with queueing and tokenizing. Both None if no token came.
    ``restored_tokens``: of the cached ones, those that came from the disk of the machine that answered;
    ``fetched_tokens``: those that the machine ``fetched_from`` sent it.
    ``kept_tokens``: of the prompt's, those that were prefilled, where some were left out; else 0.
    ``code`` and ``reason``: why it was not done as chosen. ``exactness``: exact, plan or lossy.
    ``speculation``: what drafts did for the answer; ``drafter``: the source of those named "drafter".
    ``saved_s``: what the prefill took less than this machine alone was expected to, and what drafts saved;
    None if neither is known.
    ``took_s``: from the request's arrival to its end; of an earlier attempt, as long as that took.
    ``capped``: sentences about speeds that other machines claim and that were not believed. ``kept_where``:
    which machine had read the beginning of the prompt before, and if it did not get the request, why.

    ``asked_by``: the machine whose user asked; ``answered_by``: the machine that answered; "" for this one.
    ``there``: that machine's own trace, in which "this" is that machine and times begin with the arrival
    there; None if it told none. ``earlier``: attempts before the last one, each with why it failed.
    """

    id: str = ""
    at_s: float = 0.0
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chosen: OptionView = OptionView()
    losers: list[OptionView] = []
    steps: list[StepView] = []
    outcome: str = ""
    exactness: str = ""
    prefill_s: float | None = None
    ttft_s: float | None = None
    code: str = ""
    reason: str = ""
    verified_tokens: int = 0
    speculation: Speculated | None = None
    kept_tokens: int = 0
    drafter: DrafterView | None = None
    completion_tokens: int = 0
    took_s: float | None = None
    saved_s: float | None = None
    asked_by: str = ""
    answered_by: str = ""
    there: Trace | None = None
    earlier: list[Trace] = []
    capped: list[str] = []
    restored_tokens: int = 0
    fetched_tokens: int = 0
    fetched_from: str = ""
    kept_where: str = ""


class TracesView(msgspec.Struct, frozen=True):
    """The answer to ?last=N or ?id=REQUEST, newest first."""

    traces: list[Trace] = []
