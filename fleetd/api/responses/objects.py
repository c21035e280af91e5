"""Answers and stream events of /v1/responses, as OpenAI's libraries and Codex read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from fleetd.api.generation.answer_form import TextForm, TextFormat
from fleetd.api.responses.bodies import ResponseTool, ResponseToolChoice

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """``input_tokens`` counts the whole prompt, with what was found in the cache."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


# ---- The items of an answer ------------------------------------------------------------------------------


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


Part = OutputText | ReasoningText


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """``encrypted_content`` holds the same text for clients that send nothing else back; it is not secret."""

    id: str
    status: ItemStatus
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


# ---- The answer ------------------------------------------------------------------------------------------


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseText(Struct, frozen=True):
    format: TextFormat = TextForm()


class ReasoningConfig(Struct, frozen=True):
    """What was asked for, in OpenAI's words."""

    effort: str | None = None
    summary: str | None = None


class Response(Struct, frozen=True, kw_only=True):
    """An answer."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    model: str
    output: list[Item] = field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    store: bool = True
    temperature: float | None = None
    text: ResponseText = ResponseText()
    tool_choice: str | ResponseToolChoice = "auto"
    tools: Annotated[list[ResponseTool], Meta(description="The tools of the request that can be called.")] = (
        field(default_factory=list)
    )
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: Annotated[
        ResponseUsage | UnsetType,
        Meta(description="Comes with the end: OpenAI's document knows no null here."),
    ] = UNSET
    user: str | UnsetType = UNSET
    warnings: Annotated[
        list[str] | UnsetType, Meta(description="Sentences about what was left out of the request.")
    ] = UNSET


class InputTokenCount(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Struct, frozen=True):
    """A page of what an answer was asked."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


# ---- Stream events ---------------------------------------------------------------------------------------


class Event(Struct, frozen=True, kw_only=True, tag_field="type", tag="event"):
    """``sequence_number`` is set when the event is sent."""

    sequence_number: int = 0


class ResponseCreated(Event, frozen=True, kw_only=True, tag="response.created"):
    response: Response


class ResponseInProgress(Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: Response


class ResponseCompleted(Event, frozen=True, kw_only=True, tag="response.completed"):
    response: Response


class ResponseIncomplete(Event, frozen=True, kw_only=True, tag="response.incomplete"):
    response: Response


class ResponseFailed(Event, frozen=True, kw_only=True, tag="response.failed"):
    response: Response


class ItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class _OfItem(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: Part


class PartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: Part


class TextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any] = field(default_factory=list)


class TextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[Any] = field(default_factory=list)


class ReasoningDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
