"""Shapes and sizes of what a layer keeps: known before any prompt is read.

A layer keeps one cache, several, or none: these are its parts. A part either has a row per token or is of a
fixed kind: a window that rotates, or the arrays of a running state.
"""

from __future__ import annotations

import math

import mlx.core as mx
import msgspec

from fleetd.engine.sequence_state.row_packing import RowPacking


class KvShape(msgspec.Struct, frozen=True):
    """Per token ``heads`` keys and values of these widths; ``window`` 0 keeps them all."""

    heads: int
    key_width: int
    value_width: int
    dtype: mx.Dtype
    window: int = 0

    @property
    def in_rows(self) -> bool:
        return not self.window

    @property
    def state_sizes(self) -> None:
        return None

    @property
    def row_arrays(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Width and type of each array of rows."""
        return (self.key_width, self.dtype), (self.value_width, self.dtype)

    def sizes(self, rows: int) -> tuple[int, int]:
        """Bytes of the keys and of the values of ``rows`` tokens."""
        one = self.heads * rows * self.dtype.size
        return one * self.key_width, one * self.value_width

    def dtypes(self, buffers: int) -> list[mx.Dtype]:
        """The dtypes of a frame's ``buffers``."""
        return [self.dtype] * buffers


class PackedShape(KvShape, frozen=True, kw_only=True):
    """Rows that are held quantised: widths and ``dtype`` are those of the words, ``packing`` says of which
    numbers they are."""

    packing: RowPacking

    @classmethod
    def of(cls, heads: int, packing: RowPacking) -> PackedShape:
        widths = packing.words(packing.key_width), packing.words(packing.value_width)
        return cls(heads, *widths, mx.uint32, packing=packing)


class QuantisedShape(msgspec.Struct, frozen=True):
    """Per token ``heads`` rows in each of these arrays: packed numbers, scales and biases of keys, then of
    values. Such rows are kept on a disk, and are not handed over."""

    heads: int
    row_arrays: tuple[tuple[int, mx.Dtype], ...]
    group_size: int
    bits: int

    in_rows = True


class RunningShape(msgspec.Struct, frozen=True):
    """The arrays of a running state, with their batch of one: as large after one token as after many."""

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype], ...]

    in_rows = False

    @property
    def state_sizes(self) -> tuple[int, int]:
        return self.nbytes, 0

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.size for shape, dtype in self.arrays)

    def sizes(self, rows: int) -> tuple[int, int]:
        """It has no rows."""
        return 0, 0

    def dtypes(self, buffers: int) -> list[mx.Dtype]:
        """The dtypes of a frame's ``buffers``: one for each array."""
        return [dtype for _, dtype in self.arrays]


RowShape = KvShape | QuantisedShape
PartShape = KvShape | RunningShape
AnyShape = PartShape | QuantisedShape
