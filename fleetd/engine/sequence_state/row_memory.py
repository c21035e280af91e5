"""Rows of single layers as plain memory: in caches, and between them and the network or a disk.

Rows of a ``KVCache`` lie in one array per layer, (1, heads, room, width), with room for the whole prompt from
the start. Rows that come from elsewhere are read straight into that memory: MLX gives NumPy a view of it, and
computes nothing from a layer while rows are still being written there.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from fleetd.engine.sequence_state.array_bytes import as_bytes, pieces
from fleetd.engine.sequence_state.copies import cache_of, copy_on_write
from fleetd.engine.sequence_state.growth import in_steps
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.packed_caches import PackedKVCache, emptied
from fleetd.engine.sequence_state.shapes import PackedShape, QuantisedShape, RowShape


def preallocated(shape: RowShape, tokens: int, prefix: Any = None) -> Any:
    """A new cache with room for ``tokens``, in the steps in which mlx-lm makes room. ``prefix``, a cache of
    the same shape, is copied into it."""
    room = in_steps(tokens)
    arrays = [mx.zeros((1, shape.heads, room, width), dtype) for width, dtype in shape.row_arrays]
    if isinstance(shape, QuantisedShape):
        cache = QuantizedKVCache(shape.group_size, shape.bits)
        cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])
    else:
        cache = PackedKVCache(shape.packing) if isinstance(shape, PackedShape) else KVCache()
        cache.keys, cache.values = arrays
    if prefix is not None and prefix.offset:
        cache.offset = prefix.offset
        for array, before in zip(arrays, kind_of(prefix).arrays(prefix), strict=True):
            array[..., : cache.offset, :] = before[..., : cache.offset, :]
    mx.eval(arrays)
    return cache


def begun(cache: Any, tokens: int) -> KVCache:
    """The first ``tokens`` rows of a cache, to be added to. Only these are copied then, not all the room."""
    if not tokens:
        return emptied(cache)
    keys, values = kind_of(cache).arrays(cache)
    return cache_of(cache, keys[..., :tokens, :], values[..., :tokens, :], tokens)


def truncated(cache: KVCache, tokens: int) -> KVCache:
    """The same rows, of which only the first ``tokens`` count; what is added to one is not in the other."""
    short = copy_on_write(cache)
    short.offset = tokens
    return short


class RowBuffer:
    """Memory for the rows that arrive: the preallocated cache itself.

    While a RowBuffer exists, MLX copies the whole array before it adds to it: drop it, and the buffers it
    gave, as soon as the rows have arrived. The cache is not read before.
    """

    __slots__ = ("_arrays",)

    def __init__(self, cache: Any) -> None:
        self._arrays = [as_bytes(array)[0] for array in kind_of(cache).arrays(cache)]

    @classmethod
    def computed(cls, cache: Any) -> RowBuffer:
        """Rows to read. Those that fill their room may lie there as they were computed, token by token over
        all heads; such are copied."""
        found = cls(cache)
        found._arrays = [np.ascontiguousarray(array) for array in found._arrays]
        return found

    def rows(self, start: int, stop: int) -> list[memoryview]:
        """Buffers of each array's heads, keys before values, of tokens [start, stop)."""
        return [
            memoryview(head[start:stop]).cast("B")
            for array in self._arrays
            for head in array
            # An index of the context has keys only.
            if head.shape[-1]
        ]


def rows(cache: KVCache, start: int, stop: int) -> list[memoryview]:
    """Keys, then values, of tokens [start, stop), not copied: nothing may be added to the cache any more."""
    return [
        piece for part in (cache.keys, cache.values) for piece in pieces(as_bytes(part)[0, :, start:stop])
    ]


def copied(cache: KVCache, start: int, stop: int) -> tuple[mx.array, mx.array]:
    """The same as arrays of their own, to be evaluated together with what they depend on."""
    return (
        mx.contiguous(cache.keys[..., start:stop, :]),
        mx.contiguous(cache.values[..., start:stop, :]),
    )
