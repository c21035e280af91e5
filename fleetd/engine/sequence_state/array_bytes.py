"""Arrays as plain memory: MLX gives NumPy a view of an array, and NumPy gives its buffers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

# uint8, as NumPy gives it; the buffer protocol is not in NumPy's types before Python 3.12.
Bytes = Any


def as_bytes(array: mx.array) -> Bytes:
    """An array's own memory, its last axis in bytes; evaluates it. Copied only if it is not contiguous."""
    return np.array(array.view(mx.uint8), copy=False)


# The bits of which all are set in numbers that are not finite, and the width of those numbers.
_EXPONENTS = {
    mx.float32: (mx.uint32, np.uint32(0x7F800000)),
    mx.bfloat16: (mx.uint16, np.uint16(0x7F80)),
    mx.float16: (mx.uint16, np.uint16(0x7C00)),
}


def all_finite(array: mx.array, first: int, last: int) -> bool:
    """True if rows [first, last) of an array (1, heads, rows, width) have no infinity and no NaN."""
    found = _EXPONENTS.get(array.dtype)
    if found is None or not array.size:
        return True  # whole numbers, or an index that has no values
    if mx.default_device() != mx.Device(mx.cpu):
        return bool(mx.all(mx.isfinite(array[..., first:last, :])))
    # MLX makes a pass over memory for each step of this on a CPU, and is ten times as slow.
    bits, exponent = found
    heads = np.array(array.view(bits), copy=False)[0]
    return not any(((head[first:last] & exponent) == exponent).any() for head in heads)


def of_bytes(data: Bytes, dtype: mx.Dtype) -> mx.array:
    """The array whose ``as_bytes`` this is; a copy."""
    return mx.array(data).view(dtype)


def empty_bytes(*shape: int) -> Bytes:
    return np.empty(shape, dtype=np.uint8)


def pieces(data: Bytes) -> list[memoryview]:
    """(heads, count, width) as one buffer if it is contiguous, else one per head.

    Rows that fill a whole array may lie there as they were computed, token by token over all heads: MLX then
    keeps the array it was given instead of copying it. Such are copied here.
    """
    parts = [data] if data.flags.c_contiguous else list(data)
    return [buffer_of(part) for part in parts if part.size]


def buffer_of(data: Bytes) -> memoryview:
    whole: Bytes = np.ascontiguousarray(data)
    return memoryview(whole).cast("B")
