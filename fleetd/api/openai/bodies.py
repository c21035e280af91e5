"""Request bodies of /v1/*: their fields, types and ranges.

Every field a client may send is in one of five classes, ``other_fields.py`` has the second and the fourth:
    known        a field of a Struct below: typed and ranged here, turned into work by translate.py
    unsupported  would change the answer, not implemented: refused by name, unless its value asks for nothing
    misspelt     so close to a known field that ignoring it would change the answer: refused with the nearest
    harmless     changes no answer: ignored
    foreign      anything else: ignored, because client libraries add fields every month
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation.conversation import StopText, StopTexts
from fleetd.api.generation.reasoning import ReasoningFields
from fleetd.api.http.body import parse
from fleetd.api.openai import other_fields
from fleetd.compression.policy import SmartPrefillBody
from fleetd.engine.protocol import (
    Bias,
    Fraction,
    Logprobs,
    Penalty,
    Repetition,
    Seed,
    Temperature,
    TopP,
)
from fleetd.engine.speculation.local_sources import SOURCE_NAMES, SourceName
from fleetd.errors import InvalidValue, UnsupportedParameter
from fleetd.text.bounded import Natural

# ---- Pieces ----------------------------------------------------------------------------------------------

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# Without the look-ahead, Python lets a newline follow; \\Z is unknown to JSON Schema.
TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(?!\n)$")]
Choices = Annotated[int, Meta(ge=1, le=limits.CHOICES)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """The other kinds are read only to be refused by name."""

    kind: Annotated[
        Literal["text", "json_object", "json_schema"], Meta(extra_json_schema={"enum": ["text"]})
    ] = "text"


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


class ContentPart(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A content part. Only text is understood; the others are read only to be refused by name."""

    kind: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


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


class SpeculateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object form of ``speculate``. Drafts change how soon an answer comes, not the answer."""

    enabled: bool = True
    sources: Annotated[
        Annotated[list[SourceName], Meta(max_length=len(SOURCE_NAMES))] | None,
        Meta(
            description="Sources of drafts: the answer's own text (suffix, lookup) or another model "
            "(drafter). By default all that there are.",
        ),
    ] = None
    width: Annotated[
        int,
        Meta(ge=0, le=limits.SPEC_WIDTH, description="Most tokens of one pass; 0 leaves it to what pays."),
    ] = 0
    key: Annotated[
        str,
        Meta(
            max_length=limits.SPEC_KEY_CHARS,
            description="Where past answers are remembered, this one is drafted from, and remembered for, "
            "those of the same key only.",
        ),
    ] = ""
    draft_model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS, pattern="^[^/~]")] | None,
        Meta(
            description="The model that drafts, on this machine or a peer: a small one of the same family. "
            "By default the one that the settings name."
        ),
    ] = None


Message = SystemMessage | DeveloperMessage | UserMessage | ToolMessage | AssistantMessage


# ---- Bodies ----------------------------------------------------------------------------------------------


class FleetFields(ReasoningFields, frozen=True, kw_only=True):
    """What bodies of OpenAI's dialects say besides the prompt: how the model reasons, where and how it is
    computed. All fields here but the last are fleetd's."""

    local_only: Annotated[
        bool | None, Meta(description="True: the prompt does not leave the machine that was asked.")
    ] = None
    smart_prefill: Annotated[
        bool | SmartPrefillBody | None,
        Meta(description="Leaves out what a small model finds does not matter. Lossy, and labelled so."),
    ] = None
    speculate: Annotated[
        bool | SpeculateBody | None,
        Meta(description="How tokens are guessed ahead and verified. The answer is the same without it."),
    ] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Names the conversation, which then stays on its machine if it can.")
    ] = None


class Common(FleetFields, frozen=True, kw_only=True):
    """Fields of both endpoints. Without ``model`` the default model answers."""

    model: str | None = None
    max_tokens: Natural | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
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
    response_format: ResponseFormat | None = None
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


_TYPO_CUTOFF = 0.86

Body = TypeVar("Body", bound=msgspec.Struct)


def decode(data: bytes, kind: type[Body], *, spelling: bool = True) -> Body:
    """Bytes → body. Without ``spelling`` misspelt fields pass for foreign ones.

    Raises:
        BadRequest: not JSON, with the position.
        InvalidValue: a field of the wrong type or out of range, or a misspelt name; says which.
        UnsupportedParameter: a field that would change the answer and is not implemented.
    """
    fields = parse(data, dict[str, msgspec.Raw])
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in fields:
        if name in known:
            continue
        if name in other_fields.REFUSED:
            _refuse_unsupported(name, fields)
        elif spelling and name not in other_fields.HARMLESS:
            _refuse_misspelling(name, known)
    return parse(data, kind)


def _refuse_unsupported(name: str, fields: Mapping[str, msgspec.Raw]) -> None:
    if _asks(name, fields, other_fields.REFUSED[name]):
        beside = other_fields.BESIDE.get(name)
        if beside is None or any(_asks(other, fields, nothing) for other, nothing in beside.items()):
            raise UnsupportedParameter(
                f"The parameter {name!r} is not supported, and ignoring it would change the answer.",
                hint=f"Leave {name!r} out.",
                param=name,
            )


def _asks(name: str, fields: Mapping[str, msgspec.Raw], nothing: tuple[Any, ...]) -> bool:
    return name in fields and parse(bytes(fields[name]), Any) not in nothing


def _refuse_misspelling(name: str, known: set[str]) -> None:
    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=_TYPO_CUTOFF)
    if other_fields.ELSEWHERE.get(name) in known:
        nearest = [other_fields.ELSEWHERE[name]]
    if nearest:
        raise InvalidValue(
            f"Unknown parameter {name[:64]!r}.", hint=f"Did you mean {nearest[0]!r}?", param=name[:64]
        )
