"""Going back to an earlier token of a sequence: how far, exactly, and how.

A mark is set before a pass and undoes all of it: what was right in the pass is computed again, in the next
one. It costs no memory but the states themselves.
"""

from __future__ import annotations

from typing import Any

from fleetd.engine.sequence_state.kinds import first_held, kind_of


def room(cache: list[Any]) -> int:
    """Tokens that can be added and taken back again, bit for bit; 0 if none can."""
    return min((kind_of(layer).room(layer) for layer in cache), default=0)


def declined(cache: list[Any]) -> str:
    """Why a cache has no room at all, however new it is; "" if it has."""
    for layer in cache:
        if not kind_of(layer).room(layer):
            return f"a {type(layer).__name__} cannot take tokens back"
    return ""


def needs_mark(cache: list[Any]) -> bool:
    """Whether ``take_back`` cannot undo a pass, and only ``return_to`` can."""
    return any(kind_of(layer).needs_mark(layer) for layer in cache)


def mark(cache: list[Any]) -> list[Any]:
    """What ``return_to`` needs to come back to where ``cache`` is now."""
    return [kind_of(layer).mark(layer) for layer in cache]


def return_to(cache: list[Any], marked: list[Any], tokens: int) -> None:
    """Undo the last ``tokens``, all that were added since ``marked``, and that ``room`` allowed."""
    for layer, each in zip(cache, marked, strict=True):
        kind_of(layer).return_to(layer, each, tokens)


def take_back(cache: list[Any], tokens: int) -> None:
    """Undo the last ``tokens``, which ``room`` allowed, if nothing needs a mark."""
    for layer in cache:
        if tokens:
            layer.trim(tokens)


def held(cache: list[Any]) -> int | None:
    """Tokens whose keys and values are in there; None if no layer says: a running state does not."""
    return first_held(cache)


def compact(cache: list[Any]) -> list[Any]:
    """The same caches without the room to grow, which would count as memory of what is kept."""
    return [kind_of(layer).compact(layer) for layer in cache]


def can_go_back(cache: list[Any]) -> bool:
    """False if a recurrent state, or a window that has moved on, only stands for all of its tokens."""
    return all(kind_of(layer).can_go_back(layer) for layer in cache)


def prefix_copy(cache: list[Any], tokens: int, stored: int) -> list[Any] | None:
    """Caches of the first ``tokens`` of ``stored`` tokens, which can be added to without changing these.

    None if one of them cannot go back to there.
    """
    if tokens < stored and not can_go_back(cache):
        return None
    return [kind_of(layer).cut(layer, stored, tokens) for layer in cache]
