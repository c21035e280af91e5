"""What stands between products, in NumPy: MLX computes each of these on a CPU as several operations, one
element at a time.

A row of a result depends on the same row of the arguments only, to the bit: sums run along rows that lie in
one piece.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def rms_norm(x: F32, weight: F32 | None, eps: float) -> F32:
    """x / sqrt(mean(x²) + eps) · weight, over the last axis."""
    # In one piece even if ``x`` is not: NumPy adds in another order over strides.
    out: F32 = np.empty(x.shape, dtype=np.float32)
    np.multiply(x, x, out=out)
    size = np.add.reduce(out, axis=-1, keepdims=True)
    size /= np.float32(x.shape[-1])
    size += np.float32(eps)
    np.sqrt(size, out=size)
    np.divide(x, size, out=out)
    if weight is not None:
        out *= weight
    return out


def swiglu(gate: F32, x: F32) -> F32:
    """silu(gate) · x, elementwise."""
    out: F32 = np.negative(gate)
    # exp overflows to inf for very negative gates, which is the right limit: silu → -0.
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1.0
    np.divide(gate, out, out=out)
    out *= x
    return out
