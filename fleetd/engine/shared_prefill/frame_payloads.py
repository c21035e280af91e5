"""The payloads of frames: rows to their places in caches, whole states, hidden states."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, empty_bytes, of_bytes
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.sequence_state.row_memory import RowBuffer
from fleetd.engine.sequence_state.shapes import PackedShape, RunningShape
from fleetd.engine.sequence_state.whole_states import rotated, running, state_buffers
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import Split

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
        if kind_of(cache).window(cache) is not None:
            self._starts[place] = RingState.of(cache)

    def received(self, frame: Frame) -> Any:
        """The cache that a frame brings."""
        place = frame.head.layer, frame.head.part
        shape = self._layout.parts(frame.head.layer)[frame.head.part]
        if isinstance(shape, RunningShape):
            return running(self._empty[place], shape, frame.buffers)
        return rotated(self._empty[place], shape, frame.head.count, frame.head.index, frame.buffers)

    def checked(self, frame: Frame) -> Any:
        """The same, checked to be a cache after the split's chunks of the frame's tokens."""
        cache = self.received(frame)
        if kind_of(cache).window(cache) is not None:
            self.check((frame.head.layer, frame.head.part), frame.head.end, cache)
        return cache

    def saved(self, frame: Frame) -> Any:
        """The same, of a cache as ``StateKind.saved`` gives it."""
        cache = self.received(frame)
        if kind_of(cache).window(cache) is not None:
            self.check((frame.head.layer, frame.head.part), frame.head.end, cache, saved=True)
        return cache

    def check(self, place: Place, stop: int, cache: Any, *, saved: bool = False) -> None:
        """Raises ProtocolError unless this is how the chunks of [cached, stop) leave the cache."""
        start, empty = self._starts.get(place, RingState(0, 0, 0)), self._empty[place]
        key = (start, empty.max_size, stop)
        if key not in self._known:
            sizes = [len(chunk) for chunk in self._split.chunks(range(self._split.cached, stop))]
            self._known[key] = start.after(empty, sizes)
        expected = self._known[key].saved(empty) if saved else self._known[key]
        if RingState.of(cache) != expected:
            raise ProtocolError(
                f"Of layer {place[0]} came a cache that rotated otherwise than these tokens do."
            )


def buffers(head: FrameHeader, layout: KvLayout, row_buffers: Mapping[Place, RowBuffer]) -> list[memoryview]:
    """The memory for an expected frame's payload: rows to their places, all else to memory of its own."""
    match head.kind:
        case Kind.ROWS:
            return row_buffers[head.layer, head.part].rows(head.start, head.end)
        case Kind.STATE:
            return state_buffers(layout.parts(head.layer)[head.part], head.sizes[0])
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
            if isinstance(shape, PackedShape):
                return _finite_packed(frame.buffers, shape)
            dtypes = shape.dtypes(len(frame.buffers))
        case Kind.HIDDEN:
            dtypes = [layout.dtype] * len(frame.buffers)
        case _:
            return True
    return all(_finite(buffer, dtype) for buffer, dtype in zip(frame.buffers, dtypes, strict=True))


def _finite_packed(buffers: Sequence[memoryview], shape: PackedShape) -> bool:
    """The same of rows that are held quantised, by their scales and biases. ``buffers``: a head's rows each,
    those of all heads' keys before those of their values."""
    packing = shape.packing
    widths = [packing.key_width, packing.value_width]
    each = [width for width in widths if width for _ in range(shape.heads)]
    for buffer, width in zip(buffers, each, strict=True):
        words = np.frombuffer(buffer, np.uint32).reshape(-1, packing.words(width))
        ends = words[:, words.shape[1] - packing.end_words(width) :]
        if not _finite(buffer_of(ends), packing.numbers):
            return False
    return True


def _finite(buffer: memoryview, dtype: mx.Dtype) -> bool:
    if dtype not in _EXPONENTS:
        return True
    word, mask = _EXPONENTS[dtype]
    return int((np.frombuffer(buffer, word) & word(mask)).max(initial=0)) != mask


def hidden_payload(hidden: mx.array) -> memoryview:
    """(1, T, width) as its bytes; copied only where it is not contiguous."""
    return buffer_of(as_bytes(hidden))


def hidden_of(frame: Frame, layout: KvLayout) -> mx.array:
    """(1, T, width) from a HIDDEN frame with one buffer."""
    data = np.frombuffer(frame.buffers[0], dtype=np.uint8)
    return of_bytes(data.reshape(1, frame.head.count, -1), layout.dtype)
