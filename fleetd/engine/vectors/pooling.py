"""From the states of a text's tokens to its vector: pooling, layers behind it, and the length.

In NumPy, text by text: what a text's numbers are depends on its own states alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from fleetd.engine.vectors.token_rows import Pass
from fleetd.models.vector_files import Pooling

F32 = npt.NDArray[np.float32]

# What a vector's length is held to be above: a model may give zeros.
_LEAST = np.float32(1e-12)


def host(rows: mx.array) -> F32:
    """The numbers, evaluated, as float32."""
    wide = rows if rows.dtype == mx.float32 else rows.astype(mx.float32)
    mx.eval(wide)
    return np.array(wide, copy=False)


def pooled(states: mx.array, texts: Pass, pooling: Pooling) -> F32:
    """One vector (n, width) for each text, of the states (T, width) of all of them."""
    match pooling:
        case "cls":
            return host(states[mx.array(texts.starts)])
        case "last":
            return host(states[mx.array(texts.ends) - 1])
        case "mean":
            return _of_each(host(states), texts, _mean)
        case "max":
            return _of_each(host(states), texts, lambda rows: np.maximum.reduce(rows, axis=0))


def _of_each(states: F32, texts: Pass, pool: Callable[[F32], F32]) -> F32:
    parts = [pool(states[start:end]) for start, end in zip(texts.starts, texts.ends, strict=True)]
    return np.stack(parts)


def _mean(rows: F32) -> F32:
    found: F32 = np.add.reduce(rows, axis=0) / np.float32(len(rows))
    return found


def one_long(vectors: F32) -> F32:
    """Each vector made one unit long."""
    lengths = np.sqrt(np.add.reduce(vectors * vectors, axis=-1, keepdims=True))
    found: F32 = np.divide(vectors, np.maximum(lengths, _LEAST), dtype=np.float32)
    return found


def shortened(vector: bytes, dimensions: int, *, normalized: bool) -> bytes:
    """The first ``dimensions`` numbers of a vector, one unit long again if the whole one is."""
    first = np.frombuffer(vector, np.dtype("<f4")).astype(np.float32)[None, :dimensions]
    return little_endian(one_long(first) if normalized else first)


def little_endian(vector: F32) -> bytes:
    return vector.astype("<f4").tobytes()


def sigmoid(logits: Sequence[float] | F32) -> list[float]:
    """Numbers from 0 to 1."""
    with np.errstate(over="ignore"):
        return [float(each) for each in 1 / (1 + np.exp(-np.asarray(logits, np.float64)))]
