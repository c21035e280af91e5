"""Parts of a conversation as chat templates read them, whatever dialect it came in. Pure.

Templates know one form, which every dialect is turned into: messages with a role and text, tool calls with
their arguments as an object, tools as ``{"type": "function", "function": {...}}``. The same conversation then
renders to the same tokens in every dialect, and finds the same prefix in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation.images import Piece, placed
from fleetd.engine.answer.object_text import strict_object
from fleetd.engine.prompt.template_turns import merged, reminder
from fleetd.engine.protocol import IMAGES, ChatPrompt
from fleetd.errors import InvalidValue
from fleetd.text.bounded import is_deeper

Plain = dict[str, Any]
# Of a ChatPrompt: the index of a message and characters of its content.
CacheMark = tuple[int, int]


# Types in JSON schemas besides "object".
_NO_OBJECTS = frozenset({"array", "boolean", "integer", "null", "number", "string"})

# What clients send to stop at. Forms send an empty text for none, also in a list.
StopText = Annotated[str, Meta(max_length=limits.STOP_STRING_CHARS)]
StopTexts = Annotated[list[StopText], Meta(max_length=limits.STOP_STRINGS)]


def message(role: str, content: str | None, where: str, **more: Any) -> Plain:
    """A message. Keys of ``more`` whose value is None are left out; ``where`` names it in errors."""
    plain = {"content": content, "role": role}
    return checked(plain | {name: value for name, value in more.items() if value is not None}, where)


def user(pieces: Sequence[Piece], where: str, **more: Any) -> Plain:
    """A user's message of texts and images; the rest as in ``message``."""
    content, images = placed(pieces)
    return message("user", content, where, **more, **({IMAGES: images} if images else {}))


def joined(texts: Sequence[str]) -> str:
    """The texts of one message as one."""
    return "\n".join(texts)


def assistant(texts: Sequence[str], reasoning: Sequence[str], calls: Sequence[Plain], where: str) -> Plain:
    """What the model said in one turn."""
    text = joined(texts)
    return message(
        "assistant",
        None if calls and not text else text,
        where,
        reasoning_content=joined(reasoning) or None,
        tool_calls=list(calls) or None,
    )


def left_out(kind: str) -> str:
    """What stands for something that a tool returned and no model here reads there: a refusal would end the
    session for good."""
    what = "An image" if "image" in kind else f"A part of type {kind[:64]!r}"
    return f"[{what} was left out here: what tools return is read as text only.]"


def append_user(messages: list[Plain], piece: Piece, where: str) -> None:
    """Add a text or an image to the user's message at the end, or begin one: templates want roles to
    alternate."""
    if not messages or messages[-1]["role"] != "user":
        messages.append(user([piece], where))
        return
    content, images = messages[-1]["content"], messages[-1].get(IMAGES, [])
    if isinstance(piece, bytes):
        messages[-1] = message("user", content, where, **{IMAGES: [*images, (len(content), piece)]})
        return
    behind_image = bool(images) and images[-1][0] == len(content)
    text = content + piece if behind_image else joined([content, piece])
    messages[-1] = message("user", text, where, **{IMAGES: images or None})


def append(messages: list[Plain], added: Plain) -> int:
    """Add a message; if the one at the end is by the same user or assistant, the two become one, as in
    Anthropic's API. Returns how many characters come before its text there."""
    if added["role"] == "tool" or not messages or messages[-1]["role"] != added["role"]:
        messages.append(added)
        return 0
    messages[-1] = merged(messages[-1], added)
    return len(messages[-1]["content"] or "") - len(added["content"] or "")


def append_instruction(messages: list[Plain], text: str, where: str) -> None:
    """Add a system message that is not the first, as text of the user's."""
    append_user(messages, reminder(text), where)


def with_system(messages: list[Plain], texts: Sequence[str], where: str) -> list[Plain]:
    """The conversation behind one system message of these texts, if there are any."""
    return [message("system", joined(texts), where), *messages] if texts else messages


def needed(call_id: str | None, name: str, where: str) -> str:
    """The id that ties a call to its result. Raises InvalidValue where a client left it out."""
    if not call_id:
        raise InvalidValue(f"The field '{where}.{name}' is missing.", param=f"{where}.{name}")
    return call_id


def tool_call(call_id: str, name: str, arguments: str | Plain) -> Plain:
    """A call that the model made, for an assistant's ``tool_calls``.

    Templates iterate over the arguments, and some clients send them as JSON text. What a model wrote is taken
    back, whatever it is: text that is no object becomes one.
    """
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": _decoded(arguments)},
    }


def _decoded(arguments: str | Plain) -> Plain:
    if not isinstance(arguments, str):
        return _carried(arguments)
    text = arguments.strip()
    found: Plain = {} if text in ("", "null") else msgspec.json.decode(strict_object(text))
    return _carried(found)


def _carried(arguments: Plain) -> Plain:
    """Arguments with numbers over 64 bits as text: MessagePack has none, and models write some."""
    if is_deeper(arguments, limits.JSON_DEPTH):
        return arguments  # which is refused with the message
    try:
        msgspec.msgpack.encode(arguments)
    except OverflowError:
        found: Plain = json.loads(json.dumps(arguments), parse_int=_whole_number)
        return found
    return arguments


def _whole_number(text: str) -> int | str:
    return int(text) if len(text) < 20 and abs(int(text)) < 2**63 else text


def tool(name: str, description: str | None, parameters: Plain | None, where: str) -> Plain:
    """A tool that the model may call; ``parameters``: a JSON schema.

    Raises InvalidValue for a schema that no object follows: what a model wrote by it would be no call.
    """
    kinds = (parameters or {}).get("type")
    if kinds and _NO_OBJECTS.issuperset(
        str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])
    ):
        raise InvalidValue(
            f"{where}: the arguments of a tool are an object; the schema has the type {kinds!r:.64}.",
            hint='Give a schema of type "object".',
            param=where,
        )
    function: Plain = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return checked({"type": "function", "function": function}, where)


def forced_tool(name: str | None, tools: Sequence[Plain] | None, where: str) -> Any:
    """``ChatPrompt.tool_choice`` for an answer that has to call the named tool, or any where it is None."""
    names = [each["function"]["name"] for each in tools or ()]
    if not names:
        raise InvalidValue("tool_choice asks for a tool, but there are no tools.", param=where)
    if name is None:
        return "required"
    if name not in names:
        raise InvalidValue(
            f"tool_choice names {name[:64]!r}, which is not among the tools.",
            hint=f"The tools are: {', '.join(names[:10])}.",
            param=where,
        )
    return {"name": name}


def allowed_tools(
    names: Sequence[str], mode: str, tools: Sequence[Plain], where: str
) -> tuple[list[Plain], Any]:
    """The named ones of the tools, which alone are offered, and ``ChatPrompt.tool_choice``."""
    for name in names:
        forced_tool(name, tools, where)
    found = [each for each in tools if each["function"]["name"] in names]
    return found, "required" if mode == "required" else "auto"


def prompt(
    messages: list[Plain],
    tools: list[Plain] | None,
    tool_choice: Any,
    kwargs: Plain | None = None,
    cache_marks: Sequence[CacheMark] = (),
    strict_tools: Mapping[str, str] = {},
    parallel_calls: bool = True,
) -> ChatPrompt:
    """The whole conversation. Of ``cache_marks``, as ChatPrompt has them, the last are taken; of
    ``strict_tools`` those that are among the tools.

    Raises InvalidValue if there are too many messages or images.
    """
    if len(messages) > limits.MESSAGES:
        raise InvalidValue(f"There are more than {limits.MESSAGES} messages.", param="messages")
    images = sum(len(each[IMAGES]) for each in messages if IMAGES in each)
    if images > limits.IMAGES:
        raise InvalidValue(
            f"There are {images} images; at most {limits.IMAGES} are read.",
            hint="Leave out earlier ones.",
            param="messages",
        )
    marks = list(cache_marks)[-limits.CACHE_MARKS :]
    names = {each["function"]["name"] for each in tools or ()}
    strict = {name: form for name, form in strict_tools.items() if name in names}
    return ChatPrompt(messages, tools or None, tool_choice, kwargs or {}, marks, strict, parallel_calls)


def stops(given: str | Sequence[str] | None) -> list[str]:
    """The texts at which an answer ends; an empty one is none."""
    texts = [given] if isinstance(given, str) else given or ()
    return [text for text in texts if text]


def checked(value: Plain, where: str) -> Plain:
    """Free-form JSON as it came.

    Raises:
        InvalidValue: templates or the engine's MessagePack cannot carry it.
    """
    if is_deeper(value, limits.JSON_DEPTH):
        raise InvalidValue(f"{where} is nested more than {limits.JSON_DEPTH} deep.", param=where)
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise InvalidValue(f"{where}: a number is over 64 bits.", param=where) from None
    return value
