"""Which caches can take back tokens exactly, and how many.

KVCache, QuantizedKVCache, ConcatenateKVCache    any number: rows past the end are never read
RotatingKVCache                                  while its window has not moved: then old rows are lost
all others                                       none: a state that was advanced cannot be gone back on
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from fleetd.engine.sequence_state.copies import beginning

ANY = 1 << 30


def room(cache: list[Any]) -> int:
    """Tokens that can be added and taken back again, bit for bit; 0 if none can."""
    return min((_room(layer) for layer in cache), default=0)


def declined(cache: list[Any]) -> str:
    """Why a cache has no room at all, however new it is; "" if it has."""
    for layer in cache:
        if not _room(layer):
            return f"a {type(layer).__name__} cannot take tokens back"
    return ""


def take_back(cache: list[Any], tokens: int) -> None:
    """Undo the last ``tokens``, which ``room`` allowed."""
    for layer in cache:
        if tokens:
            layer.trim(tokens)


def held(cache: list[Any]) -> int:
    """Tokens whose keys and values are in there."""
    layer = cache[0]
    return held(list(layer.caches)) if isinstance(layer, CacheList) else int(layer.offset)


def compact(cache: list[Any]) -> list[Any]:
    """The same caches without the room to grow, which would count as memory of what is kept."""
    return [beginning(layer, layer.offset) if type(layer) is KVCache else layer for layer in cache]


def _room(layer: Any) -> int:
    if type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache):
        return ANY
    if type(layer) is RotatingKVCache:
        # The row that fills the window is the last that displaces none.
        return max(0, int(layer.max_size) - int(layer.offset))
    if type(layer) is CacheList:
        return min(_room(part) for part in layer.caches)
    return 0
