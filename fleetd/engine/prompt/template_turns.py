"""Conversations in the form that a chat template takes, where it refuses or forgets what clients send.

    several calls in one message             refused by Llama 3; gpt-oss shows the first
                                             → one by one, each before its result
    text and reasoning beside a call         refused by gpt-oss → the text follows the reasoning
    ids of calls in any form                 refused by Mistral → nine letters and digits of a hash
    two messages of one role                 refused by Mistral and Gemma → one message
    a user who speaks after a tool's result  refused by Mistral → an empty turn of the assistant's between
    a system message                         refused by Gemma 2; in the middle refused by Qwen 3.5, and
                                             forgotten by gpt-oss → the user's words

Which of these a model's template needs, renderings of small conversations tell. What a template takes as it
is stays as it is.
"""

from __future__ import annotations

import functools
import hashlib
import string
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from fleetd.engine.prompt import chat_template
from fleetd.engine.protocol import IMAGES, Message

# What gpt-oss writes before its reasoning, and between that and what it says before a call.
_ANALYSIS = "<|channel|>analysis<|message|>"
_TO_COMMENTARY = "<|end|><|start|>assistant<|channel|>commentary<|message|>"

_ID_CHARS = 9
_ID_ALPHABET = string.digits + string.ascii_letters


class TemplateNeeds(msgspec.Struct, frozen=True):
    """The form that a chat template wants of a conversation."""

    #: A message may have one call.
    single_calls: bool = False
    #: The words that join text to the reasoning if a message may not have text beside reasoning and a call;
    #: None if it may.
    preamble: str | None = None
    #: Ids of calls have nine letters and digits.
    short_ids: bool = False
    #: Roles of which no two messages may follow each other.
    joined: frozenset[str] = frozenset()
    #: The assistant's words between a tool's result and the user; None if none are needed.
    between: str | None = None
    #: Where system messages may be: "anywhere", "first" or "nowhere".
    system: str = "anywhere"

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template takes: their texts are the same, in the same order."""
        turns = list(messages)
        if self.system != "anywhere":
            turns = _system_as_user(turns, first=self.system == "first")
        if self.joined:
            turns = _joined(turns, self.joined)
        if self.between is not None:
            turns = _with_turns_between(turns, self.between)
        if self.single_calls:
            turns = _single_calls(turns)
        if self.preamble is not None:
            turns = [_with_preamble_as_reasoning(each, self.preamble) for each in turns]
        return turns

    def with_ids(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with ids of calls that the template takes, the same for a call and its result."""
        return [_with_short_ids(each) for each in messages] if self.short_ids else list(messages)


def reminder(text: str) -> str:
    """The user's text for a system message in the middle: many templates take one only at first."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


# ---- Forms -----------------------------------------------------------------------------------------------


def _text_of(message: Message, key: str = "content") -> str:
    return str(message.get(key) or "")


def _joined_text(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _calls(message: Message) -> list[Message]:
    return list(message.get("tool_calls") or ())


def _system_as_user(messages: Iterable[Message], *, first: bool) -> list[Message]:
    """Messages with the system's turned into the user's; with ``first`` the leading ones stay."""
    turns: list[Message] = []
    for each in messages:
        if each.get("role") != "system" or (first and all(t.get("role") == "system" for t in turns)):
            turns.append(each)
        else:
            text = _text_of(each)
            begun = any(turn.get("role") != "user" for turn in turns)
            turns.append(each | {"role": "user", "content": reminder(text) if first or begun else text})
    return turns


def _joined(messages: Iterable[Message], roles: Set[str]) -> list[Message]:
    """Messages in which neighbours of one of these roles are one message."""
    turns: list[Message] = []
    for each in messages:
        if turns and each.get("role") == turns[-1].get("role") and each.get("role") in roles:
            turns[-1] = merged(turns[-1], each)
        else:
            turns.append(each)
    return turns


def merged(first: Message, second: Message) -> Message:
    """Two messages of one role as one; the text of the second is at its end."""
    text = _joined_text(_text_of(first), _text_of(second))
    said = first.get("content") is not None or second.get("content") is not None
    whole = first | second | {"content": text if said else None}
    reasoning = _joined_text(_text_of(first, "reasoning_content"), _text_of(second, "reasoning_content"))
    calls = _calls(first) + _calls(second)
    if reasoning:
        whole["reasoning_content"] = reasoning
    if calls:
        whole["tool_calls"] = calls
    if IMAGES in first or IMAGES in second:
        before = len(text) - len(_text_of(second))
        moved = [(before + chars, image) for chars, image in second.get(IMAGES, ())]
        whole[IMAGES] = [*first.get(IMAGES, ()), *moved]
    return whole


def _with_turns_between(messages: Iterable[Message], words: str) -> list[Message]:
    """An assistant's turn of these words wherever a user speaks behind calls or their results."""
    turns: list[Message] = []
    for each in messages:
        behind = bool(turns) and (turns[-1].get("role") == "tool" or bool(_calls(turns[-1])))
        if behind and each.get("role") == "user":
            turns.append({"role": "assistant", "content": words})
        turns.append(each)
    return turns


def _single_calls(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, followed by its result."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], _calls(messages[at])
        at += 1
        if len(calls) < 2:
            turns.append(message)
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        turns += _paired(message, calls, results)
    return turns


def _paired(message: Message, calls: Sequence[Message], results: Sequence[Message]) -> list[Message]:
    """Each call before its result: that of its id, or else the first that belongs to no other call."""
    left = list(results)
    found: list[Message | None] = []
    for call in calls:
        own = next((r for r in left if call.get("id") and r.get("tool_call_id") == call["id"]), None)
        if own is not None:
            left.remove(own)
        found.append(own)
    turns: list[Message] = []
    head = message
    for call, own in zip(calls, found, strict=True):
        turns.append(head | {"tool_calls": [call]})
        head = {"role": "assistant", "content": ""}  # text and reasoning stand before the first call
        result = own if own is not None or not left else left.pop(0)
        turns += [] if result is None else [result]
    return turns + left


def _with_preamble_as_reasoning(message: Message, between: str) -> Message:
    """Text beside reasoning and a call as the last of the reasoning."""
    text, reasoning = _text_of(message), _text_of(message, "reasoning_content")
    if not (text and reasoning and _calls(message)):
        return message
    return message | {"content": "", "reasoning_content": reasoning + between + text}


def _with_short_ids(message: Message) -> Message:
    changed: Message = {}
    if _calls(message):
        changed["tool_calls"] = [each | {"id": _short_id(each.get("id"))} for each in _calls(message)]
    if message.get("role") == "tool":
        changed["tool_call_id"] = _short_id(message.get("tool_call_id"))
    return message | changed


def _short_id(name: Any) -> str:
    """Nine letters and digits; an id of that form stays."""
    text = str(name or "")
    if len(text) == _ID_CHARS and set(text) <= set(_ID_ALPHABET):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode()).digest())
    digits = []
    for _ in range(_ID_CHARS):
        number, digit = divmod(number, len(_ID_ALPHABET))
        digits.append(_ID_ALPHABET[digit])
    return "".join(digits)


# ---- What a template needs -------------------------------------------------------------------------------

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "What."}},
            },
        },
    }
]
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ANOTHER: Message = {"role": "system", "content": "Be kind."}
_USER: Message = {"role": "user", "content": "Look."}
_ANSWER: Message = {"role": "assistant", "content": "A tree."}


def _calling(calls: Sequence[tuple[str, str]], **said: str) -> list[Message]:
    """A user's question, calls of these ids for these things, and a result of each."""
    made = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": {"at": thing}}}
        for name, thing in calls
    ]
    results = [
        {"role": "tool", "content": "A tree.", "tool_call_id": name, "name": "look"} for name, _ in calls
    ]
    return [_USER, {"role": "assistant", "content": "", **said, "tool_calls": made}, *results]


_ONE = [("call00001", "treetops")]
_TWO = [*_ONE, ("call00002", "meadows")]
# As clients and models write them: none, a short one, a long one.
_FOREIGN_IDS = ("", "c1", "call_0123456789abcdef01234567")

Render = Callable[[Sequence[Message]], str | None]


def own_system(render: Render) -> str:
    """The system text that a template writes if a conversation has none; "" if it writes none, or none that a
    system message could be in place of. ``render`` may raise."""
    mark = "\ue000system\ue001"
    try:
        without = render([_USER]) or ""
        before, _, after = (render([_SYSTEM | {"content": mark}, _USER]) or "").partition(mark)
        found = without.removeprefix(before).removesuffix(after)
        return found if render([_SYSTEM | {"content": found}, _USER]) == without else ""
    except Exception:  # templates raise whatever their authors did not think of
        return ""


@functools.lru_cache(maxsize=4)
def template_needs(tokenizer: Any, *, with_tools: bool = True) -> TemplateNeeds:
    """What the tokenizer's chat template needs, of several the one with tools or the other. The last four
    answers are remembered."""
    shown = with_tools or not isinstance(tokenizer.chat_template, dict)
    tools = _TOOLS if shown and tokenizer.has_tool_calling else None

    def render(messages: Sequence[Message]) -> str | None:
        try:
            return chat_template.rendered(tokenizer, messages, tools)
        except Exception:  # templates raise whatever their authors did not think of
            return None

    if render([_USER]) is None:
        return TemplateNeeds()
    needs: dict[str, Any] = {
        "joined": _joined_roles(render),
        "system": _system_places(render),
    }
    if "treetops" in (render(_calling(_ONE)) or ""):
        needs |= {
            "single_calls": _needs_single_calls(render),
            "preamble": _preamble(render),
            "short_ids": any(render(_calling([(name, "treetops")])) is None for name in _FOREIGN_IDS),
            "between": _between(render),
        }
    return TemplateNeeds(**needs)


_ROLES = frozenset({"system", "user", "assistant"})
# Conversations that a template may refuse, or whose system messages it may forget.
_TWICE: Mapping[str, Sequence[list[Message]]] = {
    "system": [[_SYSTEM, _ANOTHER, _USER]],
    "user": [[_USER, _USER]],
    "assistant": [[_USER, _ANSWER, _ANSWER, _USER], [_USER, _ANSWER, *_calling(_ONE)[1:]]],
}
_AT_FIRST = [_SYSTEM, _USER]
_IN_THE_MIDDLE = [
    [_SYSTEM, _USER, _ANSWER, _ANOTHER, _USER],
    [_SYSTEM, _USER, _ANSWER, _ANOTHER, *_calling(_ONE)[1:]],
]


def _helps(render: Render, talk: Sequence[Message], changed: Sequence[Message]) -> bool:
    """True if a conversation is refused, or not all that its system says is shown, and the changed one is
    taken whole."""
    texts = [_text_of(each) for each in talk if each["role"] == "system"]

    def taken(messages: Sequence[Message]) -> bool:
        text = render(messages)
        return text is not None and all(each in text for each in texts)

    return not taken(talk) and taken(changed)


def _joined_roles(render: Render) -> frozenset[str]:
    return frozenset(
        role
        for role, talks in _TWICE.items()
        if any(_helps(render, talk, _joined(talk, _ROLES)) for talk in talks)
    )


def _system_places(render: Render) -> str:
    def as_user(talk: Sequence[Message], *, first: bool) -> list[Message]:
        return _joined(_system_as_user(talk, first=first), _ROLES)

    if _helps(render, _AT_FIRST, as_user(_AT_FIRST, first=False)):
        return "nowhere"
    if any(_helps(render, talk, as_user(talk, first=True)) for talk in _IN_THE_MIDDLE):
        return "first"
    return "anywhere"


def _needs_single_calls(render: Render) -> bool:
    def shown(messages: Sequence[Message]) -> bool:
        text = render(messages) or ""
        return "treetops" in text and "meadows" in text

    return not shown(_calling(_TWO)) and shown(_single_calls(_calling(_TWO)))


def _preamble(render: Render) -> str | None:
    alone = render(_calling(_ONE, reasoning_content="It grows."))
    both = render(_calling(_ONE, reasoning_content="It grows.", content="Let me see."))
    if alone is None or both is not None:
        return None
    return _TO_COMMENTARY if f"{_ANALYSIS}It grows." in alone else "\n"


def _between(render: Render) -> str | None:
    results = _calling(_ONE)
    if render([*results, _USER]) is not None:
        return None
    # Some templates want words of an assistant that calls nothing.
    with_words = ((words, [*results, _ANSWER | {"content": words}, _USER]) for words in ("", "Done."))
    return next((words for words, messages in with_words if render(messages) is not None), None)
