"""The body of GET /fleet/v1/traces: requests whose prefill others helped with, or could have.

Times are seconds, ``at_s`` is Unix time. A trace never holds a word of a prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd.bounded import Natural, SignedSeconds, Text
from fleetd.control.prefill_plan import OptionView, StepView

# shared: as planned. fallback: begun together, ended here. local: computed here from the start, by plan or
# because no agreement was reached (then with a code). smart: a part of the prompt was left out.
Outcome = Literal["shared", "fallback", "local", "cancelled", "failed", "smart"]


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


class DrafterView(msgspec.Struct, frozen=True):
    """The model that drafted for an answer, and the machine on which it ran."""

    model: str = ""
    machine: str = ""


class Trace(msgspec.Struct, frozen=True):
    """One request: what was planned for its prompt, and what came of it. ``outcome`` is an ``Outcome``.

    ``prefill_s``: from the decision to the first token, to be compared with ``chosen.predicted_s``.
    ``ttft_s``: from the request's arrival, so with queueing and tokenizing. Both None if no token came.
    ``kept_tokens``: of the prompt's, those that were prefilled, where some were left out; else 0.
    ``code`` and ``reason``: why it was not done as chosen. ``exactness``: exact, plan or lossy.
    ``speculation``: what drafts did for the answer; ``drafter``: the source of those named "drafter".
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


class TracesView(msgspec.Struct, frozen=True):
    """The answer to ?last=N or ?id=REQUEST, newest first."""

    traces: list[Trace] = []
