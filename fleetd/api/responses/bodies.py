"""The request body of /v1/responses.

What a server that runs no tools cannot do is here too, so that ``translate.py`` refuses it by name or leaves
it out with a warning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation.answer_form import TextFormat
from fleetd.api.generation.fields import FleetFields, Positive, StreamOptions
from fleetd.api.generation.sampling_fields import takes_sampling
from fleetd.engine.protocol import Logprobs

# Items that other servers' own tools leave in a conversation: nothing here can read them.
LEFT_OUT_ITEMS = frozenset(
    {
        "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "computer_call", "computer_call_output", "file_search_call", "image_generation_call",
        "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response",
        "mcp_call", "mcp_list_tools", "shell_call", "shell_call_output", "tool_search_call",
        "tool_search_output", "web_search_call",
    }
)  # fmt: skip
_ITEMS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "item_reference", *sorted(LEFT_OUT_ITEMS),
)  # fmt: skip

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class InputPart(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A part of an item's content. Texts and images are understood; the others are read to be refused by
    name."""

    kind: Annotated[
        str,
        Meta(
            extra_json_schema={
                "enum": [
                    *("input_text", "output_text", "refusal", "reasoning_text", "summary_text", "text"),
                    "input_image",
                ]
            }
        ),
    ]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class InputItem(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A part of the conversation, of any type: which fields it has depends on that."""

    kind: Annotated[str | None, Meta(extra_json_schema={"enum": [*_ITEMS, None]})] = "message"
    # Of an item that a client got from here, and of one that it names instead of sending it.
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: Name | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    # A text or parts; items of other servers' tools have other things here.
    output: Any = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None

    @property
    def is_reference(self) -> bool:
        """True if it stands for the item of that id; its type may be left out."""
        bare = self.kind in ("message", None) and self.role is None and self.content is None
        return self.kind == "item_reference" or (bare and self.id is not None)


class FreeInput(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A custom tool's input is any text."""


class GrammarInput(msgspec.Struct, frozen=True, tag_field="type", tag="grammar"):
    """A custom tool's input is held to a grammar in Lark's notation, or to a regular expression."""

    syntax: Literal["lark", "regex"]
    # An expression grows with its escapes, to twice its length at most.
    definition: Annotated[str, Meta(min_length=1, max_length=limits.CONSTRAINT_CHARS // 4)]


InputFormat = FreeInput | GrammarInput


class ResponseTool(msgspec.Struct, frozen=True, omit_defaults=True, rename={"kind": "type"}):
    """A tool of the client's, or with ``tools`` a namespace of them. Other types are left out."""

    kind: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=limits.TOOLS)] | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, omit_defaults=True, rename={"kind": "type"}):
    """One tool that has to be called; of type ``allowed_tools``, those that may be."""

    kind: Annotated[str, Meta(extra_json_schema={"enum": ["function", "custom", "allowed_tools"]})]
    name: Name | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponseToolChoice], Meta(max_length=limits.TOOLS)] | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """``verbosity`` is taken and changes nothing: no template knows it."""

    format: TextFormat | None = None
    verbosity: str | None = None


@takes_sampling("responses")
class ResponsesBody(FleetFields, frozen=True, kw_only=True):
    """Without ``model`` the default model answers; without ``max_output_tokens`` the setting
    ``engine.answer_tokens`` bounds the answer."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=limits.MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Annotated[
        bool | None,
        Meta(description="False: the answer is not kept, and no later request can go on from it by its id."),
    ] = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Logprobs | None = None
    previous_response_id: Annotated[
        str | None, Meta(description="The answer that input goes on from. It was kept if it is not too old.")
    ] = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None

    @property
    def items(self) -> list[InputItem]:
        """``input`` as items."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
