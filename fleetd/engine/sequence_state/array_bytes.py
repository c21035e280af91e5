"""Arrays as plain memory: MLX gives NumPy a view of an array, and NumPy gives its buffers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

# uint8, as NumPy gives it; the buffer protocol is not in NumPy's types before Python 3.12.
Bytes = Any


def as_bytes(array: mx.array) -> Bytes:
    """An array's own memory, its last axis in bytes; evaluates it. Copied only where it is not contiguous."""
    return np.array(array.view(mx.uint8), copy=False)


def of_bytes(data: Bytes, dtype: mx.Dtype) -> mx.array:
    """The array whose ``as_bytes`` this is; a copy."""
    return mx.array(data).view(dtype)


def empty_bytes(*shape: int) -> Bytes:
    return np.empty(shape, dtype=np.uint8)


def pieces(data: Bytes) -> list[memoryview]:
    """(heads, count, width) as one buffer where it is contiguous, else one per head.

    Rows that fill a whole array may lie there as they were computed, token by token over all heads: MLX then
    keeps the array it was given instead of copying it. Such are copied here.
    """
    parts = [data] if data.flags.c_contiguous else list(data)
    return [buffer_of(part) for part in parts if part.size]


def buffer_of(data: Bytes) -> memoryview:
    whole: Bytes = np.ascontiguousarray(data)
    return memoryview(whole).cast("B")
