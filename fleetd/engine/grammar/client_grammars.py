"""Grammars that clients write, within bounds: what the library would take long for is refused. Pure.

A schema inside of a grammar is checked as any other (``schemas.enforceable``). Terminals that are the
intersection or the complement of others can have a state for each combination of theirs.
"""

from __future__ import annotations

import json
import re

from fleetd import limits
from fleetd.engine.grammar.schemas import enforceable
from fleetd.errors import InvalidValue, UnsupportedParameter

_PART = re.compile(
    r"""
      (?P<text> "(?:[^"\\\n]|\\.)*" | /(?:[^/\\\n]|\\.)+/ | (?://|\#)[^\n]* )
    | (?P<operator> & | ~(?!\s*\d) )
    | %(?P<directive> [a-z]+ ) \s*
    """,
    re.VERBOSE,
)


_ITEM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def short(text: str, where: str) -> str:
    """A regular expression without repeats of great length. Raises UnsupportedParameter for another."""
    if _longest_repeat(text) > limits.GRAMMAR_REPEATS:
        raise UnsupportedParameter(
            f"{where}: repeats that stand for more than {limits.GRAMMAR_REPEATS:,} characters.",
            hint="Repeat fewer times, or without a number.",
            param=where,
        )
    return text


def _longest_repeat(expression: str) -> int:
    """Characters that the longest of an expression's counted repeats stands for."""
    longest, sizes, last = 0, [0], 0
    for item in _ITEM.finditer(expression):
        if item[0] == "(":
            sizes.append(0)
        elif item[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif item[1] is not None:
            times = int(item[2] or item[1])
            sizes[-1] += last * max(0, times - 1)
            last *= times
            longest = max(longest, last)
        else:
            last = 1
            sizes[-1] += 1
    return longest


def bounded(lark: str, where: str) -> str:
    """The grammar with its schemas checked, and without the library's own options.

    Args:
        lark: in Lark's notation.
        where: the field that it stands in, for errors.

    Raises:
        UnsupportedParameter: it has more operators than allowed, or a schema that cannot be enforced.
        InvalidValue: a schema that is none.
    """
    found: list[str] = []
    at = operators = 0
    while part := _PART.search(lark, at):
        found.append(lark[at : part.start()])
        at = part.end()
        if part["directive"] in ("json", "llguidance"):
            value, at = _json(lark, at, where)
            if part["directive"] == "json":
                found.append(f"%json {enforceable(value, where)}")
            continue
        operators += part["operator"] is not None
        found.append(short(part[0], where) if part[0].startswith("/") else part[0])
    if operators > limits.GRAMMAR_OPERATORS:
        raise UnsupportedParameter(
            f"{where}: more than {limits.GRAMMAR_OPERATORS} operators & and ~ in one grammar.",
            hint="Write such terminals as regular expressions.",
            param=where,
        )
    return "".join([*found, lark[at:]])


def _json(lark: str, at: int, where: str) -> tuple[object, int]:
    """The value that begins at a character, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(lark, at)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidValue(f"{where}: what follows a directive is no JSON.", param=where) from None
