"""Python's regular expressions, and those of JSON schemas, as llguidance reads them: all or none of a text is
matched, and there is no look-around. Pure.

``regex`` may write the expression for texts as they stand inside a JSON string: then each character has one
form, which is its escape if it needs one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
# Characters that a held JSON string has as escapes. Other control characters it has not.
_ESCAPED = '\b\t\n\f\r"\\'
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
    return f"/{_RegexWriter(parsed.state.flags, escaped=escaped).items(list(parsed))}/"


def escaped_line(pattern: str, flags: int = 0) -> str:
    """The body of a rule for an expression that ends with any number of characters, as ``.*`` does, some of
    which have escapes; "" for any other expression.

    The lexer looks one byte ahead, and a backslash may begin one more such character or what follows them: in
    a rule each escape is a terminal of its own.
    """
    try:
        items = list(parser.parse(pattern, flags))
    except (re.error, OverflowError, RecursionError):
        return ""
    while len(items) == 1 and items[0][0] is codes.SUBPATTERN and not any(items[0][1][1:3]):
        items = list(items[0][1][3])
    if not items or items[-1][0] not in _REPEATS:
        return ""
    least, most, inner = items[-1][1]
    if most is not codes.MAXREPEAT or least > 1 or len(inner) != 1:
        return ""
    writer = _RegexWriter(parser.parse(pattern, flags).state.flags, escaped=True)
    found = writer.signs(*inner[0])
    if found is None:
        return ""
    plain, signs = found
    before = f"/{writer.items(items[:-1])}/ " if len(items) > 1 else ""
    return f"{before}(/{plain}+/ | /{'|'.join(signs)}/){'+' if least else '*'}"


def search_regex(pattern: str) -> str:
    """A regular expression of Lark for all texts in which a schema's pattern is found; "" if it has none."""
    try:
        parsed = list(parser.parse(pattern, re.ASCII))
        begun = bool(parsed) and parsed[0][0] is codes.AT and parsed[0][1] in _BEGINS
        parsed = parsed[begun:]
        ended = bool(parsed) and parsed[-1][0] is codes.AT and parsed[-1][1] in _ENDS
        body = _RegexWriter(re.ASCII, escaped=False).items(parsed[: len(parsed) - ended])
    except (ValueError, re.error, OverflowError, RecursionError):
        return ""
    return f"/{'' if begun else '(?s:.*)'}{body}{'' if ended else '(?s:.*)'}/"


class _RegexWriter:
    def __init__(self, flags: int, *, escaped: bool) -> None:
        self._flags = flags
        self._escaped = escaped

    def items(self, items: Sequence[tuple[Any, Any]]) -> str:
        return "".join(self._item(code, value) for code, value in items)

    def _item(self, code: Any, value: Any) -> str:
        if (members := self._members(code, value)) is not None:
            return self._set(members)
        if code is codes.BRANCH:
            return f"(?:{'|'.join(map(self.items, value[1]))})"
        if code is codes.SUBPATTERN:
            _, added, removed, inner = value
            return f"(?:{_RegexWriter((self._flags | added) & ~removed, escaped=self._escaped).items(inner)})"
        if code in _REPEATS:
            least, most, inner = value
            end = "" if most is codes.MAXREPEAT else most
            return f"(?:{self.items(inner)}){{{least},{end}}}"
        raise ValueError(f"regular expressions with {str(code).lower().replace('_', ' ')}")

    def signs(self, code: Any, value: Any) -> tuple[str, list[str]] | None:
        """The characters of an item that stand as they are, and the escapes of the others; None for an item
        that is not one character, or one of a set without any of both."""
        members = self._members(code, value)
        if members is None:
            return None
        plain, signs = self._split(members)
        return (plain, signs) if signs else None

    def _members(self, code: Any, value: Any) -> Sequence[tuple[Any, Any]] | None:
        """The members of the set that an item is one character of; None if it is something else."""
        if code is codes.LITERAL:
            return [(codes.LITERAL, value)]
        if code is codes.NOT_LITERAL:
            return [(codes.NEGATE, None), (codes.LITERAL, value)]
        if code is codes.ANY:
            lines = [] if self._flags & re.DOTALL else [(codes.LITERAL, ord("\n"))]
            return [(codes.NEGATE, None), *lines]
        members: Sequence[tuple[Any, Any]] | None = value if code is codes.IN else None
        return members

    def _set(self, members: Sequence[tuple[Any, Any]]) -> str:
        """One character of a set."""
        if not self._escaped:
            return self._with_case(self._class(members))
        plain, signs = self._split(members)
        if len(signs) == len(members) and all(code is codes.LITERAL for code, _ in members):
            return f"(?:{'|'.join(signs)})"
        return f"(?:{'|'.join([plain, *signs])})"

    def _class(self, members: Sequence[tuple[Any, Any]]) -> str:
        negated = bool(members) and members[0][0] is codes.NEGATE
        inner = "".join(self._member(code, value) for code, value in members[negated:])
        return f"[{'^' if negated else ''}{inner}]" if inner else r"[\s\S]"

    def _split(self, members: Sequence[tuple[Any, Any]]) -> tuple[str, list[str]]:
        """The characters of a set that stand as they are, and the escapes of the others."""
        whole = self._class(members)
        found = re.compile(whole, self._flags & (re.ASCII | re.IGNORECASE))
        signs = [_written(escaped_text(char)) for char in _ESCAPED if found.fullmatch(char)]
        return self._with_case(f'[{whole}&&[^"\\\\\\x00-\\x1F]]'), signs

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
