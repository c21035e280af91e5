"""Response objects of /v1/*, as OpenAI's clients read them.

``UNSET`` fields are left out of the JSON; ``None`` is written as null. The difference matters: clients merge
deltas by the keys that are present, and some index ``choices[0]`` without looking. The OpenAPI document is
generated from these same types, so what is documented is what is sent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from fleetd.control.smart_prefill_result import ParkedLoads, ScoredBy

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


# ---- Shared ----------------------------------------------------------------------------------------------


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class UsageObject(Struct, frozen=True):
    """Tokens that are counted for the client."""

    prompt_tokens: Annotated[
        int, Meta(description="What the client sent, once per prompt however many choices answer it.")
    ]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingReport(Struct, frozen=True):
    """llama.cpp's ``timings``."""

    prompt_n: Annotated[
        int, Meta(description="Tokens of the prompt that were read, without those of `cache_n`.")
    ]
    cache_n: Annotated[
        int, Meta(description="Tokens of the prompt whose keys and values were in the prefix cache.")
    ]
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    restored_n: Annotated[
        int | UnsetType, Meta(description="Of `cache_n`, the tokens that were read from the disk.")
    ] = UNSET
    restore_ms: Annotated[float | UnsetType, Meta(description="The time of that, before `prompt_ms`.")] = (
        UNSET
    )
    fetched_n: Annotated[
        int | UnsetType, Meta(description="Of `cache_n`, the tokens that came from another machine.")
    ] = UNSET
    fetch_ms: Annotated[float | UnsetType, Meta(description="The time of that, before `prompt_ms`.")] = UNSET
    fetched_from: Annotated[str | UnsetType, Meta(description="The machine that they came from.")] = UNSET
    score_ms: Annotated[
        float | UnsetType,
        Meta(description="With smart prefill, the time up to the shortened prompt, before `prompt_ms`."),
    ] = UNSET
    draft_n: Annotated[
        int | UnsetType, Meta(description="Tokens that were guessed ahead; absent if none were.")
    ] = UNSET
    draft_n_accepted: Annotated[
        int | UnsetType, Meta(description="Of `draft_n`, the tokens that the model would have chosen.")
    ] = UNSET


class SmartReport(Struct, frozen=True):
    """What smart prefill made of the prompts of a request that asked for it."""

    mode: Annotated[Literal["text", "sparse", "full"], Meta(description='"full": nothing was left out.')]
    compressor: str
    nodes: Annotated[list[str], Meta(description="The machines that scored.")]
    original_tokens: Annotated[int, Meta(description="The compressor's tokens, summed over prompts.")]
    compressed_tokens: Annotated[int, Meta(description="The same, of what was kept.")]
    score_ms: float
    scored: Annotated[
        ScoredBy,
        Meta(description='By what the prompt was scored; "" if nothing was.'),
    ]
    parked: Annotated[
        ParkedLoads | UnsetType,
        Meta(description="Seconds of loads, if the model gave way to what scored; else absent."),
    ]
    skipped: Annotated[str, Meta(description="Why nothing was left out: a stable code, a colon, a sentence.")]
    settings: Annotated[
        dict[str, Any], Meta(description="What was asked for, with this machine's defaults filled in.")
    ]


# ---- /v1/chat/completions --------------------------------------------------------------------------------


class TopLogprobItem(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class LogprobItem(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobItem]


class ChatLogprobs(Struct, frozen=True):
    content: list[LogprobItem]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class MessageToolCall(Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ReplyMessage(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ReplyMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    timings: TimingReport
    smart_prefill: SmartReport | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChoiceDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: ChoiceDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    timings: TimingReport | UnsetType = UNSET
    smart_prefill: SmartReport | UnsetType = UNSET


# ---- /v1/completions -------------------------------------------------------------------------------------


class TextLogprobs(Struct, frozen=True):
    """Parallel lists, one entry per token. The first token of an echoed prompt has no probability: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | None = None


class TextCompletion(Struct, frozen=True, kw_only=True):
    """Chunks of a stream have the same shape; their ``usage`` is left out unless asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageObject | UnsetType | None = UNSET
    timings: TimingReport | UnsetType = UNSET
    smart_prefill: SmartReport | UnsetType = UNSET
