"""States at earlier tokens of a prompt, for models of which some layers cannot take tokens back.

A layer with a row per token can be cut at any token. A running state, or a window that has moved, cannot: it
is copied while the prompt is computed, at a few places. A checkpoint holds such layers alone; the rows of the
others are those of the finished prompt, cut to the checkpoint's token. MLX replaces a running state and does
not write into it, so its copy is a second name for memory that would have been freed.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache

from fleetd import limits
from fleetd.engine.sequence_state.copies import beginning, copy_on_write


def needed(cache: list[Any]) -> bool:
    """Whether some layer's state cannot be had from its later state."""
    return not all(_has_rows(layer) for layer in cache)


def places(tokens: int) -> list[int]:
    """Where a prompt's states are kept, ascending: a function of its length alone.

    The last two multiples of a block, then at distances that double: if the last ``m`` tokens of the prompt
    are changed, at most ``m`` and one block are computed again while ``m`` is at most a block, and at most
    twice ``m`` and two blocks as far as the places reach.
    """
    block = limits.CHECKPOINT_BLOCK_TOKENS
    last = (tokens - 1) // block * block
    found = [last - block * ((1 << i) - 1) for i in range(limits.CHECKPOINTS_PER_PROMPT)]
    return sorted(place for place in found if place > 0)


def saved(cache: list[Any]) -> list[Any]:
    """What ``restored`` needs, layer by layer, to come back to this token; None where it needs nothing."""
    return [_saved(layer) for layer in cache]


def nbytes(state: list[Any]) -> int:
    """Memory of what ``saved`` gave."""
    return sum(
        nbytes(part) if isinstance(part, list) else int(part.nbytes) for part in state if part is not None
    )


def restored(cache: list[Any], stored: int, tokens: int, state: list[Any]) -> list[Any]:
    """A private copy of ``cache``, which holds ``stored`` tokens, as it was after ``tokens``."""
    return [_restored(layer, stored, tokens, part) for layer, part in zip(cache, state, strict=True)]


def cut(layer: Any, stored: int, tokens: int) -> Any:
    """A private copy of a layer that can be taken back from ``stored`` tokens to ``tokens``."""
    if type(layer) is KVCache:
        # Without the longer one's room to grow: it would count again in the copy's own entry.
        return beginning(layer, tokens)
    own = copy_on_write(layer)
    if tokens < stored:
        own.trim(stored - tokens)
    return own


def _has_rows(layer: Any) -> bool:
    if type(layer) is CacheList:
        return all(_has_rows(part) for part in layer.caches)
    return type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache)


def _saved(layer: Any) -> Any:
    if _has_rows(layer):
        return None
    if type(layer) is CacheList:
        return [_saved(part) for part in layer.caches]
    return copy_on_write(layer)


def _restored(layer: Any, stored: int, tokens: int, state: Any) -> Any:
    if state is None:
        return cut(layer, stored, tokens)
    if type(layer) is CacheList:
        return CacheList(*restored(layer.caches, stored, tokens, state))
    return copy_on_write(state)
