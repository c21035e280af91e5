"""How MLX stores a GGUF kind, and how a tensor's rows become that. Pure.

MLX's affine mode knows widths of 2, 3, 4, 5, 6 and 8 bits and groups of 32, 64 and 128, each group with a
scale and a bias of 16 bits. Kinds that are affine in groups of 32 keep their integers; their grid is rounded
to 16 bits once. Kinds with groups of 16 or with a codebook have no equal and are fitted: the width is the
one with the least error that keeps the tensor within ``limits.GGUF_GROWTH`` of its size in the file.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fleetd.models.gguf import blocks
from fleetd.models.gguf.blocks import GROUP, Bytes, Floats
from fleetd.models.safetensors_write import DType

#: The dtype of scales, biases and everything that is not quantised.
HalfType = Literal["F16", "BF16"]
Halves = npt.NDArray[Any]
Order = npt.NDArray[np.intp] | None

# The exponent that means "not a number".
_NO_EXPONENT = 255
# Rounds of least squares, by bits. With 8 bits the whole range of a group is as good.
_FIT_ROUNDS = {3: 4, 4: 4, 5: 4, 6: 4, 8: 0}


class Packing(msgspec.Struct, frozen=True):
    """How MLX holds a tensor's weights."""

    # Bits of a weight.
    bits: int
    # Weights that share a scale.
    group: int
    # MLX's name: affine or mxfp4.
    mode: str = "affine"

    def settings(self) -> dict[str, Any]:
        """The settings as config.json has them."""
        found: dict[str, Any] = {"group_size": self.group, "bits": self.bits}
        return found if self.mode == "affine" else {**found, "mode": self.mode}

    def parts(self, dtype: HalfType) -> list[tuple[str, DType, float]]:
        """The stored arrays: name, dtype, and numbers of that dtype per weight."""
        words: tuple[str, DType, float] = ("weight", "U32", self.bits / 32)
        if self.mode == "mxfp4":
            return [words, ("scales", "U8", 1 / self.group)]
        return [words, ("scales", dtype, 1 / self.group), ("biases", dtype, 1 / self.group)]


_EXACT = {kind: Packing(bits, GROUP) for kind, bits in blocks.AFFINE_BITS.items()} | {
    "MXFP4": Packing(4, 32, "mxfp4")
}
_FITTED = {
    "Q2_K": Packing(3, 128),
    "Q3_K": Packing(4, 128),
    "Q6_K": Packing(8, 128),
    "IQ3_S": Packing(4, 128),
    "IQ4_NL": Packing(5, 64),
    "IQ4_XS": Packing(5, 128),
}
#: Used instead of ``_FITTED`` if a file has so much of the kind that it would grow by more than it may, and
#: for rows that are no multiple of the group.
_SMALLER = {"Q6_K": Packing(6, 32), "IQ4_NL": Packing(4, 32)}

#: Kinds whose weights stay quantised.
PACKED = frozenset(_EXACT) | frozenset(_FITTED)


def packing_of(kind: str, columns: int, *, small: bool = False) -> Packing:
    """How MLX holds a tensor of ``kind``.

    Args:
        columns: weights in a row, a multiple of 32.
        small: True if the size of the file matters more than the last bit of precision.
    """
    if (exact := _EXACT.get(kind)) is not None:
        return exact
    fitted = _FITTED[kind]
    return _SMALLER.get(kind, fitted) if small or columns % fitted.group else fitted


def is_exact(kind: str) -> bool:
    """True if the integers of the file are kept; False if the weights are fitted to another grid."""
    return kind in _EXACT


@np.errstate(over="ignore", invalid="ignore")  # the result is checked
def pack(
    kind: str, raw: Bytes, packing: Packing, dtype: HalfType, order: Order = None
) -> list[npt.NDArray[Any]]:
    """Rows of bytes as the arrays of ``packing.parts``.

    Args:
        order: the groups of 32 of a row in the order they are wanted; None as they are.

    Raises:
        ValueError: a scale is not a number that ``dtype`` can hold.
    """
    if packing.mode == "mxfp4":
        codes, exponents = blocks.mxfp4(raw)
        if (exponents == _NO_EXPONENT).any():
            raise ValueError("a scale is not a number")
        if order is not None:
            codes, exponents = codes[:, order], exponents[:, order]
        return [_words(codes.reshape(len(raw), -1), 4), exponents]
    if kind in blocks.AFFINE_BITS:
        q, scale, bias = blocks.affine(kind, raw)
        if order is not None:
            q, scale, bias = q[:, order], scale[:, order], bias[:, order]
        return [_words(q.reshape(len(raw), -1), packing.bits), half(scale, dtype), half(bias, dtype)]
    wide = blocks.values(kind, raw)
    if order is not None:
        wide = wide.reshape(len(raw), -1, GROUP)[:, order]
    fitted = _fit(wide.reshape(len(raw), -1, packing.group), packing.bits, dtype)
    return [_words(fitted[0].reshape(len(raw), -1), packing.bits), *fitted[1:]]


def _fit(wide: Floats, bits: int, dtype: HalfType) -> tuple[Bytes, Halves, Halves]:
    """The integers, scales and biases that are nearest to ``wide`` (rows, groups, group).

    The search begins with the whole range of each group. Each round fits the grid to the integers by least
    squares and keeps the result if it is nearer. The error is that of the grid after rounding.
    """
    if not np.isfinite(wide).all():
        raise ValueError("a weight is not a number")
    most = np.float32(2**bits - 1)
    least = wide.min(axis=-1, keepdims=True)
    mean = wide.mean(axis=-1, keepdims=True)
    best = _round_to(wide, (wide.max(axis=-1, keepdims=True) - least) / most, least, most, dtype)
    for _ in range(_FIT_ROUNDS[bits]):
        q, scale, bias, error = best
        centre = q.mean(axis=-1, keepdims=True)
        spread = ((q - centre) ** 2).sum(axis=-1, keepdims=True)
        slope = ((q - centre) * (wide - mean)).sum(axis=-1, keepdims=True) / np.maximum(spread, 1e-9)
        found = _round_to(wide, slope, mean - slope * centre, most, dtype)
        nearer = found[3] < error
        best = tuple(np.where(nearer, new, old) for new, old in zip(found, best, strict=True))  # type: ignore[assignment]
    q, scale, bias, _ = best
    return q.astype(np.uint8), half(scale[..., 0], dtype), half(bias[..., 0], dtype)


def _round_to(
    wide: Floats, scale: Floats, bias: Floats, most: np.float32, dtype: HalfType
) -> tuple[Floats, Floats, Floats, Floats]:
    """The integers on a grid of 16-bit numbers, the grid, and each group's squared error."""
    scale, bias = (unhalf(half(part, dtype), dtype) for part in (scale, bias))
    safe = np.where(scale == 0, np.float32(1), scale)
    q = np.clip(np.rint((wide - bias) / safe), 0, most)
    return q, scale, bias, ((q * scale + bias - wide) ** 2).sum(axis=-1, keepdims=True)


def _words(q: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Integers (rows, columns) as a stream of bits, the first lowest: (rows, columns · bits / 32)."""
    if bits == 8:
        stream = q
    else:
        size = math.lcm(bits, 8)  # bits of the fewest integers that fill whole bytes
        units = q.reshape(len(q), -1, size // bits)
        joined = np.zeros(units.shape[:2], np.uint64)
        for index in range(size // bits):
            joined |= units[..., index].astype(np.uint64) << np.uint64(index * bits)
        stream = joined.astype("<u8").view(np.uint8).reshape(*joined.shape, 8)[..., : size // 8]
    return np.ascontiguousarray(stream).reshape(len(q), -1).view("<u4")


def half(wide: Floats, dtype: HalfType) -> Halves:
    """f32 rounded to 16 bits, once, to nearest and half to even; BF16 as its bits.

    Raises:
        ValueError: a value is not a number, or is larger than the dtype holds.
    """
    if dtype == "F16":
        found: Halves = wide.astype(np.float16)
        fine = np.isfinite(found).all()
    else:
        bits = np.ascontiguousarray(wide, dtype=np.float32).view(np.uint32)
        found = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        fine = np.isfinite(wide).all() and ((found & 0x7F80) != 0x7F80).all()
    if not fine:
        raise ValueError(f"a number is not one that {dtype} can hold")
    return found


def unhalf(stored: Halves, dtype: HalfType) -> Floats:
    """The f32 that ``half`` rounded to."""
    if dtype == "F16":
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)
