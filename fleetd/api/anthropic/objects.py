"""Answers and stream events of /v1/messages, as Anthropic's clients read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """The tokens of a prompt are the sum of the three input figures."""

    input_tokens: Annotated[int, Meta(description="Read anew.")]
    cache_creation_input_tokens: Annotated[
        int, Meta(description="Read anew of a prompt that is marked for the cache.")
    ]
    cache_read_input_tokens: Annotated[int, Meta(description="Found in the cache.")]
    output_tokens: int
    output_tokens_details: ThinkingTokens = ThinkingTokens(0)


# ---- The parts of an answer ------------------------------------------------------------------------------


class TextContent(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingContent(Struct, frozen=True, tag_field="type", tag="thinking"):
    """``signature`` proves nothing here; clients want one before they send the block back."""

    thinking: str
    signature: str


class ToolUseContent(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerContent = TextContent | ThinkingContent | ToolUseContent


class MessageReply(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    input_tokens: int


# ---- Stream events ---------------------------------------------------------------------------------------


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageReply


class PingEvent(Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerContent


class TextPiece(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputPiece(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


AnswerPiece = TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class ContentBlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: AnswerPiece


class ContentBlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart
    | PingEvent
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)


# ---- /v1/models ------------------------------------------------------------------------------------------


class ModelInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"


class ModelPage(Struct, frozen=True, kw_only=True):
    """All models: there is never another page."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str | None
    last_id: str | None
