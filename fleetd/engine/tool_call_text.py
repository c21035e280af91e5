"""The arguments of a tool call while the model writes them, as the text of one JSON object. Pure.

A format is the text before the arguments: what is around the name, and what ends it. Most models write the
arguments as JSON, whose end is found by its braces; others in a way of their own, which is turned into JSON.
Text that never matches is no call and is left to the format's parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleetd.engine.gemma_arguments import GEMMA_HEAD, GemmaArguments
from fleetd.engine.tagged_arguments import TAGGED_FORMATS, TaggedArguments

_NAME = r"(?P<name>[^\"\s\[\]<>{}]+)"
_BETWEEN = r"[\s,;\[\]}]*"
_OBJECT = (
    r"\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\""
    + _NAME
    + r"\"\s*,\s*\"(?:arguments|parameters)\"\s*:\s*(?=\{)"
)

# By the parser's name: what comes before the arguments of a call.
HEADS = {
    "json_tools": re.compile(_BETWEEN + _OBJECT),
    "llama3": re.compile(_BETWEEN + _OBJECT),
    "mistral": re.compile(
        rf"{_BETWEEN}(?:{_OBJECT.replace('<name>', '<named>')}|"
        rf"(?:\[TOOL_CALLS\])?\s*{_NAME}\s*\[ARGS\]\s*(?=\{{))"
    ),
    "kimi_k2": re.compile(
        r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<>{}]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    "harmony": re.compile(r"(?P<name>[\w.-]+)[^{}]*?<\|message\|>\s*(?=\{)"),
    "gemma4": GEMMA_HEAD,
    **{name: each.head for name, each in TAGGED_FORMATS.items()},
}

# Longest text before the arguments: more of it is no call, and would be read again with every token.
_HEAD_CHARS = 1024

# Control characters that models write into strings as they are, which JSON does not allow.
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class ArgumentsReader(Protocol):
    """Reads what follows a call's head, in pieces of any size."""

    @property
    def ended(self) -> bool: ...

    def feed(self, text: str) -> tuple[str, int]:
        """More of the arguments as JSON, and how many characters of ``text`` belong to the call."""

    def close(self) -> str | None:
        """The last of the arguments where the section has ended the call; None if that leaves half a call."""


@dataclass(slots=True)
class JsonObjectText:
    """Cuts a text that begins with ``{`` where that object ends, and escapes line ends inside its strings."""

    ended: bool = False
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False

    def feed(self, text: str) -> tuple[str, int]:
        """What of ``text`` belongs to the object, and how many of its characters that were."""
        out: list[str] = []
        for at, char in enumerate(text):
            if self.ended:
                return "".join(out), at
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                else:
                    char = _ESCAPES.get(char, char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.ended = self._depth == 0
            out.append(char)
        return "".join(out), len(text)

    def close(self) -> str | None:
        return None


@dataclass(slots=True)
class WrittenCall:
    """A call whose arguments have begun. ``fresh``: the part of them that no piece has reported yet.
    ``reported``: its ToolCall was sent."""

    name: str
    call_id: str = ""
    arguments: str = ""
    fresh: str = ""
    whole: bool = False
    reported: bool = False


def tool_name(name: str, names: Collection[str]) -> str:
    """The one of ``names`` that a model means: spelled so, or with other capitals or behind a namespace.

    A name that is none of them stays as it is: agents answer such a call with an error, from which the model
    learns, while text in its place would end their turn.
    """
    if name in names:
        return name
    last = re.split(r"[.:/]", name)[-1]
    near = [each for each in names if each == last] or [e for e in names if e.lower() == last.lower()]
    return near[0] if len(near) == 1 else name


def may_be_bare_call(text: str, names: Collection[str]) -> bool | None:
    """Whether a text is a call as Llama writes it, without any marker; None while that cannot be told yet.

    A JSON object that names none of the tools is an answer.
    """
    start = "".join(text[: 4 * _HEAD_CHARS].split())
    heads = [
        f'{{{kind}"name":"{name}","{arguments}":{{'
        for name in names
        for kind in ("", '"type":"function",')
        for arguments in ("parameters", "arguments")
    ]
    if any(start.startswith(head) for head in heads):
        return True
    return None if any(head.startswith(start) for head in heads) else False


@dataclass(slots=True)
class ToolCallText:
    """Reads one section of tool calls, in pieces of any size.

    Args:
        format: the parser's name; one that is not in HEADS finds no call.
        names: of the request's tools.
        parse: the parser, which reads one call; formats whose arguments are JSON do without it.
    """

    format: str
    names: Collection[str]
    parse: Callable[[str], Any]
    calls: list[WrittenCall] = field(default_factory=list)
    _text: str = ""
    _reader: ArgumentsReader | None = None

    @property
    def begun(self) -> bool:
        """True while a call's arguments are not whole."""
        return self._reader is not None

    def feed(self, text: str) -> None:
        """Raises nothing: what is no call leaves ``calls`` as it is."""
        self._text += text
        while self._text:
            if self._reader is None:
                head = HEADS.get(self.format)
                if head is None or len(self._text) > _HEAD_CHARS + len(text):
                    return
                found = head.match(self._text)
                if found is None:
                    return
                groups = found.groupdict()
                name = groups.get("name") or groups.get("named") or ""
                self.calls.append(WrittenCall(tool_name(name, self.names), groups.get("id") or ""))
                self._text = self._text[found.end() :]
                self._reader = self._begin(found[0])
            piece, read = self._reader.feed(self._text)
            self._text = self._text[read:]
            call = self.calls[-1]
            call.arguments += piece
            call.fresh += piece
            if not self._reader.ended:
                return
            call.whole, self._reader = True, None

    def close(self) -> None:
        """The section has ended, and with it a call that only its end ends."""
        if self._reader is not None and (piece := self._reader.close()) is not None:
            call, self._reader = self.calls[-1], None
            call.arguments += piece
            call.fresh += piece
            call.whole = True

    def _begin(self, head: str) -> ArgumentsReader:
        if self.format in TAGGED_FORMATS:
            return TaggedArguments(TAGGED_FORMATS[self.format], head, self.parse)
        return GemmaArguments() if self.format == "gemma4" else JsonObjectText()
