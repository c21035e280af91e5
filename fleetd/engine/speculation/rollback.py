"""Which caches can take back tokens exactly, and how many.

KVCache, QuantizedKVCache, ConcatenateKVCache    any number: rows past the end are never read
RotatingKVCache                                  while its window has not moved: then old rows are lost
all others                                       none: a state that was advanced cannot be gone back on
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

ANY = 1 << 30


def room(cache: list[Any]) -> int:
    """Tokens that can be added and taken back again, bit for bit; 0 where none can."""
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


def copy_on_write(cache: list[Any]) -> list[Any]:
    """The same rows in caches of their own; the memory is shared until one side writes."""
    return [_copy_on_write(layer) for layer in cache]


def compact(cache: list[Any]) -> list[Any]:
    """Without the room to grow, which whoever keeps it would pay for."""
    out = []
    for layer in cache:
        if type(layer) is not KVCache:
            out.append(layer)
            continue
        short = KVCache()
        short.keys = mx.contiguous(layer.keys[..., : layer.offset, :])
        short.values = mx.contiguous(layer.values[..., : layer.offset, :])
        short.offset = layer.offset
        out.append(short)
    return out


def _room(layer: Any) -> int:
    if type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache):
        return ANY
    if type(layer) is RotatingKVCache:
        # The row that fills the window is the last that displaces none.
        return max(0, int(layer.max_size) - int(layer.offset))
    if type(layer) is CacheList:
        return min(_room(part) for part in layer.caches)
    return 0


def _copy_on_write(layer: Any) -> Any:
    if type(layer) is CacheList:
        return CacheList(*(_copy_on_write(part) for part in layer.caches))
    twin = copy.copy(layer)
    if layer.keys is not None:
        # An array object is changed by writing to it; another one on the same memory is not.
        twin.keys, twin.values = tree_map(mx.array, (layer.keys, layer.values))
    return twin
