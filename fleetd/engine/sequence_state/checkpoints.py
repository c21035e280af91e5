"""States at earlier tokens of a prompt, for models of which some layers cannot take tokens back.

A layer with a row per token can be cut at any token. A running state, or a window that has moved, cannot: it
is copied while the prompt is computed, at a few places. A checkpoint holds such layers alone; the rows of the
others are those of the finished prompt, cut to the checkpoint's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from fleetd import limits
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts, arrays


def needed(cache: list[Any]) -> bool:
    """Whether some layer's state cannot be had from its later state."""
    return not all(kind_of(layer).has_rows(layer) for layer in cache)


def any_rows(cache: list[Any]) -> bool:
    """Whether any part of any layer has a row per token."""
    return any(kind_of(part).has_rows(part) for part in all_parts(cache))


def places(tokens: int, borders: Sequence[int] = (), done: int = 0) -> list[int]:
    """Where states of a prompt are kept, ascending, behind the ``done`` tokens that are there already.

    The last two multiples of a block; then ``borders``, the first of them first; then, as many as are left,
    multiples of a block at distances that double. Without borders, if the last ``m`` tokens of the prompt are
    changed, at most ``m`` and one block are computed again while ``m`` is at most a block, and at most twice
    ``m`` and two blocks as far as the places reach.

    Args:
        borders: numbers of tokens after which a later prompt may go on in another way, the most probable
            first.
    """
    block, apart = limits.CHECKPOINT_BLOCK_TOKENS, limits.CHECKPOINT_APART_TOKENS
    last = (tokens - 1) // block * block
    doubling = [last - block * ((1 << i) - 1) for i in range(limits.CHECKPOINTS_PER_PROMPT)]
    doubling = [place for place in doubling if place > done]
    found = doubling[:2]
    for at in borders:
        if len(found) == limits.CHECKPOINTS_AT_BORDERS + 2:
            break
        # What is just behind another place, or behind what is there, is read again from that one.
        at = min(place for place in (done, *found, *borders) if 0 <= at - place < apart)
        # The state after the last token that is computed is kept with the rows.
        if done < at < tokens - 1 and at not in found:
            found.append(at)
    farther = [place for place in doubling[2:] if place not in found]
    return sorted([*found, *farther[: limits.CHECKPOINTS_PER_PROMPT - len(found)]])


def saved(cache: list[Any]) -> list[Any]:
    """What ``restored`` needs, layer by layer, to come back to this token; None if it needs nothing."""
    found = [kind_of(layer).saved(layer) for layer in cache]
    # What is not computed holds on to all that it is to be computed from.
    kept = [part for layer in found for part in (layer if isinstance(layer, list) else [layer])]
    mx.eval(arrays(kept))
    return found


def of_parts(empty: Any, states: list[Any]) -> Any:
    """What ``saved`` gives of a layer like ``empty``, of its parts' saved states; None for one with rows."""
    if not isinstance(empty, CacheList):
        return states[0]
    return states if any(state is not None for state in states) else None


def nbytes(state: list[Any]) -> int:
    """Memory of what ``saved`` gave."""
    return sum(
        nbytes(part) if isinstance(part, list) else int(part.nbytes) for part in state if part is not None
    )


def restored(cache: list[Any], stored: int, tokens: int, state: list[Any]) -> list[Any]:
    """A private copy of ``cache``, which holds ``stored`` tokens, as it was after ``tokens``."""
    return [
        kind_of(layer).restored(layer, stored, tokens, part) for layer, part in zip(cache, state, strict=True)
    ]


def gone_back(cache: list[Any], stored: int, tokens: int, state: list[Any]) -> list[Any]:
    """What ``restored`` gives, made of ``cache`` itself, which is used up: rows are cut and not copied."""
    found = []
    for layer, part in zip(cache, state, strict=True):
        if kind_of(layer).has_rows(layer):
            layer.trim(stored - tokens)
            found.append(layer)
        else:
            found.append(kind_of(layer).restored(layer, stored, tokens, part))
    return found
