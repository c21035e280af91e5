"""Messages between the daemon and an engine worker, and how they are framed.

Sans-IO: encode to bytes, feed bytes in, get messages out. One Unix socket per worker, one frame per message:
``u32 length (big endian) | MessagePack``. Both ends are the same installation, so there is no version field;
unknown tags are a bug and raise.

    daemon → worker   Generate, PrefillWithHelpers | PrefillAlone (if Generate asked for it), FetchBlocks
                      (after a KvMissing), AssistPrefill, Question, DraftFor, EmbedTexts, RerankTexts, Cancel,
                      IdleTime, FreeMemory, TakenElsewhere, ForgetOrigins, WriteNow, Shutdown
    worker → daemon   Loading*, Ready | LoadFailed, MeasuredAgain*, then for each Generate:
                      Tokenized, Accepted (KvMissing and KvFetched before it or after it), Prefill*,
                      PrefillReport?, KvStored?, (Delta | ToolCallPiece* ToolCall)*, Finished | Failed
                      for each AssistPrefill: Accepted, Assisted | Failed
                      for each ServeStage: Accepted, Failed
                      for each Question: Accepted, Prefill*, its answer | Failed
                      for each DraftFor: Accepted, DraftReport | Failed
                      for each EmbedTexts: Accepted, TextsEmbedded, Finished | Failed
                      for each RerankTexts: Accepted, TextsReranked, Finished | Failed
                      and Heartbeat at least every ``limits.ENGINE_BEAT_S``

Streams to other machines' workers come beside it, on a channel that can carry sockets: ``sealed.handoff``
messages, each a ``StreamTag``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.compression.packed import PackedScores
from fleetd.control.model_change import MemberProgress
from fleetd.control.model_facts import KvBits, MeasuredSpeed, ModelShape, WireBits
from fleetd.control.prefill_trace import GroupStage, Speculated
from fleetd.engine.sampling.constraint import Constraint, ConstraintText
from fleetd.engine.sampling.parameters import Sampling as Sampling
from fleetd.plan.prefill.split import Split, WarmRows
from fleetd.text.bounded import Count, Logprob, Natural, Seconds, Share, Text
from fleetd.text.decoding import msgpack_decoder

# ---- What to generate ------------------------------------------------------------------------------------

StopString = Annotated[str, Meta(min_length=1, max_length=limits.STOP_STRING_CHARS)]
StopList = Annotated[list[StopString], Meta(max_length=limits.STOP_STRINGS)]
Logprobs = Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS)]

# A token id.
Token = Natural
# Of a request here or there: what others call theirs, and what is put behind it.
EventId = Annotated[str, Meta(max_length=2 * limits.REQUEST_ID_CHARS)]

# Arguments of a chat template that the engine sets itself; one of them is the template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message"}
)  # fmt: skip


# Those by which thinking is switched on and off: templates read one of them, and ignore the other.
THINKING_SWITCHES = ("enable_thinking", "thinking")


# A message as chat templates know it. Beside what they read, one of a user's may have IMAGES.
Message = dict[str, Any]
IMAGES = "images"
# (characters of the message's content before it, the image's file)
ImageAt = tuple[Natural, bytes]
ImageList = Annotated[list[ImageAt], Meta(max_length=limits.IMAGES)]


class ChatPrompt(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Messages to be rendered by the model's own chat template (sandboxed, in the worker).

    A message may have an ``ImageList`` under IMAGES, ascending by place.

    ``cache_marks``: (index of a message, characters of its content) after which the client expects that its
    next requests go on. They change no token.
    """

    messages: Annotated[list[Message], Meta(max_length=limits.MESSAGES)]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=limits.TOOLS)] | None = None
    # "auto" lets the model decide; "none" hides the tools; with "required" and {"name": ...} the answer is
    # calls of tools.
    tool_choice: Literal["auto", "none", "required"] | dict[str, str] = "auto"
    template_kwargs: dict[str, Any] = {}
    cache_marks: Annotated[list[tuple[Natural, Natural]], Meta(max_length=limits.CACHE_MARKS)] = []
    # Tools whose arguments are held to their schema, or to the grammar that stands here for a tool with one
    # text; "": to its schema.
    strict_tools: dict[str, ConstraintText] = {}
    # Whether one answer may call several tools.
    parallel_calls: bool = True

    @property
    def images(self) -> int:
        """How many its messages have. Another machine may have sent what are none; ``ImageList`` decides."""
        found = (message.get(IMAGES) for message in self.messages)
        return sum(len(each) for each in found if isinstance(each, list | tuple))


class TextPrompt(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    tokens: list[Token]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


CharRange = tuple[Natural, Natural]


class Keep(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a prompt is to be prefilled: by message (0 for a text prompt) the ranges of its content's
    characters, [first, end). A message that is not named is kept whole, and so is all that the chat template
    writes itself. A token is kept if any of its characters is."""

    parts: dict[Natural, list[CharRange]]


class Speculate(msgspec.Struct, frozen=True, omit_defaults=True):
    """How drafts are used for one answer, which they never change.

    ``sources``: names from ``local_sources.SOURCE_NAMES``, None for all. ``width``: most tokens of one pass,
    0 for what pays. ``draft_model``: which model is the "drafter", "" for the one that the settings name.
    """

    enabled: bool = True
    sources: Annotated[list[str], Meta(max_length=8)] | None = None
    width: Natural = 0
    draft_model: Annotated[str, Meta(max_length=limits.MODEL_NAME_CHARS)] = ""


class Generate(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One answer."""

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]
    prompt: Prompt
    sampling: Sampling = Sampling()
    # None: until the context is full.
    max_tokens: Natural | None = None
    stop: StopList = []
    # None reports no logprobs, 0 only the chosen token's, n also the n best.
    top_logprobs: Logprobs | None = None
    # The prompt's text (and logprobs, if asked) comes before the answer, as /v1/completions has it.
    echo: bool = False
    # Once it is Accepted, the prompt waits for PrefillWithHelpers or PrefillAlone.
    shared: bool = False
    # Rows that helpers have of earlier prompts; Accepted says which are of this one's cached prefix.
    warm: Annotated[list[WarmRows], Meta(max_length=limits.SHARE_WARM_PROMPTS)] = []
    # Prefill only this of it, where the worker can.
    keep: Keep | None = None
    # None: as the settings have it.
    speculate: Speculate | None = None
    # No more than how many tokens the prompt has, which Accepted says; Finished follows it.
    count_only: bool = False
    # No other machine may learn anything of the prompt, now or later.
    local_only: bool = False
    # Only bytes that the machine which answers computes, or that are proven to be the same.
    exact: bool = False
    # Other machines may have keys and values of it; the worker asks for them by a KvMissing.
    fetches: bool = False
    # Once the prompt is read, a KvStored says which blocks it fills.
    tells_blocks: bool = False
    # Tell the arguments of tool calls while they are written, if their format is known.
    call_pieces: bool = False
    # End tokens do not end the answer, and have no text.
    ignore_eos: bool = False
    # Before the answer has so many, no end token is chosen and no stop string looked for.
    min_tokens: Natural = 0
    # What form the answer's text has to have; None: any.
    constraint: Constraint | None = None


class FetchBlocks(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to a KvMissing: its first ``blocks`` come on the stream "blocks"; 0: none come.

    ``block_s``: what one probably takes. ``equivalent``: they are those of its ``equivalent_names``.
    ``last_first``: they come from the last one to the first, while the worker computes towards them.
    ``within_s``: the most that all of them may take since it was decided, which is ``since_s`` ago; 0 is no
    bound. ``origin``: the label of the machine that sends them; without one they are in no cache that
    outlives the worker.
    """

    id: str
    blocks: Natural = 0
    block_s: Seconds = 0.0
    equivalent: bool = False
    last_first: bool = False
    within_s: Seconds = 0.0
    since_s: Seconds = 0.0
    origin: str = ""


class PrefillWithHelpers(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Prefill a waiting prompt together with others; this machine is the last one of the split.

    Its streams are "helper0", "helper1", … (everything between it and that helper but hidden states) and,
    where layers are split and its own part is not empty, "in" (hidden states from the last helper).
    ``predicted_s``: what the plan expects from here to the end of the prefill; helpers that are much later
    are given up. ``exact``: helpers' bytes must be this machine's own. ``origins``: the helpers' labels.
    ``warm``: by helper, the rows of the cached prefix that it still has; none of them if it is empty.
    ``wire_bits``: in how many bits helpers send rows; 0 is as they are held.
    """

    id: str
    split: Split
    predicted_s: Seconds
    exact: bool = False
    origins: list[str] = []
    warm: list[WarmRows | None] = []
    wire_bits: WireBits = 0


class PrefillAlone(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Prefill a prompt here: one that waits, or one that is being shared, from what is verified of it."""

    id: str
    reason: str = ""


class AssistPrefill(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Do machine ``rank``'s part of a split; answered by Accepted once its memory is reserved, then by
    Assisted, or by Failed.

    Its streams are "home" (to the machine that answers) and between neighbours in the chain "in" and "out":
    where layers are split they carry hidden states (the last helper's "out" ends at the machine that answers,
    and is absent if that one's part is empty), where tokens are split the keys and values of all before.
    ``home``: the label of the machine that answers, for which rows may be kept; none are if it is "".
    ``warm``: rows that it has kept for that one, by what that one knows.
    ``kv_bits``: in how many bits the machine that answers holds keys and values; 0 is as computed.
    ``wire_bits``: in how many its helpers send them; 0 is as they are held. ``exact``: what is kept may serve
    an answer that has to be exact.
    """

    id: str
    split: Split
    rank: int
    kv_bits: KvBits = 0
    home: str = ""
    warm: WarmRows | None = None
    wire_bits: WireBits = 0
    exact: bool = True


class ServeStage(msgspec.Struct, frozen=True, tag=True):
    """Run layers [first, last) for a worker of another machine that has the rest of the model, until that is
    gone or this is cancelled; answered by Accepted once the memory for ``tokens`` is reserved, and by Failed
    if the other worker goes. Its stream is "stage".

    ``kept_for``: whose prompts are kept on this machine's disk, a node id; none are if it is "". ``origin``:
    that machine's label."""

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]
    first: Natural
    last: Natural
    tokens: Natural
    kept_for: Text = ""
    origin: Text = ""


class Profile(msgspec.Struct, frozen=True):
    """Which heads of a model find what a question asks for, as (layer, query head), ascending, and how many
    of its ``layers`` (0 if that is not told) are run to ask them. ``recall``: the
    share of the answers in made-up texts that they found among a tenth of the tokens; 0 if not told.

    It belongs to a model's weights (its digest): scores merge only where the same profile gave them.
    """

    heads: Annotated[list[tuple[Natural, Natural]], Meta(min_length=1, max_length=limits.SCORE_HEADS)]
    exit_layer: Natural
    layers: Natural = 0
    recall: Share = 0.0


class DraftFor(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Draft for a text that another worker writes; answered by Accepted, and by DraftReport once the text
    needs no more drafts, or by Failed. Its stream is "drafts"; what is to be known of the text comes on it.

    ``ahead``: tokens that are drafted at most before more of the text is known.
    """

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]
    ahead: Annotated[int, Meta(ge=1, le=limits.DRAFT_AHEAD)] = limits.DRAFT_AHEAD


#: The stream on which a FetchBlocks' blocks come.
BLOCKS: Literal["blocks"] = "blocks"


#: The stream between a worker that answers and one of a ServeStage.
STAGE: Literal["stage"] = "stage"
#: The streams of a ServeStage from the member before it and to the one behind it. They may come later than
#: "stage", or never.
HOP_IN, HOP_OUT = "hop in", "hop out"


class StreamTag(msgspec.Struct, frozen=True):
    """What a socket that is handed to a worker is for: ``job`` is the id of a PrefillWithHelpers,
    an AssistPrefill, a ServeStage or a DraftFor, of an answer, for its drafts, or of a group's member."""

    job: str
    name: str
    key: bytes
    role: Literal["connector", "acceptor"]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a request; answered by ``Finished(reason="cancelled")`` within a step. Unknown ids are ignored."""

    id: str


class IdleTime(msgspec.Struct, frozen=True, tag=True):
    """Nothing else runs on this machine for so many ``seconds``: between its requests the worker
    may find out what it has not found out yet. 0: no longer."""

    seconds: Seconds


class WriteNow(msgspec.Struct, frozen=True, tag=True):
    """Another machine asks for a prompt that waits to be written to the disk: write what waits as fast as the
    disk takes it, also while something is computed."""


class ForgetOrigins(msgspec.Struct, frozen=True, tag=True):
    """Keep nothing that came under these labels, or rests on that, in memory: a machine has sent what is
    wrong, or has left the fleet. The disk's part is the daemon's."""

    labels: list[str]


class FreeMemory(msgspec.Struct, frozen=True, tag=True):
    """The system is short of memory: give back buffers that are kept for reuse and, if ``prompts``, the keys
    and values that are kept for later prompts."""

    prompts: bool


class TakenElsewhere(msgspec.Struct, frozen=True, tag=True):
    """So much more than when this worker was loaded is held by other workers of this machine, in bytes."""

    n_bytes: Count


class PromptsRead(msgspec.Struct, frozen=True, tag=True):
    """Other workers of this machine begin (``reading``) or end to read prompts of chats, which do not wait
    for vectors: a worker that makes these computes less meanwhile."""

    reading: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process; running requests are not finished."""


# ---- What comes back -------------------------------------------------------------------------------------


# The first words of a stage in which a load has yet to begin.
WAITING = "waiting for "
# The stage in which the worker that answers waits for the other machines, its own weights read.
CONNECTING = "connecting"


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress before Ready. ``stage`` is shown to people: verifying, reading, warming up, measuring.

    ``members``: how far the other machines of a group are.
    """

    stage: Text
    done: Count = 0
    total: Count = 0
    members: Annotated[list[MemberProgress], Meta(max_length=limits.PLACEMENT_MACHINES)] = []


class Arithmetic(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decides whether two workers compute the same bytes from the same model.

    ``layers`` holds 8 bytes per layer that the worker has, from its first one on: a hash of what that layer
    makes of numbers that are the same everywhere (``shared_prefill.fingerprint``).
    """

    accelerator: str
    dtype: str
    versions: dict[str, str]
    first_layer: Natural = 0
    layers: list[bytes] = []
    # "any", or "same": whether chunks may be cut elsewhere than by the other machine.
    chunks: Literal["any", "same"] = "same"
    # In which form states and windows are sent; 0 if these layers keep none, and of older versions.
    states: Natural = 0

    @property
    def kind(self) -> str:
        """Short; equal if two workers compute with the same code on devices of one kind."""
        parts = (self.accelerator, self.dtype, sorted(self.versions.items()))
        return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()[:16]

    @property
    def text(self) -> str:
        """Short; equal where two workers compute the same bytes with the same layers. "" if unknown."""
        if not self.layers:
            return ""
        parts = (self.dtype, self.versions.get("mlx-lm", ""), self.first_layer, self.layers, self.chunks)
        return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()[:16]


class ScoringState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a model can score: it is "ready" once its profile is known, "unmeasured" before, and "unable"
    if it has none. ``left``: about how many tokens are left to compute in the search."""

    state: Literal["unmeasured", "ready", "unable"] = "unable"
    left: Natural = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    device: Literal["cpu", "metal", "cuda"]
    # What the model is, over the layers that are held.
    shape: ModelShape
    # How many token ids the model knows.
    vocab_size: int
    # Bytes for keys and values.
    kv_budget_bytes: int
    has_chat_template: bool
    tool_calls: bool
    reasoning: bool
    # Seconds that the load took.
    load_s: float
    # Versions of the libraries that compute, by name.
    versions: dict[str, str]
    # As measured at load; a MeasuredAgain takes its place.
    speed: MeasuredSpeed = MeasuredSpeed()
    # Bytes for the prompts that its prefix cache keeps; 0 in a worker that only helps.
    prefix_budget_bytes: Count = 0
    # The layers [first, last) that are held: all of them but in a worker that only helps.
    first_layer: int = 0
    last_layer: int = 0
    # How tool calls are written, by the name of the format's parser; "" if they are not.
    tool_format: str = ""
    # The probe's verdict, whether drafts can be verified without changing a byte; it begins with "exact",
    # "declined" or "off".
    speculation: str = "off: this worker answers nothing by itself"
    # Tokens of one pass that the verdict holds for; 1 if drafts cannot be verified.
    speculation_width: int = 1
    # The verdict holds in texts of up to so many tokens.
    speculation_context: int = 0
    # What drafts from the model's hidden states: "mtp: …" if an MTP head does, "off: …" with the reason if
    # one lies beside the model and does not, "" if there is none.
    draft_head: str = ""
    # Why a Keep is not followed here; "" if it is.
    sparse: str = "This worker answers nothing by itself."
    # None if no other machine can help with this model.
    arithmetic: Arithmetic | None = None
    # At load; a Heartbeat tells how it goes on.
    scoring: ScoringState = ScoringState()
    # Equal where two models mean the same by every token id: a hash of the tokenizer's vocabulary.
    vocabulary: str = ""
    # Of a rank: seconds of one sum of a token's hidden state over all ranks, the median of some; else 0.
    sum_s: Seconds = 0.0


class MeasuredAgain(msgspec.Struct, frozen=True, tag=True):
    """The speed was measured again; it takes the place of the one in Ready."""

    speed: MeasuredSpeed


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Why the worker ends: its model cannot be loaded, or a machine that has some of it is lost."""

    code: str
    message: str
    hint: str = ""


class Tokenized(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The prompt of a Generate is rendered and tokenized, and neither too long nor too large for the memory.

    It comes at once, where Accepted waits until the compute thread has ended the step under way.
    """

    id: EventId
    prompt_tokens: Natural
    # The prompt shows tools to a model whose chat template knows none, and a grammar holds its calls.
    tools_by_grammar: bool = False


class Accepted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The prompt is rendered, tokenized and admitted; nothing is computed yet. An AssistPrefill's figures are
    those of its split."""

    id: EventId
    prompt_tokens: Natural
    # Leading tokens that the prefix cache holds; known only if the prompt ``waits``.
    cached: Natural = 0
    # In how many tokens at a time the prompt would be prefilled alone; known only if it ``waits``.
    chunk: Natural = 0
    # Whether it waits for PrefillWithHelpers or PrefillAlone: that was asked for, enough tokens are left to
    # prefill (or other machines had a part in the cached ones), and there is memory for them at once.
    waits: bool = False
    # Whether the cached tokens' numbers are those of this machine alone.
    exact: bool = True
    # Of ``prompt_tokens``, those that are prefilled because a Keep is followed; 0 if none is.
    kept: Natural = 0
    # Why a Keep is not followed; "" if it is, or there is none.
    dense_reason: Text = ""
    # Tokens after which a chunk ends, as in a Split.
    places: Annotated[list[Natural], Meta(max_length=limits.CHECKPOINTS_PER_PROMPT)] = []
    # There is room for states at so many of the last ``places``.
    states: Natural = 0
    # As in Tokenized.
    tools_by_grammar: bool = False
    # Which of Generate's ``warm`` are of this prompt's cached prefix.
    warm: Annotated[list[Natural], Meta(max_length=limits.SHARE_WARM_PROMPTS)] = []
    # Of an AssistPrefill: its ``warm`` rows are there.
    is_warm: bool = False


class Prefill(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Progress in prompt tokens, of those that are kept. The first one of a request tells how many came from
    the prefix cache."""

    id: EventId
    done: Natural
    total: Natural
    cached: Natural = 0
    # Steps of an image encoder's work for the prompt that are done. They take a CPU minutes without a token.
    image_steps: Natural = 0


class StepTime(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a shared prefill as it went."""

    # To show.
    name: Text
    # Spent on it; less than from begin to end if other work was done in between.
    seconds: Seconds
    # That crossed a link.
    n_bytes: Count = 0
    # By the monotonic clock of the machine where it ran, in seconds; both 0 if not told.
    began_s: Seconds = 0.0
    ended_s: Seconds = 0.0


class PrefillReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """How sharing a prompt ended: ``code`` and ``reason`` "" if it went as planned, else why it went on
    alone, from ``verified`` tokens. A PrefillAlone that comes before any PrefillWithHelpers is not
    answered by this."""

    id: str
    steps: list[StepTime]
    code: Text = ""
    reason: Text = ""
    verified: Natural = 0
    # By helper, ``WarmRows.prefix`` of what it has had in the end; empty if sharing did not end as planned.
    prefixes: list[bytes] = []


class Assisted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A part of another machine's prefill is computed and sent. ``kept``: its rows stay for a while."""

    id: str
    steps: list[StepTime]
    kept: bool = False


class DraftReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A text needs no more drafts. Tokens: ``drafted`` in all, ``right`` of the ``judged`` by what came."""

    id: str
    drafted: Natural = 0
    judged: Natural = 0
    right: Natural = 0


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: str
    logprob: Logprob
    raw: bytes


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's text, natural-log probability, raw bytes and the best alternatives, best first."""

    token: str
    logprob: Logprob
    raw: bytes
    top: Annotated[list[TopLogprob], Meta(max_length=limits.TOP_LOGPROBS)] = []
    # Offset of the token's text in the answer, in characters (/v1/completions reports it).
    text_offset: Natural = 0


class Delta(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Text that is certain: whole code points, no stop string, no part of a marker.

    ``tokens`` counts the tokens behind this delta, which may be 0 (flush) or many (held-back text).
    """

    id: EventId
    text: str
    channel: Literal["content", "reasoning"] = "content"
    tokens: Natural = 1
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=limits.ANSWER_TOKENS)] | None = None


class ToolCall(msgspec.Struct, frozen=True, tag=True):
    """One complete tool call; ``arguments`` is a JSON object as text. ``index`` counts from 0 per answer."""

    id: EventId
    index: Natural
    call_id: Text
    name: Text
    arguments: str


class ToolCallPiece(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """More of the arguments of call ``index``, as the model writes them. What all pieces of a call say
    together is the beginning of what its ToolCall says, unless the answer ends before the call is whole.
    """

    id: EventId
    index: Natural
    call_id: Text
    name: Text
    text: str
    tokens: Natural = 1


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: Natural = 0
    cached_tokens: Natural = 0
    completion_tokens: Natural = 0
    reasoning_tokens: Natural = 0


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds, measured in the worker: waiting for a turn, prefill, and first to last token.

    ``restored_tokens``: of the cached ones, those whose keys and values were read from the disk, in
    ``restore_s``, before the prefill, looking for them in vain included; ``fetched_tokens`` and ``fetch_s``:
    the same of another machine's, which the daemon names in ``fetched_from``. Waiting for another prompt that
    begins alike counts as waiting for a turn.

    ``prefill_interleaved``, ``decode_interleaved``: other work was computed in between, or the prompt waited
    for another one's beginning, so the time is not the machine's speed.
    """

    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    restored_tokens: Natural = 0
    restore_s: Seconds = 0.0
    fetched_tokens: Natural = 0
    fetch_s: Seconds = 0.0
    fetched_from: Text = ""
    prefill_interleaved: bool = False
    decode_interleaved: bool = False


class KvMissing(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The blocks of a prompt whose keys and values are neither in memory nor on the disk; answered by a
    FetchBlocks.

    ``names``: 32 bytes each, in the prompt's order. ``computed_s``: what computing the first one takes, the
    first two, and so on, less what a check of theirs takes. ``block_bytes``: of each.
    ``rows``: whether the model keeps rows; ``states``: whether it needs snapshots at the ends of blocks.
    ``equivalent_names``: of the same blocks, if another accelerator had a part in them; none if the answer
    must be exact.
    """

    id: str
    names: list[bytes]
    computed_s: list[Seconds]
    block_bytes: Natural
    rows: bool = True
    states: bool = False
    equivalent_names: list[bytes] = []


class KvStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The blocks that a prompt fills, which are being written: their names, as in KvMissing. ``own``: nothing
    of it came from another machine."""

    id: str
    names: list[bytes]
    own: bool = True


class KvFetched(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A fetch has ended. ``blocks``: those that are used. ``seconds``: from the decision to the last byte;
    ``opening_s``: to the first one. ``code`` and ``reason``: why not all are."""

    id: str
    blocks: Natural = 0
    n_bytes: Natural = 0
    seconds: Seconds = 0.0
    code: str = ""
    reason: Text = ""
    opening_s: Seconds = 0.0


FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class Finished(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The last message of a request that went well (or was cancelled). ``stop`` names the stop string hit."""

    id: EventId
    reason: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    stop: StopString | None = None
    # None if no draft was verified.
    speculation: Speculated | None = None
    # The machines of a model over several, in the order of its layers; empty for any other.
    stages: Annotated[list[GroupStage], Meta(max_length=limits.LAYERS)] = []


class Failed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The last message of a request that did not; fields as in ``errors.FleetError``."""

    id: str
    code: str
    message: str
    hint: str = ""
    param: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Proof of progress."""

    # Forward passes since load: the number only grows.
    steps: int
    prefilling: int = 0
    decoding: int = 0
    waiting: int = 0
    assisting: int = 0
    # There is work, and all of it waits for other machines or for a decision of the daemon.
    blocked: bool = False
    kv_bytes: int = 0
    prefix_bytes: int = 0
    prefix_entries: int = 0
    memory_bytes: int = 0
    # None if this worker scores nothing.
    scoring: ScoringState | None = None
    # Keys and values that wait to be written to the disk, and those that were.
    disk_queued_bytes: int = 0
    disk_written_bytes: int = 0
    # Prompts of which nothing was written, or not all; and why nothing is at the moment.
    disk_dropped: int = 0
    disk_note: Text = ""
    # Why the model's head drafts no more, if it did at load.
    draft_head: Text = ""


# ---- Questions that have one answer ----------------------------------------------------------------------

A = TypeVar("A")


class Question(msgspec.Struct, Generic[A], frozen=True, omit_defaults=True):
    """What a worker is asked about a text and answers once: with an ``A``, or with Failed.

    Accepted comes first, and Prefill for the progress. A kind of question names its answer twice: as ``A``
    for the type checker, and in ``answer`` for what waits for it.
    """

    answer: ClassVar[type[Any]]

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]


class Scored(msgspec.Struct, frozen=True, tag=True):
    """A segment's scores. ``tokens`` were computed for them, the question's and the text's first ones
    included; ``seconds`` from the first step, others' turns between included."""

    id: EventId
    scores: PackedScores
    profile: Profile
    tokens: Natural
    seconds: Seconds
    # By the monotonic clock of the machine where it ran, in seconds; 0 if not told.
    ended_s: Seconds = 0.0


class Score(Question[Scored], frozen=True, tag=True, omit_defaults=True):
    """How much a question attends to each token of ``text``.

    Only tokens that begin in ``segment`` are scored, (0, 0) is all; the text's first tokens and the question
    are put around it. ``questions``: character ranges that ask, in order; without any the end of the text
    does. What asks is not scored.

    ``exit_layer``: layers that are run; 0 is the profile's. Without a ``profile`` the worker takes its own;
    while it has none (``ScoringState``), it refuses the text: no text waits for a search. ``passes``: in how
    many it is computed at least, each of ``limits.SMART_PASS_TOKENS`` or more; the context may want more.

    ``without_question``: nothing asks, and all of the text is scored by how little the model expected each
    token. The whole model is run; the scores are those of one head and one query.
    """

    answer = Scored

    text: str
    questions: list[tuple[Natural, Natural]] = []
    segment: tuple[Natural, Natural] = (0, 0)
    exit_layer: Natural = 0
    profile: Profile | None = None
    passes: Natural = 1
    without_question: bool = False


# ---- Vectors of texts, and how well texts fit a query ----------------------------------------------------

# What texts are embedded as: models put another instruction before each kind; "" puts none.
TextKind = Literal["", "query", "document"]


class EmbedTexts(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One vector for each of the ``texts``, each a string or token ids; for models whose purpose is
    "embedding".

    Token ids are taken as they are: nothing is put before or behind them. Refused as a whole, with Failed, if
    one text is too long and ``truncate`` does not let its end be left out, or if a token id is unknown.
    """

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]
    texts: list[str | list[Token]]
    kind: TextKind = ""
    # The first numbers of each vector that are given, made one unit long again; None: all of them.
    dimensions: Natural | None = None
    # What the texts are embedded for, in place of the model's own words, if its family takes such words.
    instruction: str = ""
    truncate: bool = False
    # It waits while other requests of this worker compute.
    background: bool = False


class TextsEmbedded(msgspec.Struct, frozen=True, tag=True):
    """The vectors of a request's texts, in their order."""

    id: EventId
    # Numbers of each vector.
    width: Natural
    # float32, little endian, one vector after the other.
    vectors: bytes
    # How many tokens each of the texts had, those that the model's format adds included.
    tokens: list[Natural]


class RerankTexts(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """How well each of the ``documents`` answers ``query``; for models whose purpose is "rerank".

    Refused as EmbedTexts is. ``truncate`` leaves out the end of documents, never of the query.
    """

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]
    query: str
    documents: list[str]
    instruction: str = ""
    truncate: bool = False
    background: bool = False


class TextsReranked(msgspec.Struct, frozen=True, tag=True):
    """The scores of a request's documents, in their order, 0 to 1: the better the higher."""

    id: EventId
    scores: list[Share]
    # How many tokens the query had together with each document, the model's format included.
    tokens: list[Natural]


# ---- All of them -----------------------------------------------------------------------------------------

Command = (
    Generate
    | PrefillWithHelpers
    | PrefillAlone
    | FetchBlocks
    | AssistPrefill
    | ServeStage
    | DraftFor
    | Score
    | EmbedTexts
    | RerankTexts
    | Cancel
    | IdleTime
    | FreeMemory
    | TakenElsewhere
    | ForgetOrigins
    | WriteNow
    | PromptsRead
    | Shutdown
)
# Commands that nothing answers.
Order = (
    PrefillWithHelpers
    | PrefillAlone
    | FetchBlocks
    | IdleTime
    | FreeMemory
    | TakenElsewhere
    | ForgetOrigins
    | WriteNow
    | PromptsRead
    | Cancel
)
# What a request for vectors or for scores of documents gets before Finished.
VectorEvent = TextsEmbedded | TextsReranked
# What the daemon and the worker settle between them, and what answers no Generate: no chat sees it.
Aside = PrefillReport | KvMissing | KvFetched | KvStored | Assisted | Scored | DraftReport | VectorEvent
Event = Tokenized | Accepted | Prefill | Delta | ToolCallPiece | ToolCall | Finished | Failed | Aside
Report = Loading | Ready | MeasuredAgain | LoadFailed | Heartbeat | Event

# ---- Framing ---------------------------------------------------------------------------------------------

_LENGTH = struct.Struct(">I")


class FrameTooLong(ValueError):
    """A frame over ``limits.ENGINE_FRAME_BYTES``: the stream is not what we think it is."""


def encode(message: Command | Question[Any] | Report) -> bytes:
    """One frame, ready to send. Raises FrameTooLong."""
    body = msgspec.msgpack.encode(message)
    if len(body) > limits.ENGINE_FRAME_BYTES:
        raise FrameTooLong(f"frame of {len(body)} bytes is over the limit of {limits.ENGINE_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Unfit(msgspec.Struct, frozen=True):
    """A report about request ``id`` that says what cannot be, for ``reason``."""

    id: EventId
    reason: str = ""


class MessageDecoder:
    """Bytes in any pieces → messages. ``unfit``: a message that names its request gives an Unfit if a value
    in it is out of range."""

    def __init__(self, kind: Any, *, unfit: bool = False) -> None:
        self._decode = msgpack_decoder(kind).decode
        self._unfit = msgpack_decoder(Unfit).decode if unfit else None
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield every message that ``data`` completes.

        Raises:
            FrameTooLong: before anything of the frame's size is allocated.
            msgspec.DecodeError: the frame is not a known message, or of no request and out of range.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > limits.ENGINE_FRAME_BYTES:
                raise FrameTooLong(
                    f"frame of {length} bytes is over the limit of {limits.ENGINE_FRAME_BYTES}"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield self._decoded(body)

    def _decoded(self, body: bytes) -> Any:
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            if self._unfit is None:
                raise
            return msgspec.structs.replace(self._unfit(body), reason=str(error))


def commands() -> MessageDecoder:
    """Decoder for the worker's end."""
    return MessageDecoder(Command)


def reports() -> MessageDecoder:
    """Decoder for the daemon's end, of Report and Unfit."""
    return MessageDecoder(Report, unfit=True)
