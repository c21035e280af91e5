"""Response objects of /v1/*, as OpenAI's clients read them.

``UNSET`` fields are left out of the JSON; ``None`` is written as null. The difference matters: clients merge
deltas by the keys that are present, and some index ``choices[0]`` without looking. The OpenAPI document is
generated from these same types, so what is documented is what is sent.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


# ---- Shared ----------------------------------------------------------------------------------------------


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class UsageObject(Struct, frozen=True):
    """``prompt_tokens`` counts what the client sent, once per prompt however many choices answer it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingReport(Struct, frozen=True):
    """llama.cpp's ``timings``: ``prompt_n`` leaves out the ``cache_n`` tokens taken from the prefix cache.

    ``restored_n``: of ``cache_n``, the tokens whose keys and values were read from the disk, in
    ``restore_ms``, before ``prompt_ms``; ``fetched_n`` and ``fetch_ms``: the same from the machine
    ``fetched_from``.
    ``score_ms``: with smart prefill, from the request to the shortened prompt; it comes before ``prompt_ms``.
    ``draft_n`` and ``draft_n_accepted``: tokens that were guessed and verified, where any were.
    """

    prompt_n: int
    cache_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    restored_n: int | UnsetType = UNSET
    restore_ms: float | UnsetType = UNSET
    fetched_n: int | UnsetType = UNSET
    fetch_ms: float | UnsetType = UNSET
    fetched_from: str | UnsetType = UNSET
    score_ms: float | UnsetType = UNSET
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class SmartReport(Struct, frozen=True):
    """What smart prefill made of the prompts of a request that asked for it; ``mode`` "full" dropped nothing.

    Tokens are the compressor's, summed over prompts; ``nodes`` are the machines that scored. ``skipped`` says
    why nothing was dropped: a stable code, a colon, a sentence. ``settings``: what was asked for, with this
    machine's defaults filled in.
    """

    mode: Literal["text", "sparse", "full"]
    compressor: str
    nodes: list[str]
    original_tokens: int
    compressed_tokens: int
    score_ms: float
    skipped: str
    settings: dict[str, Any]


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
