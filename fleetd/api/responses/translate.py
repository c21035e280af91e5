"""A Responses body → the conversation that the model's template renders. Pure.

Items are flat; templates read turns. What the model said in one turn (reasoning, text, calls) becomes one
message. Items of other servers' tools are left out, and ``Translated.warnings`` says so.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetd.api.generation import answer_form, conversation, images
from fleetd.api.generation.conversation import Plain
from fleetd.api.generation.fields import speculate
from fleetd.api.generation.images import Piece
from fleetd.api.generation.reasoning import template_kwargs
from fleetd.api.generation.sampling_fields import sampling
from fleetd.api.responses.bodies import (
    LEFT_OUT_ITEMS,
    InputItem,
    InputPart,
    ResponsesBody,
    ResponseToolChoice,
)
from fleetd.api.responses.tools import ToolTable, as_arguments, full_name
from fleetd.engine.protocol import ChatPrompt, Generate
from fleetd.errors import InvalidValue, UnsupportedParameter
from fleetd.text.decoding import from_plain

# The reasoning of an answer, for clients that send back nothing else of it.
_CARRIED = "fleetd:"
_CARRY = "reasoning.encrypted_content"
_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class Translated(msgspec.Struct, frozen=True):
    """A request as work for the engine."""

    #: The one answer.
    generate: Generate
    #: The client's tools, by the names that the model knows.
    tools: ToolTable
    #: Sentences about what was left out of the request.
    warnings: list[str]
    #: The answer's reasoning is to come a second time, as ``encrypted_content``.
    carry: bool


def translate(
    body: ResponsesBody,
    request_id: str,
    items: Sequence[InputItem] | None = None,
    before: Sequence[InputItem] = (),
) -> Translated:
    """Args:
    items: those of the body, without references; None if it has none.
    before: the conversation that it goes on from.

    Raises InvalidValue, UnsupportedParameter.
    """
    _refuse(body)
    tools = ToolTable()
    tools.add(body.tools or ())
    talk = _Items()
    if body.instructions:
        talk.system.append(body.instructions)
    for item in before:
        if item.kind not in LEFT_OUT_ITEMS:  # which was said when it came
            talk.add(item, "previous_response_id")
    for i, item in enumerate(body.items if items is None else items):
        talk.add(item, f"input[{i}]")
    offered, choice = _tool_choice(body, tools)
    prompt = conversation.prompt(
        talk.messages(),
        offered,
        choice,
        template_kwargs(body),
        strict_tools=tools.strict,
        parallel_calls=body.parallel_tool_calls is not False,
    )
    return Translated(
        _generate(body, request_id, prompt),
        tools,
        [*tools.warnings, *talk.warnings],
        _CARRY in (body.include or ()),
    )


def _generate(body: ResponsesBody, request_id: str, prompt: ChatPrompt) -> Generate:
    return Generate(
        id=request_id,
        prompt=prompt,
        sampling=sampling(body, "responses"),
        max_tokens=body.max_output_tokens,
        speculate=speculate(body.speculate),
        call_pieces=bool(prompt.tools and body.stream),
        constraint=None if body.text is None else answer_form.of_format(body.text.format, "text.format"),
    )


def carried(reasoning: str) -> str:
    """Reasoning in a form that clients pass on unread."""
    return _CARRIED + base64.b64encode(reasoning.encode()).decode()


def _uncarried(content: str | None) -> str:
    """What ``carried`` made; "" for what another server made."""
    if content is None or not content.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_CARRIED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


# ---- What is not served ----------------------------------------------------------------------------------


def _refuse(body: ResponsesBody) -> None:
    """Raises UnsupportedParameter."""
    for name, hint in {
        "conversation": "Send previous_response_id, or the whole conversation in input.",
        "background": "Use stream.",
        "prompt": "Use instructions.",
    }.items():
        if getattr(body, name) not in (None, False):
            raise UnsupportedParameter(f"{name} is not supported by this server.", hint=hint, param=name)
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise UnsupportedParameter(
            "Logprobs are not supported here.", hint="Use /v1/chat/completions.", param="top_logprobs"
        )


def _tool_choice(body: ResponsesBody, tools: ToolTable) -> tuple[list[Plain], Any]:
    """The tools that the answer may call, and whether it has to."""
    choice, offered = body.tool_choice, tools.definitions
    if choice is None or choice in ("auto", "none"):
        return offered, choice or "auto"
    if not isinstance(choice, ResponseToolChoice):
        return offered, conversation.forced_tool(None, offered, "tool_choice")
    if choice.kind == "allowed_tools":
        names = [_chosen(each) for each in choice.tools or ()]
        if not names:
            raise InvalidValue("tool_choice of type 'allowed_tools' needs tools.", param="tool_choice")
        return conversation.allowed_tools(names, choice.mode or "auto", offered, "tool_choice")
    return offered, conversation.forced_tool(_chosen(choice), offered, "tool_choice")


def _chosen(choice: ResponseToolChoice) -> str:
    """The name by which the model knows a tool that is chosen."""
    if choice.kind not in ("function", "custom"):
        raise UnsupportedParameter(
            f"tool_choice of type {choice.kind[:64]!r} is not supported.",
            hint="Choose a function or a custom tool by its name.",
            param="tool_choice",
        )
    if choice.name is None:
        raise InvalidValue(f"tool_choice of type {choice.kind!r} needs a name.", param="tool_choice")
    return full_name(choice.name, choice.namespace)


# ---- Items -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Turn:
    """What the model said in one turn so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Plain] = field(default_factory=list)


class _Items:
    """Folds items into messages."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.warnings: list[str] = []
        self._found: list[Plain] = []
        self._turn: _Turn | None = None

    def messages(self) -> list[Plain]:
        self._end_turn("input")
        return conversation.with_system(self._found, self.system, "instructions")

    def add(self, item: InputItem, where: str) -> None:
        """Raises InvalidValue, UnsupportedParameter."""
        match item.kind:
            case "message" | None:
                self._message(item, where)
            case "reasoning":
                texts = _texts(item.content, f"{where}.content") or [_uncarried(item.encrypted_content)]
                if not any(texts):
                    texts = _texts(item.summary, f"{where}.summary")
                self._open_turn().reasoning += filter(None, texts)
            case "function_call":
                self._call(item, item.arguments or "", where)
            case "custom_tool_call":
                self._call(item, as_arguments(item.input or ""), where)
            case "function_call_output" | "custom_tool_call_output":
                self._end_turn(where)
                call_id = conversation.needed(item.call_id, "call_id", where)
                self._found.append(
                    conversation.message("tool", _output(item, where), where, tool_call_id=call_id)
                )
            case kind if kind in LEFT_OUT_ITEMS:
                self.warnings.append(
                    f"{where}: an item of type {kind!r} was left out: nothing here reads it."
                )
            case kind:
                raise UnsupportedParameter(
                    f"{where}: items of type {kind[:64]!r} are not supported.",
                    hint="Send messages, reasoning, and calls of tools with their outputs.",
                    param=where,
                )

    def _message(self, item: InputItem, where: str) -> None:
        if item.role is None or item.content is None:
            raise InvalidValue(f"{where}: a message needs role and content.", param=where)
        if item.role == "user":
            pieces = _pieces(item.content, f"{where}.content")
            self._end_turn(where)
            for piece in pieces or [""]:
                conversation.append_user(self._found, piece, where)
            return
        text = conversation.joined(_texts(item.content, f"{where}.content"))
        if item.role == "assistant":
            self._open_turn().texts.append(text)
            return
        self._end_turn(where)
        if not self._found:
            self.system.append(text)
        else:
            conversation.append_instruction(self._found, text, where)

    def _call(self, item: InputItem, arguments: str | Plain, where: str) -> None:
        if item.name is None:
            raise InvalidValue(f"{where}: a call needs a name.", param=where)
        name, call_id = (
            full_name(item.name, item.namespace),
            conversation.needed(item.call_id, "call_id", where),
        )
        self._open_turn().calls.append(conversation.tool_call(call_id, name, arguments))

    def _open_turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _end_turn(self, where: str) -> None:
        turn, self._turn = self._turn, None
        # A turn of other servers' sealed reasoning alone says nothing here.
        if turn is not None and (turn.texts or turn.reasoning or turn.calls):
            self._found.append(conversation.assistant(turn.texts, turn.reasoning, turn.calls, where))


def _output(item: InputItem, where: str) -> str:
    """What a tool gave back; what is no text is left out, with a note to the model."""
    try:
        content = from_plain(item.output, str | list[InputPart] | None)
    except msgspec.ValidationError:
        raise InvalidValue(f"{where}.output has to be a text or parts.", param=where) from None
    return conversation.joined(_texts(content, f"{where}.output", returned=True))


def _texts(content: str | Sequence[InputPart] | None, where: str, *, returned: bool = False) -> list[str]:
    """The texts of some content. What is no text is refused, or noted if a tool ``returned`` it."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [_text(part, f"{where}[{i}]", returned) for i, part in enumerate(content)]


def _pieces(content: str | Sequence[InputPart], where: str) -> list[Piece]:
    """The texts and images of a user's message. Raises InvalidValue, UnsupportedParameter."""
    if isinstance(content, str):
        return [content]
    return [
        _image(part, f"{where}[{i}]") if part.kind == "input_image" else _text(part, f"{where}[{i}]", False)
        for i, part in enumerate(content)
    ]


def _image(part: InputPart, where: str) -> bytes:
    if part.file_id is not None and part.image_url is None:
        raise UnsupportedParameter(
            f"{where}.file_id: no files are kept here.",
            hint="Send the image itself in image_url: data:image/png;base64,...",
            param=f"{where}.file_id",
        )
    return images.from_url(part.image_url, f"{where}.image_url")


def _text(part: InputPart, where: str, returned: bool) -> str:
    if part.kind not in (*_TEXTS, "refusal"):
        if returned:
            return conversation.left_out(part.kind)
        raise UnsupportedParameter(
            f"{where}: content of type {part.kind[:64]!r} is not supported by this model.",
            hint="Send text.",
            param=where,
        )
    text = part.refusal if part.kind == "refusal" else part.text
    if text is None:
        raise InvalidValue(f"{where}: a part of type {part.kind!r} needs its text.", param=where)
    return text
