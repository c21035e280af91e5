"""Which of the connections that have proven nothing yet is closed for a new one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")


def gives_way(held: Mapping[_T, str], address: str, *, per_address: int, most: int) -> _T | None:
    """The connection to close before one from ``address`` is added; None while there is room.

    The oldest goes, not the newest, so that no host keeps others out by holding connections open; and first
    one of an address that has many.

    Args:
        held: the addresses of the open ones, the oldest first.
    """
    same = [each for each, where in held.items() if where == address]
    if len(same) >= per_address:
        return same[0]
    if len(held) < most:
        return None
    frequent = Counter(held.values()).most_common(1)[0][0]
    return next(each for each, where in held.items() if where == frequent)
