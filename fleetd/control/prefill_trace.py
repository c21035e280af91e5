"""The body of GET /fleet/v1/traces: where each request ran, what was planned for it, and what came of it.

Times are seconds, ``at_s`` is Unix time. A trace never holds a word of a prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd.control.prefill_plan import OptionView
from fleetd.text.bounded import Natural, Seconds, SignedSeconds, Text

# shared: as planned. fallback: begun together, ended here. local: computed here from the start, by plan or
# because no agreement was reached (then with a code). smart: a part of the prompt was left out. remote:
# another machine answered. spread: several machines computed vectors or scores.
Outcome = Literal["shared", "fallback", "local", "cancelled", "failed", "smart", "remote", "spread"]


class SourceCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens that one source drafted, those of them that were right, and the passes that verified them."""

    drafted: Natural = 0
    accepted: Natural = 0
    passes: Natural = 0
    # Of a source that drafts from hidden states: of how many tokens it knew them at its first draft. Those of
    # a prefix that was in memory, on the disk or on another machine are not known.
    known_tokens: Natural = 0
    # Of how many it would have known them if all of the prompt had been computed on the machine.
    wanted_tokens: Natural = 0


class Speculated(msgspec.Struct, frozen=True, omit_defaults=True):
    """What drafts did for an answer."""

    # The most tokens that one pass could verify.
    width: Natural = 0
    drafted: Natural = 0
    accepted: Natural = 0
    # All passes and tokens while the answer was decoded alone, also those without a draft.
    passes: Natural = 0
    tokens: Natural = 0
    # Estimated from the measured cost of plain steps; below 0 if drafts lost time.
    saved_s: SignedSeconds = 0.0
    sources: Annotated[dict[Text, SourceCounts], Meta(max_length=16)] = {}
    # By source that could have drafted and was not asked, or not verified: why. "off: …".
    off: Annotated[dict[Text, Text], Meta(max_length=16)] = {}


class GroupStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine's part of a model over several, and what a plain step of an answer took there."""

    # Of the machine; "" for the one that answered, whose layers come first.
    name: Text = ""
    # Layers [first, last).
    first: Natural = 0
    last: Natural = 0
    # Medians of the last steps until the answer ended: in the layers, and on the way. That is the way to the
    # machine and on from there to the next one that has layers, as far as it is not in that one's figure.
    computed_s: Seconds = 0.0
    way_s: Seconds = 0.0
    # How many steps they are of.
    steps: Natural = 0
    # Hidden states of the machine before it came through the one that answered: the two did not reach each
    # other.
    relayed: bool = False


class TraceStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a request as it went, by the clock of the machine that was asked.

    The first step is the request; its parts are its phases (waiting, loading, reading, writing), which follow
    one another without a gap, and what went on beside them. Each other step is part of one before it, and
    lies inside of that one.
    """

    name: str
    # The name of the machine where it ran.
    machine: str = ""
    # Seconds after the arrival of the request.
    begin_s: float = 0.0
    end_s: float = 0.0
    # Spent on it; less than from begin to end if other work was done in between.
    seconds: float = 0.0
    # That crossed a link.
    n_bytes: int = 0
    # The place in the list of the step that it is part of; None for the request itself.
    parent: int | None = None
    # None if it was not planned.
    planned_s: float | None = None


class DrafterView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model that drafted for an answer, and the machine on which it ran."""

    model: str = ""
    machine: str = ""
    # Why it did not draft, or stopped before the answer ended.
    code: str = ""
    reason: str = ""


class MachineTexts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one machine did for a request for vectors or scores."""

    # "this" for the machine that was asked.
    name: Text = ""
    # It was given the texts in so many parts.
    parts: Natural = 0
    texts: Natural = 0
    tokens: Natural = 0
    # From a part's way out to its answer, all parts together; a load is not in it.
    computed_s: Seconds = 0.0
    loaded_s: Seconds = 0.0
    # Why it was given no more; both "" if it was not left out.
    code: str = ""
    reason: str = ""


class TextsWork(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request for vectors or scores was, and who computed it."""

    # "embeddings" or "rerank".
    route: Text = ""
    # How many vectors or scores were asked for.
    texts: Natural = 0
    # In the order in which they began.
    machines: list[MachineTexts] = []


class Trace(msgspec.Struct, frozen=True):
    """One request: where it ran, what was planned for its prompt, and what came of it."""

    id: str = ""
    # Unix time of its arrival.
    at_s: float = 0.0
    model: str = ""
    prompt_tokens: int = 0
    # Tokens of the prompt that were not computed for it: from memory, the disk or another machine.
    cached_tokens: int = 0
    # The plan that was chosen, and the others.
    chosen: OptionView = OptionView()
    losers: list[OptionView] = []
    # Each comes behind the one that it is part of.
    steps: list[TraceStep] = []
    # An ``Outcome``.
    outcome: str = ""
    # exact, equivalent or lossy.
    exactness: str = ""
    # In how many bits the machine that answered held keys and values; 0 is as they are computed.
    kv_bits: int = 0
    # In how many bits helpers sent keys and values that were used; 0 is as they are held.
    wire_bits: int = 0
    # From the decision to the first token, to be compared with ``chosen.predicted_s``; None if none came.
    prefill_s: float | None = None
    # From the arrival to the first token, so with queueing and tokenizing; None if none came.
    ttft_s: float | None = None
    # Why it was not done as chosen, as a code and as a sentence.
    code: str = ""
    reason: str = ""
    # Tokens that helpers had computed and that this machine used, if sharing ended early.
    verified_tokens: int = 0
    # The machines of a model over several, in the order of its layers; empty for any other.
    stages: list[GroupStage] = []
    # What drafts did for the answer; ``drafter`` is the source of those named "drafter".
    speculation: Speculated | None = None
    # Tokens of the prompt that were prefilled, if some were left out; else 0.
    kept_tokens: int = 0
    drafter: DrafterView | None = None
    completion_tokens: int = 0
    # From the arrival to the end; of an earlier attempt, its own seconds.
    took_s: float | None = None
    # Seconds that the prefill took less than this machine alone was expected to take, and that drafts saved;
    # None if neither is known.
    saved_s: float | None = None
    # The machine whose user asked; "" for this one.
    asked_by: str = ""
    # The program that asked, as it calls itself; "" if it did not say, or asked another machine.
    client: str = ""
    # The machine that answered; "" for this one.
    answered_by: str = ""
    # That machine's own trace, in which "this" is that machine and seconds are counted from the arrival
    # there; None if it told none. Its steps are among the steps here.
    there: Trace | None = None
    # Attempts before the last one, each with why it failed.
    earlier: list[Trace] = []
    # Sentences about speeds that other machines claim and that were not believed.
    capped: list[str] = []
    # Of the cached tokens, those from the disk of the machine that answered …
    restored_tokens: int = 0
    # … and those that the machine ``fetched_from`` sent it.
    fetched_tokens: int = 0
    fetched_from: str = ""
    # The machine that had read the beginning of the prompt before, and if it did not get the request, why.
    kept_where: str = ""
    # What took how long, what was planned, and what it would have taken alone: one sentence.
    summary: str = ""
    # The name of the machine that was asked; "this" elsewhere in this trace.
    machine: str = ""
    # That the model was not loaded while another one scored the prompt, and what loads took: one sentence.
    parked: str = ""
    # From the arrival to the first token as planned, to be compared with ``ttft_s``; None if not priced.
    planned_ttft_s: float | None = None
    # The first token came more than half as late again as planned, and more than 100 ms.
    late: bool = False
    # The same as ``planned_ttft_s`` for ``machine`` alone.
    alone_s: float | None = None
    # When it arrived, by the monotonic clock of ``machine``.
    clock_s: float = 0.0
    # Of a request for vectors or scores, which has tokens of texts as ``prompt_tokens`` and no first token.
    texts: TextsWork | None = None


class TracesView(msgspec.Struct, frozen=True):
    """The answer to ?last=N or ?id=REQUEST, newest first."""

    traces: list[Trace] = []
