"""MLX's affine weights as a matrix for products in int8: scale · q + bias becomes scale · (q - zero)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from fleetd.engine.cpu.arithmetic import Kernel
from fleetd.engine.cpu.dequantize import unpack
from fleetd.engine.cpu.packed_product import Packed

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

# How far a bias may be from a multiple of its scale, as a share of itself, if rounding both to their type
# made it so.
_ROUNDING = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-22}


@dataclass(frozen=True, slots=True)
class Affine:
    """Weights as MLX packs them; one matrix, or several of the same shape along a first axis."""

    # (..., N, bytes): integers as a stream of bits, the first lowest.
    weights: U8
    # (..., N, groups), both.
    scales: F32
    biases: F32
    bits: int
    # Weights of a row that share a scale and a bias.
    group: int
    # A key of ``_ROUNDING``.
    dtype: Any

    @classmethod
    def of(cls, layer: Any) -> Affine:
        """The weights of a layer whose parameters are evaluated; shares their memory."""
        scales, biases = (np.array(layer[part].astype(mx.float32)) for part in ("scales", "biases"))
        weights = np.ascontiguousarray(np.array(layer.weight, copy=False)).view(np.uint8)
        return cls(weights, scales, biases, layer.bits, layer.group_size, layer.scales.dtype)

    def __getitem__(self, index: int) -> Affine:
        """One of several matrices."""
        return replace(
            self, weights=self.weights[index], scales=self.scales[index], biases=self.biases[index]
        )

    def packed(self, kernel: Kernel) -> Packed:
        """The same for a kernel.

        Where a bias is a whole number of scales, as MLX's quantisation makes it, that is a zero point. Where
        some are not, what is left of them, at most half a scale as a rule, is added for each group.
        """
        most = 2**kernel.bits - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            zeros = np.clip(np.rint(np.nan_to_num(-self.biases / self.scales)), 0, most).astype(np.float32)
        rest = self.biases + zeros * self.scales
        exact = bool((np.abs(rest) <= _ROUNDING[self.dtype] * np.abs(self.biases)).all())
        repeats = self.group // kernel.block
        scales, zeros = (np.repeat(each, repeats, axis=1) for each in (self.scales, zeros))
        weights = self.weights
        if self.bits != kernel.bits:
            q = np.empty((len(weights), weights.shape[1] * 8 // self.bits), dtype=np.float32)
            unpack(weights, self.bits, q)
            weights = _fields(q.astype(np.uint8), kernel.bits)
        return Packed(
            kernel,
            weights.reshape(*scales.shape, -1),
            scales,
            _fields(zeros.astype(np.uint8), kernel.bits),
            None if exact else np.ascontiguousarray(rest.T),
        )


def _fields(q: U8, bits: int) -> U8:
    """Integers (N, count) in bytes, of 4 bits two in each, the first lowest."""
    if bits == 8:
        return q
    if q.shape[1] % 2:
        q = np.pad(q, ((0, 0), (0, 1)))
    return np.asarray(q[:, ::2] | q[:, 1::2] << 4, dtype=np.uint8)
