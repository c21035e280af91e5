"""GGUF's quantised blocks: the integers and the grid that they hold. Pure.

Most kinds are affine in groups of 32 along the input axis, value = scale · q + bias. MLX's affine mode is the
same, so their integers are kept.

    Q4_0   f16 d        | 16 bytes: element i in the low half of byte i, i + 16 in the high half
    Q4_1   f16 d, f16 m | the same
    Q5_0   f16 d        | 4 bytes: the fifth bit of each element | the same
    Q5_1   f16 d, f16 m | the same
    Q8_0   f16 d        | 32 signed bytes
    Q4_K   f16 d, f16 m | 12 bytes: 8 scales s and 8 minima n of 6 bits | 128 bytes of halves
    Q5_K   f16 d, f16 m | the same | 32 bytes: the fifth bits, group j in bit j of each | the same
    MXFP4  1 byte e     | 16 bytes of halves, each a float of 4 bits

    value: d · (q - 8), d · q + m, d · (q - 16), d · q + m, d · q, d · s · q - m · n (both), fp4 · 2^(e - 127)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]  # (rows, bytes of a row)
Floats = npt.NDArray[np.float32]

GROUP = 32
#: Affine kinds with groups of 32 → the bits of their integers.
AFFINE_BITS: dict[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
_BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q4_K": 144,
    "Q5_K": 176,
    "MXFP4": 17,
}


class AffineRows(NamedTuple):
    """Rows of groups: value = scale · q + bias."""

    q: Bytes  # (rows, groups, 32)
    scale: Floats  # (rows, groups)
    bias: Floats  # (rows, groups)


def affine(kind: str, raw: Bytes) -> AffineRows:
    """The integers and the grid of rows of an affine kind (``AFFINE_BITS``). Nothing is rounded."""
    blocks = raw.reshape(len(raw), -1, _BLOCK_BYTES[kind])
    if kind in ("Q4_K", "Q5_K"):
        return _super_blocks(kind, blocks)
    d = _halves(blocks, 0)
    if kind == "Q8_0":
        return AffineRows(blocks[..., 2:] ^ np.uint8(0x80), d, d * np.float32(-128))  # offset by 128
    q = _nibbles(blocks[..., -16:])
    if kind in ("Q5_0", "Q5_1"):
        q = q | (np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little") << np.uint8(4))
    if kind in ("Q4_1", "Q5_1"):
        return AffineRows(q, d, _halves(blocks, 2))
    return AffineRows(q, d, d * np.float32(-8 if kind == "Q4_0" else -16))


def _super_blocks(kind: str, blocks: Bytes) -> AffineRows:
    """The integers and the grid of blocks of 256: eight groups, whose scales and minima are scaled."""
    rows = len(blocks)
    six = blocks[..., 4:16].reshape(rows, -1, 3, 4)
    low, middle, high = six[..., 0, :], six[..., 1, :], six[..., 2, :]
    s = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    n = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    halves = blocks[..., -128:].reshape(rows, -1, 4, 1, 32)
    q = np.concatenate([halves & 15, halves >> 4], axis=-2).reshape(rows, -1, 8, 32)
    if kind == "Q5_K":
        bit = np.arange(8, dtype=np.uint8)[:, None]
        q = q | ((blocks[..., None, 16:48] >> bit & 1) << 4)
    scale = _halves(blocks, 0)[..., None] * s
    bias = -_halves(blocks, 2)[..., None] * n
    return AffineRows(
        q.reshape(rows, -1, GROUP), scale.reshape(rows, -1), bias.reshape(rows, -1).astype(np.float32)
    )


def mxfp4(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Rows of MXFP4 as floats of 4 bits (rows, groups, 32) and exponents (rows, groups)."""
    blocks = raw.reshape(len(raw), -1, _BLOCK_BYTES["MXFP4"])
    return _nibbles(blocks[..., 1:]), blocks[..., 0]


def values(kind: str, raw: Bytes) -> Floats:
    """The numbers of rows of any kind (rows, columns)."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants  # heavy, and only the import needs it

    found: Any = quants.dequantize(raw, GGMLQuantizationType[kind])
    return np.asarray(found, dtype=np.float32)


def _nibbles(halves: Bytes) -> Bytes:
    return np.concatenate([halves & 0x0F, halves >> 4], axis=-1)


def _halves(blocks: Bytes, at: int) -> Floats:
    pair = np.ascontiguousarray(blocks[..., at : at + 2])
    return pair.view("<f2")[..., 0].astype(np.float32)
