"""What another process or machine sends, within bounds: types with a range, how deep JSON is nested, and what
msgspec raises for bytes that are no message.

A bound also keeps out NaN, which no later comparison would find, and numbers that a sum, a table or a
database cannot hold. Text and lists without a bound of their own are bounded by the message that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from msgspec import DecodeError, Meta

from fleetd import limits

#: Tokens, places in a list, and whatever else is counted.
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Bytes, and counts that only grow: what a double holds exactly.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
#: A part of a whole.
Share = Annotated[float, Meta(ge=0, le=1)]
#: A measured figure in any unit.
Rate = Annotated[float, Meta(ge=0, le=1e12)]
#: Below 0 if time was lost.
SignedSeconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
#: A natural logarithm, with room for rounding.
Logprob = Annotated[float, Meta(ge=-1e9, le=1)]
#: A sentence or a name for people.
Text = Annotated[str, Meta(max_length=limits.ERROR_TEXT_CHARS)]

#: Raised for malformed bytes, deep nesting and invalid UTF-8.
UNREADABLE = (DecodeError, RecursionError, UnicodeDecodeError)


def is_deeper(value: Any, most: int) -> bool:
    """True if lists and objects are in each other more than so many deep. Templates, encoders and libraries
    recurse with what they are given; this does not."""
    level: list[Any] = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
