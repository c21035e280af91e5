"""Request bodies of /v1/messages and /v1/messages/count_tokens.

Clients add fields every month, so unknown ones are ignored. Fields that would change the answer are here,
also where ``translate.py`` only refuses them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation.answer_form import SchemaForm
from fleetd.api.generation.conversation import StopTexts
from fleetd.api.generation.fields import (
    ExactnessField,
    LocalOnly,
    PlacementField,
    Positive,
    SmartPrefillField,
)
from fleetd.api.generation.reasoning import ReasoningFields
from fleetd.api.generation.sampling_fields import takes_sampling

_BLOCKS = (
    "text", "thinking", "tool_use", "tool_result", "document", "search_result", "tool_reference",
)  # fmt: skip

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class ContentBlock(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A part of a message, of any type: which fields it has depends on that."""

    kind: Annotated[
        str,
        Meta(extra_json_schema={"enum": list(_BLOCKS)}),
    ]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    tool_name: ToolName | None = None
    cache_control: dict[str, Any] | None = None


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolDefinition(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A tool of the client's. Types of Anthropic's own tools are read only to be refused by name."""

    name: ToolName
    kind: Annotated[str | None, Meta(extra_json_schema={"enum": [None, "custom"]})] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolSelection(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    kind: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """``effort`` is a hint: what is none of the words is ignored."""

    effort: Any = None
    format: SchemaForm | None = None


class Conversation(ReasoningFields, frozen=True, kw_only=True):
    """What both endpoints read. Without ``model`` the default model answers."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=limits.MESSAGES)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolSelection | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        SchemaForm | None, Meta(description="The older name of `output_config.format`.")
    ] = None
    cache_control: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    local_only: LocalOnly = None
    placement: PlacementField = None
    exactness: ExactnessField = None


@takes_sampling("anthropic")
class MessagesBody(Conversation, frozen=True, kw_only=True):
    """Without ``max_tokens`` the setting ``engine.answer_tokens`` bounds the answer."""

    max_tokens: Positive | None = None
    stream: bool | None = None
    stop_sequences: StopTexts | None = None
    metadata: Any = None
    smart_prefill: SmartPrefillField = None


class CountBody(Conversation, frozen=True, kw_only=True):
    pass
