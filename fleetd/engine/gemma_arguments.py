"""The arguments of a tool call as Gemma 4 writes them, as JSON while it writes them. Pure.

    call:NAME{path:<|"|>a.py<|"|>,lines:[1,2],deep:{x:true}}

JSON, but for keys without quotes and strings between markers of their own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from fleetd.engine.tagged_arguments import escaped, open_end

GEMMA_HEAD = re.compile(r"(?:(?!call:)[\s\S])*call:(?P<name>[\w-]+)(?=\{)")

_QUOTE = '<|"|>'
_OUTSIDE = {"{": "{", "[": "[", "}": "}", "]": "]", ",": ", ", ":": ": "}
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(slots=True)
class GemmaArguments:
    """Reads the object, from its ``{`` on, in pieces of any size. A word that is no JSON becomes a string."""

    ended: bool = False
    _text: str = ""  # what was read and is not told yet
    _in_string: bool = False
    _open: list[str] = field(default_factory=list)
    _at_key: bool = False
    _out: list[str] = field(default_factory=list)

    def feed(self, text: str) -> tuple[str, int]:
        self._text += text
        while not self.ended and (self._string() if self._in_string else self._outside()):
            pass
        out, self._out = "".join(self._out), []
        return out, len(text) - len(self._text) if self.ended else len(text)

    def close(self) -> str | None:
        return None

    def _string(self) -> bool:
        """More of a string. False if more text is needed."""
        at = self._text.find(_QUOTE)
        if at >= 0:
            self._out.append(f'{escaped(self._text[:at])}"')
            self._text, self._in_string = self._text[at + len(_QUOTE) :], False
            return True
        certain = len(self._text) - open_end(self._text, _QUOTE)
        self._out.append(escaped(self._text[:certain]))
        self._text = self._text[certain:]
        return False

    def _outside(self) -> bool:
        """The next sign or word outside of strings. False if more text is needed."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        sign = self._text[0]
        if sign in _OUTSIDE:
            self._text = self._text[1:]
            self._sign(sign)
            return True
        if self._text.startswith(_QUOTE):
            self._text, self._in_string = self._text[len(_QUOTE) :], True
            self._out.append('"')
            return True
        if _QUOTE.startswith(self._text):
            return False
        return self._word()

    def _sign(self, sign: str) -> None:
        if sign in "{[":
            self._open.append(sign)
        elif sign in "}]":
            self._open.pop()
            self.ended = not self._open
        self._at_key = sign in "{," and bool(self._open) and self._open[-1] == "{"
        self._out.append(_OUTSIDE[sign])

    def _word(self) -> bool:
        """A key, or a value that is no string of Gemma's, once its end is known."""
        quoted = _JSON_STRING.match(self._text)
        if quoted is None and self._text.startswith('"'):
            return False
        end = quoted or re.search(r":" if self._at_key else r"[,}\]]", self._text)
        if end is None:
            return False
        length = end.end() if quoted else end.start()
        word, self._text = self._text[:length].strip(), self._text[length:]
        self._out.append(_key(word) if self._at_key else _value(word))
        return True


def _key(word: str) -> str:
    return word if word.startswith('"') else json.dumps(word, ensure_ascii=False)


def _value(word: str) -> str:
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
