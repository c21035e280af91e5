"""GGUF's quantised blocks rearranged as MLX's affine triples, without rounding anything again.

Both formats store small integers in groups of 32 along the input axis with one scale (and offset) per
group: value = scale · q + bias. Only the packing differs.

    Q4_0   f16 d            | 16 bytes: element i low nibble of byte i, element i+16 high nibble;  d·(q - 8)
    Q4_1   f16 d, f16 m     | the same;                                                           d·q + m
    Q8_0   f16 d            | 32 signed bytes;                                                    d·q
    MLX    uint32 words, element i of a word at bit i·bits; f16 scales; f16 biases
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]  # (..., blocks, bytes per block)

GROUP_SIZE = 32
#: Kinds that stay quantised, and the bits MLX is told.
BITS: dict[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def words(kind: str, blocks: Blocks) -> npt.NDArray[np.uint32]:
    """The ``weight`` of the triple: (..., blocks · 32 · bits / 32)."""
    if kind == "Q8_0":
        packed = blocks[..., 2:] ^ np.uint8(0x80)  # two's complement → offset by 128
    else:
        nibbles = blocks[..., -16:]
        elements = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)
        packed = elements[..., 0::2] | (elements[..., 1::2] << 4)
    packed = np.ascontiguousarray(packed)
    return packed.view("<u4").reshape(*blocks.shape[:-2], -1)


def scales(blocks: Blocks) -> npt.NDArray[np.float16]:
    return _halves(blocks, 0)


def biases(kind: str, blocks: Blocks) -> npt.NDArray[np.float16]:
    if kind == "Q4_1":
        return _halves(blocks, 2)
    zero_point = np.float16(-8 if kind == "Q4_0" else -128)
    return np.asarray(scales(blocks) * zero_point, dtype=np.float16)  # a power of two: exact


def _halves(blocks: Blocks, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def dequantise(kind: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Any kind → f32, over rows of bytes (..., bytes per row)."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants  # heavy, and only the import needs it

    values: Any = quants.dequantize(raw, GGMLQuantizationType[kind])
    return np.asarray(values, dtype=np.float32)
