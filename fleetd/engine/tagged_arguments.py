"""The arguments of a tool call whose parameters stand between tags, as JSON while they are written. Pure.

    Qwen      <function=NAME><parameter=KEY>VALUE</parameter></function>
    GLM       NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
    MiniMax   <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
    DeepSeek  as MiniMax, and each parameter says whether it is a string: dsml.py

What a value means depends on the tool's schema, and the format's parser knows how. It is asked about a call
with that one parameter: for a value once it is whole, and before that with samples, of which a parameter that
is a string gives back each as it was. Only a string is told before it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleetd.engine.dsml import DSML

#: Reads the text of one call; raises anything for a text that is none.
CallParser = Callable[[str], Any]


class TaggedFormat(msgspec.Struct, frozen=True):
    """How a family writes calls. ``end`` is "" where only the end of the section ends a call.

    ``trims``: what the parser strips off a value: all blanks around it, one line end on either side, or
    nothing.
    """

    head: re.Pattern[str]
    opens: re.Pattern[str]
    closes: str
    end: str
    trims: Literal["blanks", "line ends", "nothing"]


def _glm(prefix: str) -> TaggedFormat:
    return TaggedFormat(
        re.compile(rf"\s*(?P<name>[^\s<>{{}}]+)\s*(?=<{prefix}arg_key>)"),
        re.compile(rf"<{prefix}arg_key>.*?</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>", re.DOTALL),
        f"</{prefix}arg_value>",
        "",
        "blanks",
    )


# By the parser's name.
TAGGED_FORMATS = {
    "qwen3_coder": TaggedFormat(
        re.compile(r"[^<]*<function=\s*(?P<name>[^\s<>]+)(?:>|(?=[\s<]))"),
        re.compile(r"<parameter=\s*[^\s<>]+(?:>|(?=[\s<]))"),
        "</parameter>",
        "</function>",
        "line ends",
    ),
    "minimax_m2": TaggedFormat(
        re.compile(r"[^<]*<invoke name=\s*[\"']?(?P<name>[^\s\"'<>]+)[\"']?\s*>"),
        re.compile(r"<parameter name=[^>]+>"),
        "</parameter>",
        "</invoke>",
        "blanks",
    ),
    "deepseek_v32": TaggedFormat(
        re.compile(rf'[^<]*<{DSML}invoke name="(?P<name>[^"]+)">'),
        re.compile(rf'<{DSML}parameter name="[^"]*" string="(?:true|false)">'),
        f"</{DSML}parameter>",
        f"</{DSML}invoke>",
        "nothing",
    ),
    "glm47": _glm(""),
    "laguna": _glm(""),
    "longcat": _glm("longcat_"),
}

# Values that mean something else wherever they are not read as strings.
_SAMPLES = ("1", "1.5", "true", "[1]", '{"a": 1}', '"x"', "'x'", "None")
# What some parsers read as null even where a string is expected, in any case.
_NULLS = ("null", "none", "nil")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# Longest text between two parameters that may still be the beginning of a tag.
_TAG_CHARS = 1024


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string. What is escaped piece by piece is what is escaped at once."""
    return _JSON.encode(text)[1:-1]


def open_end(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag`` and is not all of it."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)


@dataclass(slots=True)
class TaggedArguments:
    """Reads what follows a call's ``head``, in pieces of any size.

    A value that the parser refuses is given as the string that was written: whoever runs the tool tells the
    model what is wrong with it.
    """

    format: TaggedFormat
    head: str
    parse: CallParser
    ended: bool = False
    _text: str = ""  # what was read and is not told yet
    _searched: int = 0  # of it, for the tag that ends a value
    _tag: str = ""  # the open parameter's; "" between parameters
    _is_string: bool = False
    _nulls: tuple[str, ...] = ()
    _in_string: bool = False  # the beginning of the value was told
    _begun: bool = False
    _parameters: int = 0
    _out: list[str] = field(default_factory=list)

    def feed(self, text: str) -> tuple[str, int]:
        """More of the arguments as JSON, and how many characters of ``text`` belong to the call."""
        self._text += text
        if not self._begun:
            self._begun = True
            self._out.append("{")
        while self._value() if self._tag else self._between():
            pass
        out, self._out = "".join(self._out), []
        return out, len(text) - len(self._text) if self.ended else len(text)

    def close(self) -> str | None:
        """The last of the arguments where the section has ended the call; None inside of a parameter."""
        if self._tag:
            return None
        self.ended = True
        return "}"

    def _between(self) -> bool:
        """Find the next parameter or the end of the call. False if more text is needed."""
        opens = self.format.opens.search(self._text)
        end = self._text.find(self.format.end) if self.format.end else -1
        if end >= 0 and (opens is None or end < opens.start()):
            self._text = self._text[end + len(self.format.end) :]
            self._out.append("}")
            self.ended = True
            return False
        if opens is None:
            self._text = self._text[-_TAG_CHARS:]
            return False
        self._tag, self._text = opens[0], self._text[opens.end() :]
        samples = [self._parsed(sample) for sample in _SAMPLES]
        key = next((found[0] for found in samples if found), "")
        self._is_string = samples == [(key, sample) for sample in _SAMPLES]
        self._nulls = tuple(word for word in _NULLS if self._parsed(word) == (key, None))
        self._in_string = False
        self._out.append(f"{', ' if self._parameters else ''}{_JSON.encode(key)}: ")
        self._parameters += 1
        return True

    def _value(self) -> bool:
        """More of a value. False if more text is needed."""
        at = self._text.find(self.format.closes, self._searched)
        self._searched = 0
        if at >= 0:
            text, self._text = self._text[:at], self._text[at + len(self.format.closes) :]
            self._out.append(f'{escaped(self._trimmed_end(text))}"' if self._in_string else self._whole(text))
            self._tag = ""
            return True
        if not self._is_string:
            self._searched = max(0, len(self._text) - len(self.format.closes) + 1)
            return False
        certain = self._trimmed_end(self._text[: len(self._text) - open_end(self._text, self.format.closes)])
        if not self._in_string:
            begun = self._trimmed_start(certain)
            if not begun or any(word.startswith(begun.lower()) for word in self._nulls):
                return False
            self._in_string = True
            self._out.append('"')
            self._text = self._trimmed_start(self._text)
            certain = begun
        self._out.append(escaped(certain))
        self._text = self._text[len(certain) :]
        return False

    def _whole(self, text: str) -> str:
        """A whole value as JSON."""
        found = self._parsed(text)
        try:
            if found is not None:
                return _JSON.encode(found[1])
        except (TypeError, ValueError):
            pass  # JSON has no such value
        return _JSON.encode(self._trimmed_end(self._trimmed_start(text)))

    def _parsed(self, value: str) -> tuple[str, Any] | None:
        """The parameter's name and value as the format's parser reads them; None where it refuses."""
        try:
            call = self.parse(self.head + self._tag + value + self.format.closes + self.format.end)
            ((key, read),) = (call[0] if isinstance(call, list) else call)["arguments"].items()
        except Exception:  # parsers raise whatever their text makes them raise
            return None
        return str(key), read

    def _trimmed_start(self, text: str) -> str:
        match self.format.trims:
            case "blanks":
                return text.lstrip()
            case "line ends":
                return text.removeprefix("\n")
            case "nothing":
                return text

    def _trimmed_end(self, text: str) -> str:
        match self.format.trims:
            case "blanks":
                return text.rstrip()
            case "line ends":
                return text.removesuffix("\n")
            case "nothing":
                return text
