"""Caches without a row per token, a window or a running state, as buffers and back: they are sent whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, empty_bytes, of_bytes, pieces
from fleetd.engine.sequence_state.rings import ring
from fleetd.engine.sequence_state.shapes import KvShape, PartShape, RunningShape
from fleetd.engine.sequence_state.write_index import write_index


def state(cache: Any) -> tuple[list[memoryview], tuple[int, int], int]:
    """The payload of a cache that is sent whole, with the ``sizes`` and the ``index`` of its frame."""
    if isinstance(cache, ArraysCache):
        found = [buffer_of(as_bytes(mx.contiguous(array))) for array in cache.cache]
        return found, (sum(piece.nbytes for piece in found), 0), 0
    halves = [pieces(as_bytes(mx.contiguous(x))[0]) for x in (cache.keys, cache.values)]
    sizes = sum(p.nbytes for p in halves[0]), sum(p.nbytes for p in halves[1])
    return [piece for half in halves for piece in half], sizes, write_index(cache)


def state_buffers(shape: PartShape, keys_bytes: int) -> list[memoryview]:
    """Memory for a state: keys, of so many bytes, and values; or each array."""
    if isinstance(shape, RunningShape):
        return [
            memoryview(empty_bytes(math.prod(array) * dtype.size)).cast("B") for array, dtype in shape.arrays
        ]
    held = keys_bytes // shape.sizes(1)[0]
    return [
        memoryview(empty_bytes(shape.heads, held, width * shape.dtype.size)).cast("B")
        for width in (shape.key_width, shape.value_width)
    ]


def rotated(
    empty: RotatingKVCache, shape: KvShape, seen: int, index: int, buffers: Sequence[memoryview]
) -> RotatingKVCache:
    """The cache whose ``state`` is in ``buffers``, after ``seen`` tokens. ``empty``: of its kind."""
    held = buffers[0].nbytes // (shape.heads * shape.key_width * shape.dtype.size)
    keys, values = (
        of_bytes(
            np.frombuffer(buffer, dtype=np.uint8).reshape(1, shape.heads, held, width * shape.dtype.size),
            shape.dtype,
        )
        for buffer, width in zip(buffers, (shape.key_width, shape.value_width), strict=True)
    )
    mx.eval(keys, values)
    return ring(empty, keys, values, seen, index)


def running(empty: ArraysCache, shape: RunningShape, buffers: Sequence[memoryview]) -> ArraysCache:
    """The running state whose ``state`` is in ``buffers``. ``empty``: of its kind."""
    cache = copy.deepcopy(empty)
    for index, ((array, dtype), buffer) in enumerate(zip(shape.arrays, buffers, strict=True)):
        data = np.frombuffer(buffer, dtype=np.uint8).reshape(*array[:-1], array[-1] * dtype.size)
        cache[index] = of_bytes(data, dtype)
    mx.eval(cache.cache)
    return cache
