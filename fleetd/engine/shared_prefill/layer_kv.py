"""Keys and values of single layers as plain memory: in caches, in frames, and between them.

Rows of a ``KVCache`` lie in one array per layer, (1, heads, room, width), with room for the whole prompt from
the start. Rows that come from another machine are read from the network straight into that memory: MLX gives
NumPy a view of it, and computes nothing from a layer while rows are still being written there. A cache that
rotates has no row per token, nor has a running state; they are sent whole.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from fleetd.engine.kv_caches import copy_on_write
from fleetd.engine.shared_prefill.kv_layout import KvLayout, KvShape, PartShape, RunningShape
from fleetd.engine.sparse_prefill.sparse_caches import SparseKV
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import Split, chunks

# uint8, as NumPy gives it; the buffer protocol is not in NumPy's types before Python 3.12.
_Bytes = Any


# ---- Arrays as bytes -------------------------------------------------------------------------------------


def as_bytes(array: mx.array) -> _Bytes:
    """An array's own memory, its last axis in bytes; evaluates it. Copied only where it is not contiguous."""
    return np.array(array.view(mx.uint8), copy=False)


def of_bytes(data: _Bytes, dtype: mx.Dtype) -> mx.array:
    """The array whose ``as_bytes`` this is; a copy."""
    return mx.array(data).view(dtype)


def empty_bytes(*shape: int) -> _Bytes:
    return np.empty(shape, dtype=np.uint8)


def pieces(data: _Bytes) -> list[memoryview]:
    """(heads, count, width) as one buffer where it is contiguous, else one per head.

    Rows that fill a whole array may lie there as they were computed, token by token over all heads: MLX then
    keeps the array it was given instead of copying it. Such are copied here.
    """
    parts = [data] if data.flags.c_contiguous else list(data)
    return [_buffer(part) for part in parts if part.size]


def _buffer(data: _Bytes) -> memoryview:
    whole: _Bytes = np.ascontiguousarray(data)
    return memoryview(whole).cast("B")


# ---- Caches with a row per token -------------------------------------------------------------------------


def empty(*, sparse: bool) -> KVCache:
    """``sparse``: for tokens at positions of their own."""
    return SparseKV() if sparse else KVCache()


def preallocated(
    shape: KvShape, tokens: int, prefix: KVCache | None = None, *, sparse: bool = False
) -> KVCache:
    """A cache with room for ``tokens`` in the steps in which mlx-lm makes room, ``prefix`` copied into it."""
    room = -(-max(tokens, 1) // KVCache.step) * KVCache.step
    cache = empty(sparse=sparse)
    cache.keys = mx.zeros((1, shape.heads, room, shape.key_width), shape.dtype)
    cache.values = mx.zeros((1, shape.heads, room, shape.value_width), shape.dtype)
    if prefix is not None and prefix.offset:
        cache.offset = prefix.offset
        cache.keys[..., : cache.offset, :] = prefix.keys[..., : cache.offset, :]
        cache.values[..., : cache.offset, :] = prefix.values[..., : cache.offset, :]
    mx.eval(cache.keys, cache.values)
    return cache


def truncated(cache: KVCache, tokens: int) -> KVCache:
    """The same rows, of which only the first ``tokens`` count; what is added to one is not in the other."""
    short = copy_on_write(cache)
    short.offset = tokens
    return short


class RowBuffer:
    """Memory for the rows that arrive: the preallocated cache itself.

    While a RowBuffer exists, MLX copies the whole array before it adds to it: drop it, and the buffers it
    gave, as soon as the rows have arrived. The cache is not read before.
    """

    __slots__ = ("_keys", "_values")

    def __init__(self, cache: KVCache) -> None:
        self._keys = as_bytes(cache.keys)[0]
        self._values = as_bytes(cache.values)[0]

    def rows(self, start: int, stop: int) -> list[memoryview]:
        """Buffers for keys, then values, of tokens [start, stop)."""
        return [
            memoryview(head[start:stop]).cast("B")
            for part in (self._keys, self._values)
            for head in part
            # An index of the context has keys only.
            if head.shape[-1]
        ]


def state(cache: Any) -> tuple[list[memoryview], tuple[int, int], int]:
    """The payload of a cache that is sent whole, with the ``sizes`` and the ``index`` of its frame."""
    if isinstance(cache, ArraysCache):
        found = [_buffer(as_bytes(mx.contiguous(array))) for array in cache.cache]
        return found, (sum(piece.nbytes for piece in found), 0), 0
    halves = [pieces(as_bytes(mx.contiguous(x))[0]) for x in (cache.keys, cache.values)]
    sizes = sum(p.nbytes for p in halves[0]), sum(p.nbytes for p in halves[1])
    return [piece for half in halves for piece in half], sizes, cache._idx


def rows(cache: KVCache, start: int, stop: int) -> list[memoryview]:
    """Keys, then values, of tokens [start, stop), not copied: nothing may be added to the cache any more."""
    return [
        piece for part in (cache.keys, cache.values) for piece in pieces(as_bytes(part)[0, :, start:stop])
    ]


def copied(cache: KVCache, start: int, stop: int) -> tuple[mx.array, mx.array]:
    """The same as arrays of their own, to be evaluated together with what they depend on."""
    return (
        mx.contiguous(cache.keys[..., start:stop, :]),
        mx.contiguous(cache.values[..., start:stop, :]),
    )


# ---- Caches that rotate ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RingState:
    """How far a cache has rotated: tokens seen, rows held, and where the next is written."""

    seen: int = 0
    held: int = 0
    index: int = 0

    @classmethod
    def of(cls, cache: RotatingKVCache) -> RingState:
        held = 0 if cache.keys is None else cache.keys.shape[2]
        return cls(cache.offset, held, cache._idx)

    def after(self, empty: RotatingKVCache, sizes: Iterable[int]) -> RingState:
        """After chunks of ``sizes`` more: mlx-lm's own cache tells, with rows of one number each."""
        shadow = copy.copy(empty)
        shadow.offset, shadow._idx = self.seen, self.index
        if self.held:
            shadow.keys = shadow.values = mx.zeros((1, 1, self.held, 1))
        for size in sizes:
            chunk = mx.zeros((1, 1, size, 1))
            shadow.update_and_fetch(chunk, chunk)
        return RingState.of(shadow)

    def row_of(self, token: int) -> int | None:
        """The row that holds ``token``, where rows are still in the order of their tokens; else None."""
        first = max(0, self.seen - self.held)
        ordered = self.index == min(self.held, self.seen)
        return token - first if ordered and token >= first else None


# The number of a cache: of its layer in the model, and of the part of what that keeps.
Place = tuple[int, int]


class LayersArrived:
    """How many layers frames are, where each frame is one of a layer's caches, in order."""

    def __init__(self, layout: KvLayout, layers: Iterable[int]) -> None:
        self._ends = list(itertools.accumulate((len(layout.parts(layer)) for layer in layers), initial=0))

    def after(self, frames: int) -> int:
        """Leading layers that are complete after so many frames."""
        return bisect_right(self._ends, frames) - 1


class States:
    """The caches without a row per token that come in frames. ``empty``: an unused cache for each of them.

    How far one that rotates must have rotated follows from the split.
    """

    def __init__(self, empty: Mapping[Place, Any], layout: KvLayout, split: Split) -> None:
        self._empty, self._layout, self._split = empty, layout, split
        self._starts: dict[Place, RingState] = {}
        self._known: dict[tuple[RingState, int, int], RingState] = {}

    def start(self, place: Place, cache: Any) -> None:
        """Set the cache before the new tokens; an empty one if this is not called."""
        if isinstance(cache, RotatingKVCache):
            self._starts[place] = RingState.of(cache)

    def received(self, frame: Frame) -> Any:
        """The cache that a frame brings."""
        place = frame.head.layer, frame.head.part
        shape = self._layout.parts(frame.head.layer)[frame.head.part]
        if isinstance(shape, RunningShape):
            return running(self._empty[place], shape, frame)
        return rotated(self._empty[place], shape, frame)

    def taken(self, frame: Frame) -> Any:
        """The same, checked to be a cache after the split's chunks of the frame's tokens."""
        cache = self.received(frame)
        if isinstance(cache, RotatingKVCache):
            self.check((frame.head.layer, frame.head.part), frame.head.end, cache)
        return cache

    def check(self, place: Place, stop: int, cache: RotatingKVCache) -> None:
        """Raises ProtocolError unless this is how the chunks of [cached, stop) leave the cache."""
        start, empty = self._starts.get(place, RingState()), self._empty[place]
        key = (start, empty.max_size, stop)
        if key not in self._known:
            sizes = [len(chunk) for chunk in chunks(range(self._split.cached, stop), self._split.chunk)]
            self._known[key] = start.after(empty, sizes)
        if RingState.of(cache) != self._known[key]:
            raise ProtocolError(
                f"Of layer {place[0]} came a cache that rotated otherwise than these tokens do."
            )


def state_buffers(shape: PartShape, head: FrameHeader) -> list[memoryview]:
    """Memory for a STATE: keys and values, or each array."""
    if isinstance(shape, RunningShape):
        return [
            memoryview(empty_bytes(math.prod(array) * dtype.size)).cast("B") for array, dtype in shape.arrays
        ]
    held = head.sizes[0] // shape.sizes(1)[0]
    return [
        memoryview(empty_bytes(shape.heads, held, width * shape.dtype.size)).cast("B")
        for width in (shape.key_width, shape.value_width)
    ]


def rotated(empty: RotatingKVCache, shape: KvShape, frame: Frame) -> RotatingKVCache:
    """The cache that a STATE frame, whose buffers are ``state_buffers``, was made from."""
    cache = copy.copy(empty)
    cache.offset, cache._idx = frame.head.count, frame.head.index
    held = frame.head.sizes[0] // shape.sizes(1)[0]
    cache.keys, cache.values = (
        of_bytes(
            np.frombuffer(buffer, dtype=np.uint8).reshape(1, shape.heads, held, width * shape.dtype.size),
            shape.dtype,
        )
        for buffer, width in zip(frame.buffers, (shape.key_width, shape.value_width), strict=True)
    )
    mx.eval(cache.keys, cache.values)
    return cache


def running(empty: ArraysCache, shape: RunningShape, frame: Frame) -> ArraysCache:
    """The running state that a STATE frame, whose buffers are ``state_buffers``, was made from."""
    cache = copy.deepcopy(empty)
    for index, ((array, dtype), buffer) in enumerate(zip(shape.arrays, frame.buffers, strict=True)):
        data = np.frombuffer(buffer, dtype=np.uint8).reshape(*array[:-1], array[-1] * dtype.size)
        cache[index] = of_bytes(data, dtype)
    mx.eval(cache.cache)
    return cache


# ---- Frames ----------------------------------------------------------------------------------------------


def buffers(head: FrameHeader, layout: KvLayout, row_buffers: Mapping[Place, RowBuffer]) -> list[memoryview]:
    """The memory for an expected frame's payload: rows to their places, all else to memory of its own."""
    match head.kind:
        case Kind.ROWS:
            return row_buffers[head.layer, head.part].rows(head.start, head.end)
        case Kind.STATE:
            return state_buffers(layout.parts(head.layer)[head.part], head)
        case _:
            return [memoryview(empty_bytes(head.nbytes))] if head.nbytes else []


# Where the exponent of a number has all its bits set, it is NaN or infinite.
_EXPONENTS: dict[mx.Dtype, tuple[Any, int]] = {
    mx.float32: (np.uint32, 0x7F800000),
    mx.float16: (np.uint16, 0x7C00),
    mx.bfloat16: (np.uint16, 0x7F80),
}


def finite(frame: Frame, layout: KvLayout) -> bool:
    """False if a frame of rows or hidden states holds a NaN or an infinite number."""
    match frame.head.kind:
        case Kind.ROWS | Kind.STATE:
            shape = layout.parts(frame.head.layer)[frame.head.part]
            dtypes = shape.dtypes(len(frame.buffers))
        case Kind.HIDDEN:
            dtypes = [layout.dtype] * len(frame.buffers)
        case _:
            return True
    return all(_finite(buffer, dtype) for buffer, dtype in zip(frame.buffers, dtypes, strict=True))


def _finite(buffer: memoryview, dtype: mx.Dtype) -> bool:
    if dtype not in _EXPONENTS:
        return True
    word, mask = _EXPONENTS[dtype]
    return int((np.frombuffer(buffer, word) & word(mask)).max(initial=0)) != mask


# ---- Hidden states ---------------------------------------------------------------------------------------


def hidden_payload(hidden: mx.array) -> memoryview:
    """(1, T, width) as its bytes; copied only where it is not contiguous."""
    return _buffer(as_bytes(hidden))


def hidden_of(frame: Frame, layout: KvLayout) -> mx.array:
    """(1, T, width) from a HIDDEN frame with one buffer."""
    data = np.frombuffer(frame.buffers[0], dtype=np.uint8)
    return of_bytes(data.reshape(1, frame.head.count, -1), layout.dtype)
