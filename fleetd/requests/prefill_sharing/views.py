"""What people and programs see of shared prefills: the bodies of ``/fleet/v1/plan`` and ``/fleet/v1/traces``.

Data only. Times are seconds, ``at_s`` is Unix time. Machines are named as people know them, "this" is the one
that answers. Nothing here ever holds a word of a prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.engine.protocol import Speculated
from fleetd.plan.prefill.options import Kind

PlanKind = Literal[Kind, "smart"]
# shared: as planned. fallback: begun together, ended here. local: computed here from the start, by plan or
# because no agreement was reached (then with a code). smart: a part of the prompt was left out.
Outcome = Literal["shared", "fallback", "local", "cancelled", "failed", "smart"]
_Text = Annotated[str, Meta(max_length=limits.CONTROL_TEXT_CHARS)]
_Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class PlanQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /fleet/v1/plan: a prompt's length in tokens, or a text to count roughly.

    ``cached``: of these, tokens that this machine holds already. ``smart``: as if smart prefill were asked
    for, with this share of the tokens or, 0, as many as scores usually call for.
    """

    model: _Text = ""
    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    text: str | None = None
    cached: _Tokens = 0
    smart: Annotated[float, Meta(ge=0, le=1)] | None = None


class StepView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step as predicted or as it went: ``machine`` is whose, "" where it is nobody's alone."""

    name: str
    seconds: float
    n_bytes: int = 0
    machine: str = ""


class OptionView(msgspec.Struct, frozen=True):
    """One way to prefill a prompt. ``nodes``: helpers in the order of the chain, then "this".

    ``predicted_s`` is None where it is impossible. ``cuts`` are tokens or layers, as ``plan.split.Split`` has
    them. ``code`` and ``reason``: why it was not taken, "" for the one that was.
    """

    kind: PlanKind
    nodes: list[str]
    predicted_s: float | None
    steps: list[StepView] = []
    chosen: bool = False
    code: str = ""
    reason: str = ""
    cuts: list[int] = []
    chunk: int = 0


class DraftsView(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the answer would be drafted for on this machine, if it is decoded alone and its prompt read whole.

    ``sources``: who guesses, preferred ones first; where there are none, ``reason`` says why. ``width``: most
    tokens of one pass; an answer's acceptance and the cost of passes may leave fewer. ``verdict``: of the
    probe. ``draft_model`` drafts on the first of the machines ``drafters`` that can. ``remembers``: past
    answers are drafted from as well.
    """

    verdict: str
    sources: list[str] = []
    width: int = 1
    draft_model: str = ""
    drafters: list[str] = []
    remembers: bool = False
    reason: str = ""


class PlanView(msgspec.Struct, frozen=True):
    """The answer of POST /fleet/v1/plan: the chosen option first, then the others, cheapest first."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    options: list[OptionView]
    drafts: DraftsView | None = None


class DrafterView(msgspec.Struct, frozen=True):
    """Who drafted for an answer: a model, and the machine on which it did."""

    model: str
    machine: str


class Trace(msgspec.Struct, frozen=True):
    """One request that others helped with, or could have: what was planned and what came of it.

    ``prefill_s``: from the decision to the first token, to be held against ``chosen.predicted_s``.
    ``ttft_s``: from the request's arrival, so with queueing and tokenizing. Both None if no token came.
    ``kept_tokens``: of the prompt's, those that were prefilled, where some were left out; else 0.
    ``code`` and ``reason``: why it was not done as chosen. ``speculation``: what drafts did for the answer;
    ``drafter``: whose those of the source "drafter" are.
    """

    id: str
    at_s: float
    model: str
    prompt_tokens: int
    cached_tokens: int
    chosen: OptionView
    losers: list[OptionView]
    steps: list[StepView]
    outcome: Outcome
    exactness: Literal["exact", "plan", "lossy"] = "exact"
    prefill_s: float | None = None
    ttft_s: float | None = None
    code: str = ""
    reason: str = ""
    verified_tokens: int = 0
    speculation: Speculated | None = None
    kept_tokens: int = 0
    drafter: DrafterView | None = None


class TracesView(msgspec.Struct, frozen=True):
    """The answer of GET /fleet/v1/traces?last=N or ?id=REQUEST: newest first."""

    traces: list[Trace]
