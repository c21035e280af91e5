"""What each layer of a model keeps of a prompt: shapes and sizes, known before any prompt is read.

A layer keeps one cache, several, or none: these are its parts. A part either has a row per token or is of a
fixed kind: a window that rotates, or the arrays of a running state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache

from fleetd.engine.layer_calls import parts
from fleetd.engine.stage import Stage


@dataclass(frozen=True, slots=True)
class KvShape:
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

    def sizes(self, rows: int) -> tuple[int, int]:
        """Bytes of the keys and of the values of ``rows`` tokens."""
        one = self.heads * rows * self.dtype.size
        return one * self.key_width, one * self.value_width

    def dtypes(self, buffers: int) -> list[mx.Dtype]:
        """Of a frame's ``buffers``."""
        return [self.dtype] * buffers


@dataclass(frozen=True, slots=True)
class RunningShape:
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
        """Of a frame's ``buffers``: one for each array."""
        return [dtype for _, dtype in self.arrays]


PartShape = KvShape | RunningShape


def _shape_of(part: Any) -> PartShape:
    if isinstance(part, ArraysCache):
        return RunningShape(tuple((tuple(array.shape), array.dtype) for array in part.cache))
    return KvShape(
        heads=part.keys.shape[1],
        key_width=part.keys.shape[3],
        value_width=part.values.shape[3],
        dtype=part.keys.dtype,
        window=part.max_size if isinstance(part, RotatingKVCache) else 0,
    )


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The caches of layers ``first`` and following, and the hidden states between them, (B, T, width)."""

    first: int
    layers: tuple[tuple[PartShape, ...], ...]
    width: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, stage: Stage) -> KvLayout:
        """Found out by running one hidden state through the layers; costs what a token costs."""
        stage = stage.prefilling
        if stage.first == 0:
            hidden = stage.embed(mx.array([[0]]))
        else:
            hidden = mx.zeros((1, 1, int(stage.args.hidden_size)), _float_dtype(stage))
        caches = stage.make_caches()
        out = stage.run(hidden, caches, stage.inputs(mx.array([[0]]), 0))
        mx.eval(arrays(caches), out)
        shapes = tuple(tuple(_shape_of(part) for part in parts(cache)) for cache in caches)
        return cls(stage.first, shapes, int(out.shape[-1]), out.dtype)

    def parts(self, layer: int) -> tuple[PartShape, ...]:
        """The shapes of what a layer keeps, by its number in the whole model."""
        return self.layers[layer - self.first]

    def keeps_states(self, layers: Iterable[int]) -> bool:
        """True if one of these layers keeps anything without a row per token: it cannot be cut at a token."""
        return any(not shape.in_rows for index in layers for shape in self.parts(index))

    @property
    def state_bytes(self) -> int:
        """Bytes that the layers keep whatever a prompt's length: running states."""
        return sum(shape.nbytes for each in self.layers for shape in each if isinstance(shape, RunningShape))

    def hidden_bytes(self, tokens: int) -> int:
        return tokens * self.width * int(self.dtype.size)


def _float_dtype(stage: Stage) -> mx.Dtype:
    """In which most of the weights that are not packed integers are kept."""
    nbytes: dict[mx.Dtype, int] = {}
    for _, array in tree_flatten(stage.weights.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            nbytes[array.dtype] = nbytes.get(array.dtype, 0) + array.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype])


def arrays(caches: Iterable[Any]) -> list[mx.array]:
    """All arrays of some layers' caches."""
    found: list[mx.array] = []
    for cache in caches:
        for part in parts(cache):
            found.extend(part.cache if isinstance(part, ArraysCache) else (part.keys, part.values))
    return [array for array in found if array is not None]


def assembled(empty: Any, kept: Sequence[Any]) -> Any:
    """A layer's cache of the same kind as ``empty``, as its model takes it, of its parts."""
    if isinstance(empty, CacheList):
        return CacheList(*kept)
    return kept[0] if kept else None
