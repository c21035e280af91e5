"""Rotary position embedding from tables of cosines and sines, with the bits of ``mx.fast.rope``."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

# Positions that a table has at least.
_LEAST = 1024
# Kinds of rotation that are remembered: a model has one or two.
_KINDS = 16


@lru_cache(_KINDS)
def rotation(dims: int, traditional: bool, base: float | None, scale: float, freqs: bytes | None) -> Rotation:
    """The rotation of ``mx.fast.rope``'s arguments, ``freqs`` as f32. Layers share its tables."""
    if freqs is not None:
        turns = mx.reciprocal(mx.array(np.frombuffer(freqs, dtype=np.float32)))
    else:
        steps = mx.arange(0, -(dims // 2), -1, dtype=mx.float32)
        turns = mx.exp(steps * mx.array(math.log(base or 1) / (dims // 2), dtype=mx.float32))
    # Here and not at the first use, which may be in another thread: MLX would not know where to compute it.
    mx.eval(turns)
    return Rotation(turns, scale, neighbours=traditional)


class Rotation:
    """Rotates pairs of a row's first elements by angles that grow with its position.

    Args:
        turns: (pairs,), the angle of each at position 1.
        scale: of positions.
        neighbours: pairs are elements 0 and 1, 2 and 3, ...; else element i of each half.
    """

    def __init__(self, turns: mx.array, scale: float, *, neighbours: bool) -> None:
        half = turns.size
        self._turns, self._scale = turns, scale
        self._dims = 2 * half
        # A row as pairs, and its axis that has the two of each.
        self._pairs, self._axis = ((half, 2), -1) if neighbours else ((2, half), -2)
        # (positions, *pairs): factors of an element, and of the other one of its pair.
        self._own = self._other = np.empty((0, *self._pairs), dtype=np.float32)

    def __call__(self, x: F32, offset: int | npt.NDArray[np.integer[Any]]) -> F32 | None:
        """Rotate x (B, H, T, D), the first of T at position ``offset``: of all B, or (B,) one each.

        None for positions before 0.
        """
        n = x.shape[2]
        at: Any
        if isinstance(offset, int) or offset.size == 1:
            first = last = offset if isinstance(offset, int) else int(offset.item())
            at = slice(first, first + n)
        else:
            first, last = int(offset.min()), int(offset.max())
            at = offset.reshape(-1, 1, 1) + np.arange(n)
        if first < 0:
            return None
        self._reach(last + n)
        out: F32 = np.empty(x.shape, dtype=np.float32)
        turned, rest = x[..., : self._dims], x[..., self._dims :]
        if rest.size:
            out[..., self._dims :] = rest
        shape = (*x.shape[:3], *self._pairs)
        pairs, rotated = turned.reshape(shape), out[..., : self._dims].reshape(shape)
        np.multiply(pairs, self._own[at], out=rotated)
        rotated += (pairs[..., ::-1] if self._axis == -1 else pairs[..., ::-1, :]) * self._other[at]
        return out

    def _reach(self, positions: int) -> None:
        """Let the tables have at least so many positions."""
        if positions <= len(self._own):
            return
        count = max(_LEAST, 1 << (positions - 1).bit_length())
        # As MLX computes them: in f32.
        places = mx.arange(count, dtype=mx.float32) * mx.array(self._scale, dtype=mx.float32)
        angles = places[:, None] * self._turns
        cos, sin = np.array(mx.cos(angles)), np.array(mx.sin(angles))
        # The table that is asked for its length comes last: other threads may rotate meanwhile.
        self._other = np.stack([-sin, sin], axis=self._axis)
        self._own = np.stack([cos, cos], axis=self._axis)
