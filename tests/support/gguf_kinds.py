"""Weights written in every quantised kind that GGUF import knows.

The `gguf` package reads all kinds and writes the oldest; the others are written here from the definition of
their blocks, each with the plainest choice of scales. What was written is what gguf's own `dequantize` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

Array = np.ndarray[Any, Any]

_CODEBOOK = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def encoded(kind: str, values: Array) -> Array:
    """Rows of bytes of ``values``, whose last axis is a multiple of the kind's block."""
    rows = np.ascontiguousarray(values, dtype=np.float32)
    own = _OWN.get(kind)
    if own is None:
        return np.asarray(gguf.quantize(rows, Kind[kind]))
    block, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
    with np.errstate(divide="ignore", invalid="ignore"):
        raw = own(rows.reshape(-1, block))
    return raw.reshape(*rows.shape[:-1], -1)


def decoded(kind: str, raw: Array) -> Array:
    return np.asarray(gguf.dequantize(raw, Kind[kind]), dtype=np.float32)


def _half(values: Array) -> tuple[Array, Array]:
    """As two bytes, and as what they hold: (n,) → (n, 2), (n, 1)."""
    half = values.astype("<f2")
    return half[:, None].view(np.uint8), half[:, None].astype(np.float32)


def _steps(values: Array, step: Array, low: int, high: int) -> Array:
    return np.clip(np.nan_to_num(np.rint(values / step), posinf=0, neginf=0), low, high).astype(np.int64)


def _ranges(x: Array, most: int, levels: int) -> tuple[Array, Array, Array, Array, Array]:
    """Scales and minima of groups (n, groups, size), themselves in ``levels`` steps, and the integers."""
    least = np.minimum(x.min(-1), 0)
    scale, below = (np.maximum(x.max(-1), 0) - least) / most, -least
    d_raw, d = _half(scale.max(-1) / levels)
    m_raw, m = _half(below.max(-1) / levels)
    s, n = _steps(scale, d, 0, levels), _steps(below, m, 0, levels)
    q = _steps(x + (m * n)[..., None], (d * s)[..., None], 0, most)
    return d_raw, m_raw, s.astype(np.uint8), n.astype(np.uint8), q.astype(np.uint8)


def _signed(x: Array, most: int, levels: int) -> tuple[Array, Array, Array]:
    """The same without minima; the largest weight of a group is its lowest integer, -``most``."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    scale = largest / -most
    d_raw, d = _half(np.abs(scale).max(-1) / (levels - 1))
    s = _steps(scale, d, -levels, levels - 1)
    return d_raw, s, _steps(x, (d * s)[..., None], -most, most - 1)


def _q4_k(x: Array, fifth: bool = False) -> Array:
    d, m, s, n, q = _ranges(x.reshape(-1, 8, 32), 31 if fifth else 15, 63)
    six = np.concatenate(
        [
            s[:, :4] | (s[:, 4:] >> 4 << 6),
            n[:, :4] | (n[:, 4:] >> 4 << 6),
            (s[:, 4:] & 15) | ((n[:, 4:] & 15) << 4),
        ],
        axis=1,
    )
    low = q & 15
    halves = (low[:, 0::2] | (low[:, 1::2] << 4)).reshape(len(q), -1)
    high = (q >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1).astype(np.uint8)
    return np.concatenate([d, m, six, *([high] if fifth else []), halves], axis=1)


def _q5_k(x: Array) -> Array:
    return _q4_k(x, fifth=True)


def _pairs_of_bits(q: Array) -> Array:
    """Integers of 2 bits (n, 256): 128 of them in 32 bytes, the element 32 further on two bits higher."""
    parts = q.reshape(-1, 2, 4, 32).astype(np.uint8) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(parts, axis=2).reshape(len(q), -1)


def _q2_k(x: Array) -> Array:
    d, m, s, n, q = _ranges(x.reshape(-1, 16, 16), 3, 15)
    return np.concatenate([s | (n << 4), _pairs_of_bits(q.reshape(-1, 256)), d, m], axis=1)


def _q3_k(x: Array) -> Array:
    d, s, q = _signed(x.reshape(-1, 16, 16), 4, 32)
    u = (q + 4).reshape(-1, 256).astype(np.uint8)
    high = (u >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    six = (s + 32).astype(np.uint8)
    low = (six[:, :8] & 15) | ((six[:, 8:] & 15) << 4)
    top = (six >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    mask = np.bitwise_or.reduce(high, axis=1)
    return np.concatenate([mask, _pairs_of_bits(u & 3), low, np.bitwise_or.reduce(top, axis=1), d], axis=1)


def _q6_k(x: Array) -> Array:
    d, s, q = _signed(x.reshape(-1, 16, 16), 32, 128)
    u = (q + 32).reshape(-1, 2, 4, 32).astype(np.uint8)
    low = ((u[:, :, :2] & 15) | ((u[:, :, 2:] & 15) << 4)).reshape(len(u), -1)
    high = np.bitwise_or.reduce(u >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    return np.concatenate([low, high.reshape(len(u), -1), s.astype(np.int8).view(np.uint8), d], axis=1)


def _codes(x: Array, step: Array) -> Array:
    """The nearest of the 16 codes: x (..., 32) → bytes (..., 16)."""
    u = np.abs((x / step)[..., None] - _CODEBOOK).argmin(-1).astype(np.uint8)
    return u[..., :16] | (u[..., 16:] << 4)


def _largest_over(x: Array, most: int) -> Array:
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    return np.asarray(largest / most)


def _iq4_nl(x: Array) -> Array:
    d_raw, d = _half(_largest_over(x, -127))
    return np.concatenate([d_raw, _codes(x, d)], axis=1)


def _iq4_xs(x: Array) -> Array:
    x = x.reshape(-1, 8, 32)
    scale = _largest_over(x, -127)
    d_raw, d = _half(np.abs(scale).max(-1) / 31)
    s = _steps(scale, d, -32, 31)
    six = (s + 32).astype(np.uint16)
    high = (six >> 4 << (2 * np.arange(8, dtype=np.uint16))).sum(1).astype("<u2")[:, None].view(np.uint8)
    low = (six[:, 0::2] & 15) | ((six[:, 1::2] & 15) << 4)
    codes = _codes(x, (d * np.where(s == 0, 1, s))[..., None])
    return np.concatenate([d_raw, high, low.astype(np.uint8), codes.reshape(len(x), -1)], axis=1)


def _iq3_s(x: Array) -> Array:
    gguf.quants.IQ3_S.init_grid()
    grid = np.asarray(gguf.quants.IQ3_S.grid, dtype=np.float32).reshape(-1, 4)
    x = x.reshape(-1, 8, 32)
    scale = np.abs(x).max(-1) / 15
    d_raw, d = _half(scale.max(-1) / 31)
    s = _steps((scale / d - 1) / 2, np.float32(1), 0, 15)
    fours = np.abs(x / (d * (1 + 2 * s))[..., None]).reshape(-1, 4)
    index = (fours @ grid.T - (grid**2).sum(-1) / 2).argmax(-1)
    signs = np.packbits(x.reshape(len(x), -1) < 0, axis=1, bitorder="little")
    high = np.packbits(index.reshape(len(x), -1) >> 8 != 0, axis=1, bitorder="little")
    low = (index & 255).reshape(len(x), -1).astype(np.uint8)
    scales = (s[:, 0::2] | (s[:, 1::2] << 4)).astype(np.uint8)
    return np.concatenate([d_raw, low, high, signs, scales], axis=1)


_OWN: dict[str, Callable[[Array], Array]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
