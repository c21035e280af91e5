"""Quantised weights to f32 on a CPU: the bytes of ``mx.dequantize(...).astype(mx.float32)`` in less time.

MLX computes scale · q + bias in the dtype of the scales, which a CPU only emulates: it rounds after the
product and after the sum. Here both are computed in f32 and rounded with integer operations, in blocks that
stay near the core. A product of an integer of at most 8 bits and an f16 or bf16 is exact in f32, and for a
sum of two such numbers the bits of f32 are enough that rounding twice is rounding once. Groups whose f16
leave the range in which they have all their bits are computed in f16, as MLX does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

_WIDTHS = (2, 3, 4, 5, 6, 8)

# Elements that are computed at a time.
BLOCK = 1 << 16
# Low bits of an f32 that each dtype does not have.
_DROPPED = {mx.float32: 0, mx.float16: 13, mx.bfloat16: 16}
# An f16 with a smaller size is rounded to fewer bits, one with a larger size is infinite.
_F16_LEAST, _F16_MOST = 2.0**-14, 65000.0
_NIBBLES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1).astype(np.float32)
# Both numbers of a byte as one element of 8 bytes: a table that is looked up byte by byte.
_PAIRS = _NIBBLES.view(np.complex64).reshape(256)


def dequantizing(layer: Any, out: F32) -> list[Callable[[], None]]:
    """Tasks that write the weights of a quantised layer to ``out``, each some rows; [] for a kind that only
    MLX knows. ``out`` has the shape of the weights and lies in one piece."""
    scales, biases = layer.scales, layer.get("biases")
    dropped = _DROPPED.get(scales.dtype)
    if layer.mode != "affine" or layer.bits not in _WIDTHS or biases is None or dropped is None:
        return []
    if biases.dtype != scales.dtype or layer.group_size * layer.bits % 32:
        return []
    scale, bias = (np.array(part.astype(mx.float32)).reshape(-1, 1) for part in (scales, biases))
    odd = np.empty(0, dtype=np.intp)
    if scales.dtype == mx.float16:
        odd = np.flatnonzero(~_normal(scale, bias, layer.bits))
    odd_scale, odd_bias = scale[odd], bias[odd]
    scale[odd] = bias[odd] = 0
    weight = np.ascontiguousarray(np.array(layer.weight, copy=False))
    packed = weight.view(np.uint8).reshape(len(scale), -1)
    groups = out.reshape(len(scale), layer.group_size)
    step = max(1, BLOCK // layer.group_size)

    def rows(first: int, last: int) -> None:
        scratch = np.empty((step, layer.group_size), dtype=np.uint32)
        for at in range(first, last, step):
            part = slice(at, min(at + step, last))
            _block(packed[part], layer.bits, scale[part], bias[part], groups[part], scratch, dropped)
        begin, end = np.searchsorted(odd, (first, last))
        for at in range(begin, end, step):
            part = slice(at, min(at + step, end))
            groups[odd[part]] = _in_half(packed[odd[part]], layer.bits, odd_scale[part], odd_bias[part])

    # So large that handing them over costs little.
    piece = 8 * step
    return [partial(rows, at, min(at + piece, len(scale))) for at in range(0, len(scale), piece)]


def _normal(scale: F32, bias: F32, bits: int) -> npt.NDArray[np.bool_]:
    """Groups (G,) of which no product and no sum leaves the range in which an f16 has all its bits."""
    size = np.abs(scale)
    most = size * (2**bits - 1) + np.abs(bias)
    return np.asarray(((size >= _F16_LEAST) | (size == 0)) & (most <= _F16_MOST))[:, 0]


def _in_half(packed: U8, bits: int, scale: F32, bias: F32) -> F32:
    """Groups of weights in f16: ``packed`` (G, bytes), ``scale`` and ``bias`` (G, 1) → (G, N)."""
    q = np.empty((len(packed), packed.shape[1] * 8 // bits), dtype=np.float32)
    unpack(packed, bits, q)
    with np.errstate(over="ignore", invalid="ignore"):
        product = q.astype(np.float16) * scale.astype(np.float16)
        return np.asarray(product + bias.astype(np.float16), dtype=np.float32)


def unpack(packed: U8, bits: int, out: F32) -> None:
    """Integers from a stream of bits, the first lowest: ``packed`` (G, bytes) → ``out`` (G, N), in place."""
    if bits == 8:
        np.copyto(out, packed)
    elif bits == 4:
        np.take(_PAIRS, packed, out=out.view(np.complex64), mode="clip")
    else:
        size = math.lcm(bits, 8) // 8  # bytes of the fewest integers that fill whole ones
        units = np.zeros((len(packed), packed.shape[1] // size, 8), dtype=np.uint8)
        units[..., :size] = packed.reshape(len(packed), -1, size)
        joined = units.view("<u8")[..., 0]
        count = size * 8 // bits
        split = out.reshape(len(out), -1, count)
        for index in range(count):
            split[..., index] = joined >> np.uint64(index * bits) & np.uint64(2**bits - 1)


def _block(packed: U8, bits: int, scale: F32, bias: F32, out: F32, scratch: U32, dropped: int) -> None:
    """Groups of weights: ``packed`` (G, bytes), ``scale`` and ``bias`` (G, 1) → ``out`` (G, N), in place."""
    unpack(packed, bits, out)
    np.multiply(out, scale, out=out)
    _round(out.view(np.uint32), scratch[: len(out)], dropped)
    np.add(out, bias, out=out)
    _round(out.view(np.uint32), scratch[: len(out)], dropped)


def _round(bits: U32, scratch: U32, dropped: int) -> None:
    """Round f32, given as its bits, to so many fewer, to nearest and half to even, in place."""
    if not dropped:
        return
    np.right_shift(bits, dropped, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, (1 << (dropped - 1)) - 1, out=scratch)
    np.add(bits, scratch, out=bits)
    np.bitwise_and(bits, np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF), out=bits)
