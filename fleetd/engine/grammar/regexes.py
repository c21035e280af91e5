"""Python's regular expressions, and those of JSON schemas, as llguidance reads them: all or none of a text is
matched, and there is no look-around. Pure.

``regex`` may write the expression for texts as they stand inside a JSON string: then each character has one
form, which is its escape if it needs one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_CLASSES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
# Characters that a JSON string has as escapes.
_ESCAPED = [*map(chr, range(0x20)), '"', "\\"]
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_BEGINS = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_ENDS = (codes.AT_END, codes.AT_END_STRING)


def escaped_text(text: str) -> str:
    """A text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def regex(pattern: str, flags: int = 0, *, escaped: bool = False) -> str:
    """A regular expression of Lark, between its slashes, for all that Python's matches from end to end.

    Raises ValueError for what has no such form: look-around, anchors, references to groups.
    """
    try:
        parsed = parser.parse(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return f"/{_Writer(parsed.state.flags, escaped=escaped).items(list(parsed))}/"


def search_regex(pattern: str) -> str:
    """A regular expression of Lark for all texts in which a schema's pattern is found; "" if it has none."""
    try:
        parsed = list(parser.parse(pattern, re.ASCII))
        begun = bool(parsed) and parsed[0][0] is codes.AT and parsed[0][1] in _BEGINS
        parsed = parsed[begun:]
        ended = bool(parsed) and parsed[-1][0] is codes.AT and parsed[-1][1] in _ENDS
        body = _Writer(re.ASCII, escaped=False).items(parsed[: len(parsed) - ended])
    except (ValueError, re.error, OverflowError, RecursionError):
        return ""
    return f"/{'' if begun else '(?s:.*)'}{body}{'' if ended else '(?s:.*)'}/"


class _Writer:
    def __init__(self, flags: int, *, escaped: bool) -> None:
        self._flags = flags
        self._escaped = escaped

    def items(self, items: Sequence[tuple[Any, Any]]) -> str:
        return "".join(self._item(code, value) for code, value in items)

    def _item(self, code: Any, value: Any) -> str:
        if code is codes.LITERAL:
            return self._set([(codes.LITERAL, value)])
        if code is codes.NOT_LITERAL:
            return self._set([(codes.NEGATE, None), (codes.LITERAL, value)])
        if code is codes.ANY:
            lines = [] if self._flags & re.DOTALL else [(codes.LITERAL, ord("\n"))]
            return self._set([(codes.NEGATE, None), *lines])
        if code is codes.IN:
            return self._set(value)
        if code is codes.BRANCH:
            return f"(?:{'|'.join(map(self.items, value[1]))})"
        if code is codes.SUBPATTERN:
            _, added, removed, inner = value
            return f"(?:{_Writer((self._flags | added) & ~removed, escaped=self._escaped).items(inner)})"
        if code in _REPEATS:
            least, most, inner = value
            end = "" if most is codes.MAXREPEAT else most
            return f"(?:{self.items(inner)}){{{least},{end}}}"
        raise ValueError(f"regular expressions with {str(code).lower().replace('_', ' ')}")

    def _set(self, members: Sequence[tuple[Any, Any]]) -> str:
        """One character of a set."""
        negated = bool(members) and members[0][0] is codes.NEGATE
        inner = "".join(self._member(code, value) for code, value in members[negated:])
        sign = "^" if negated else ""
        whole = f"[{sign}{inner}]" if inner else r"(?s:.)" if negated else "[a&&b]"
        if not self._escaped:
            return self._with_case(whole)
        plain = f'[{whole if inner else ""}&&[^"\\\\\\x00-\\x1F]]' if inner else r'[^"\\\x00-\x1F]'
        holds = self._holds(whole)
        signs = [_written(escaped_text(char)) for char in _ESCAPED if holds(char)]
        if not negated and len(signs) == sum(code is codes.LITERAL for code, _ in members) == len(members):
            return signs[0] if len(signs) == 1 else f"(?:{'|'.join(signs)})"
        return f"(?:{'|'.join([self._with_case(plain), *signs])})" if signs else self._with_case(plain)

    def _holds(self, whole: str) -> Callable[[str], bool]:
        found = re.compile(whole, self._flags & (re.ASCII | re.IGNORECASE))
        return lambda char: found.fullmatch(char) is not None

    def _with_case(self, text: str) -> str:
        return f"(?i:{text})" if self._flags & re.IGNORECASE else text

    def _member(self, code: Any, value: Any) -> str:
        if code is codes.LITERAL:
            return _sign(value)
        if code is codes.RANGE:
            return f"{_sign(value[0])}-{_sign(value[1])}"
        if code is codes.CATEGORY and value in _CLASSES:
            name = _CLASSES[value]
            return _ASCII_CLASSES.get(name, name) if self._flags & re.ASCII else name
        raise ValueError(f"regular expressions with {str(code).lower()}")


# In a set of Rust's regular expressions the classes know all of Unicode.
_ASCII_CLASSES = {
    r"\d": "0-9",
    r"\w": "A-Za-z0-9_",
    r"\s": r"\t\n\r\x0B\x0C ",
    r"\D": "[^0-9]",
    r"\W": "[^A-Za-z0-9_]",
    r"\S": r"[^\t\n\r\x0B\x0C ]",
}


def _sign(code: int) -> str:
    """A character in a set, as both Python and Rust read it."""
    char = chr(code)
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02X}"
    return f"\\{char}" if code < 0x80 and not (char.isalnum() or char in " _<>\"'") else char


def _written(text: str) -> str:
    """A literal text in a regular expression."""
    return "".join(f"\\{char}" if char in "\\.^$*+?{}[]()|/&-~#" else char for char in text)
