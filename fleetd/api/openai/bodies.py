"""Request bodies of /v1/chat/completions and /v1/completions: their fields, types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation.conversation import StopText, StopTexts
from fleetd.api.generation.fields import Positive, StreamOptions
from fleetd.api.generation.sampling_fields import takes_sampling
from fleetd.api.openai.forms import FormFields
from fleetd.engine.protocol import Logprobs
from fleetd.text.bounded import Natural

# ---- Pieces ----------------------------------------------------------------------------------------------

Choices = Annotated[int, Meta(ge=1, le=limits.CHOICES)]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    function: Function
    kind: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]


class NamedTool(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    function: FunctionName
    kind: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    """The tools that this answer may call."""

    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=limits.TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class ForcedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The one tool that has to be called."""

    function: FunctionName


class AllowedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The tools of which one may be called."""

    allowed_tools: AllowedTools


ToolChoice = ForcedTool | AllowedChoice


class ImageUrl(msgspec.Struct, frozen=True):
    """An image, as a ``data:`` URL. How closely it is looked at (``detail``) is the model's own choice."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A content part. Texts and images are understood; the others are read only to be refused by name."""

    kind: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal", "image_url"]})]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] | None = None


class CalledTool(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    function: CalledFunction
    id: str | None = None
    kind: Literal["function"] = "function"


class SystemMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="system"):
    content: str | list[ContentPart]
    name: str | None = None


class DeveloperMessage(SystemMessage, frozen=True, kw_only=True, tag="developer"):
    """A system message under its newer name."""


class UserMessage(SystemMessage, frozen=True, kw_only=True, tag="user"):
    pass


class ToolMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    """Without content: a tool that returned nothing."""

    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[
        Any, Meta(description="A text is taken for `reasoning_content`, as vLLM calls it.")
    ] = None
    refusal: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | ToolMessage | AssistantMessage


# ---- Bodies ----------------------------------------------------------------------------------------------


@takes_sampling("openai")
class Common(FormFields, frozen=True, kw_only=True):
    """Fields of both endpoints. Without ``model`` the default model answers."""

    model: str | None = None
    max_tokens: Natural | None = None
    stop: StopText | StopTexts | None = None
    n: Choices | None = None
    ignore_eos: Annotated[
        bool | None,
        Meta(description="For benchmarks: only max_tokens and stop strings end the answer, not the model."),
    ] = None
    min_tokens: Annotated[
        Natural | None,
        Meta(
            description="For benchmarks: the answer does not end before so many tokens, nor at a stop string."
        ),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatBody(Common, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Meta(description="Changes nothing: no template knows it.")
    ] = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class CompletionBody(Common, frozen=True, kw_only=True):
    """``prompt`` is a text, a list of texts, a list of token ids, or a list of such lists.

    No template renders it, so the fields of ``ReasoningFields`` change nothing.
    """

    prompt: str | Annotated[list[str | Natural | list[Natural]], Meta(min_length=1)]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Natural | None = None
