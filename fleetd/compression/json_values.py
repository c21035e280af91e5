"""Where the values of a JSON text lie: a scanner that keeps positions, which ``json`` does not.

{"a": [1, 2], "b": "x"}      Node object ─┬─ member "a" ── Node array ── 1, 2
                                          └─ member "b" ── Node string
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Deeper nesting is an attack, or at least nothing that a person reads.
_DEPTH = 48
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
# An escaped line feed that is not itself escaped: where a long string may be cut.
_LINE_END = re.compile(r"(?:[^\\]|\\[^n])*?\\n")


@dataclass(slots=True)
class JsonNode:
    """A value at ``[start, end)`` of the text. ``first``: where its member begins in an object, key included.

    Children of a long string are its lines, without the quotes.
    """

    kind: str
    start: int
    end: int
    first: int
    children: list[JsonNode] = field(default_factory=list)


class Scanner:
    """``allowance``: how many characters may be read in all; text that only looks like JSON would
    otherwise be read many times."""

    def __init__(self, text: str, long_string: int) -> None:
        self._text = text
        self._long = long_string
        self._allowance = 4 * len(text)

    def at(self, start: int) -> JsonNode | None:
        """The object or array that begins at ``start``; None if there is no complete one."""
        if self._allowance <= 0 or self._text[start : start + 1] not in ("{", "["):
            return None
        self._furthest = start
        node = self._value(start, start, 0)
        self._allowance -= self._furthest - start
        return node

    def _value(self, at: int, first: int, depth: int) -> JsonNode | None:
        mark = self._text[at : at + 1]
        if mark in ("{", "["):
            return self._container(at, first, depth, mark)
        match = (_STRING if mark == '"' else _SCALAR).match(self._text, at)
        if match is None:
            return None
        self._furthest = max(self._furthest, match.end())
        node = JsonNode("string" if mark == '"' else "scalar", at, match.end(), first)
        if mark == '"' and node.end - at > self._long:
            node.children = self._lines(at + 1, node.end - 1)
        return node

    def _container(self, at: int, first: int, depth: int, mark: str) -> JsonNode | None:
        node = JsonNode("object" if mark == "{" else "array", at, at, first)
        closing = "}" if mark == "{" else "]"
        at = self._skip(at + 1)
        if self._text[at : at + 1] == closing:
            node.end = at + 1
            return node
        while depth < _DEPTH:
            start = at
            if mark == "{":
                key = _STRING.match(self._text, at)
                if key is None or self._text[(at := self._skip(key.end())) : at + 1] != ":":
                    return None
                at = self._skip(at + 1)
            child = self._value(at, start, depth + 1)
            if child is None:
                return None
            node.children.append(child)
            at = self._skip(child.end)
            found = self._text[at : at + 1]
            if found == closing:
                node.end = at + 1
                return node
            if found != ",":
                return None
            at = self._skip(at + 1)
        return None

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        end = match.end() if match else at
        self._furthest = max(self._furthest, end)
        return end

    def _lines(self, start: int, end: int) -> list[JsonNode]:
        found = []
        while start < end:
            match = _LINE_END.match(self._text, start, end)
            stop = match.end() if match else end
            found.append(JsonNode("line", start, stop, start))
            start = stop
        return found if len(found) > 1 else []
