"""Rows of keys or values quantised to 8 or 4 bits, each row as one array of 32-bit words.

    row of ``width`` numbers ─► width * bits / 32 words of packed numbers, then the groups' scales and biases

MLX's affine quantisation: in each group of numbers ``x ≈ scale * q + bias``. A row is quantised alone, so it
has the same words however many are quantised at once. As one array of words it is moved, cut, stored and sent
like any other row.
"""

from __future__ import annotations

import mlx.core as mx
import msgspec

# Numbers that share a scale and a bias: the largest that divides a row.
_GROUPS = (64, 32)
_WORD_BITS = 32
_WORD = mx.uint32
_DTYPES = ("float32", "float16", "bfloat16")


class RowPacking(msgspec.Struct, frozen=True):
    """How rows of ``key_width`` and ``value_width`` numbers of ``dtype`` ("bfloat16") are quantised."""

    bits: int
    key_width: int
    value_width: int
    dtype: str

    @classmethod
    def of(cls, bits: int, key_width: int, value_width: int, dtype: mx.Dtype) -> RowPacking | None:
        """None if such rows cannot be quantised: their widths are no multiples of a group."""
        name = str(dtype).removeprefix("mlx.core.")
        if not bits or name not in _DTYPES or key_width % _GROUPS[-1] or value_width % _GROUPS[-1]:
            return None
        return cls(bits, key_width, value_width, name)

    @property
    def numbers(self) -> mx.Dtype:
        """The type of the numbers that were quantised."""
        found: mx.Dtype = getattr(mx, self.dtype)
        return found

    def words(self, width: int) -> int:
        """32-bit words of a row of ``width`` numbers."""
        return self._packed_words(width) + self.end_words(width)

    def end_words(self, width: int) -> int:
        """Those of them, the last ones, that hold scales and biases."""
        return 2 * self._groups(width) * int(self.numbers.size) * 8 // _WORD_BITS

    def _packed_words(self, width: int) -> int:
        return width * self.bits // _WORD_BITS

    @staticmethod
    def _groups(width: int) -> int:
        return width // _group(width)

    def pack(self, rows: mx.array) -> mx.array:
        """(…, width) numbers to (…, words)."""
        width = rows.shape[-1]
        if not width:
            return mx.zeros(rows.shape, _WORD)
        packed, scales, biases = mx.quantize(
            rows.astype(self.numbers), group_size=_group(width), bits=self.bits
        )
        return mx.concatenate([packed, mx.concatenate([scales, biases], axis=-1).view(_WORD)], axis=-1)

    def unpack(self, words: mx.array, width: int) -> mx.array:
        """(…, words) to (…, width) numbers."""
        if not width:
            return mx.zeros(words.shape, self.numbers)
        groups, ends = self._groups(width), self.ends(words, width)
        return mx.dequantize(
            words[..., : self._packed_words(width)],
            scales=ends[..., :groups],
            biases=ends[..., groups:],
            group_size=_group(width),
            bits=self.bits,
        )

    def ends(self, words: mx.array, width: int) -> mx.array:
        """(…, words) to (…, 2 * groups): the scales, then the biases, of rows of ``width`` numbers."""
        return words[..., self._packed_words(width) :].view(self.numbers)


def _group(width: int) -> int:
    return next(group for group in _GROUPS if width % group == 0)
