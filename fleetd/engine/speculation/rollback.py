"""Which caches can take back tokens exactly, how many, and how.

KVCache, QuantizedKVCache, ConcatenateKVCache    any number: rows past the end are never read
RotatingKVCache                                  while its window has not moved: then old rows are lost
ArraysCache                                      any number, but only to a mark: a running state that was
                                                 advanced is replaced by the one before, which was kept
all others                                       none

A mark is set before a pass and undoes all of it: what was right in the pass is computed again, in the next
one. It costs no memory but the states themselves, which MLX replaces and does not write into.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from fleetd.engine.kv_caches import beginning

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


def needs_mark(cache: list[Any]) -> bool:
    """Whether ``take_back`` cannot undo a pass, and only ``return_to`` can."""
    return any(isinstance(part, ArraysCache) for part in parts(cache))


def mark(cache: list[Any]) -> list[Any]:
    """What ``return_to`` needs to come back to where ``cache`` is now."""
    return [_states(part) for part in parts(cache)]


def return_to(cache: list[Any], marked: list[Any], tokens: int) -> None:
    """Undo the last ``tokens``, all that were added since ``marked``, and that ``room`` allowed."""
    for part, states in zip(parts(cache), marked, strict=True):
        if states is None:
            take_back([part], tokens)
        else:
            part.state = _copied(states)


def take_back(cache: list[Any], tokens: int) -> None:
    """Undo the last ``tokens``, which ``room`` allowed, where nothing needs a mark."""
    for layer in cache:
        if tokens:
            layer.trim(tokens)


def held(cache: list[Any]) -> int | None:
    """Tokens whose keys and values are in there; None if no layer says: a running state does not."""
    return next((int(part.offset) for part in parts(cache) if hasattr(part, "offset")), None)


def compact(cache: list[Any]) -> list[Any]:
    """The same caches without the room to grow, which would count as memory of what is kept."""
    return [beginning(layer, layer.offset) if type(layer) is KVCache else layer for layer in cache]


def parts(cache: list[Any]) -> list[Any]:
    """The caches of all layers; of a layer that has several, each."""
    return [
        part
        for layer in cache
        for part in (parts(list(layer.caches)) if isinstance(layer, CacheList) else [layer])
    ]


def _room(layer: Any) -> int:
    if type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache, ArraysCache):
        return ANY
    if type(layer) is RotatingKVCache:
        # The row that fills the window is the last that displaces none.
        return max(0, int(layer.max_size) - int(layer.offset))
    if type(layer) is CacheList:
        return min((_room(part) for part in layer.caches), default=0)
    return 0


def _states(part: Any) -> Any:
    return _copied(part.state) if isinstance(part, ArraysCache) else None


def _copied(states: Any) -> Any:
    """``ArraysCache.state`` with a list of its own: the cache's is written into."""
    arrays, left_padding, lengths = states
    return list(arrays), left_padding, lengths
