"""What a model keeps of a prompt as blocks of rows and as snapshots, with headers that are checked.

A block holds the rows of its tokens, of all layers that have rows. What cannot be cut at a token is in a
snapshot of its own, taken at the end of a block: rows of windows, and how far these have rotated; arrays of
running states. Rows lie in the caches' own memory on both sides; a snapshot is read into memory of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import msgspec

from fleetd import limits
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, empty_bytes
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts, assembled, parts
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.sequence_state.row_memory import RowBuffer
from fleetd.engine.sequence_state.shapes import AnyShape, KvShape, QuantisedShape, RowShape, RunningShape
from fleetd.engine.sequence_state.whole_states import rotated, running
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import from_msgpack

_BLOCK = limits.CACHE_BLOCK_TOKENS
# The longest way to write how far one window has rotated.
_RING_BYTES = len(msgspec.msgpack.encode(RingState(*[limits.CACHE_TOKENS] * 3)))
# The head of a list.
_LIST_BYTES = 5


def can_be_blocks(empty: Sequence[Any]) -> bool:
    """True if all that a model with these caches keeps can be written."""
    found = all_parts(empty)
    return bool(found) and all(kind_of(part).stored for part in found)


def can_be_checked(empty: Sequence[Any]) -> bool:
    """True if what another machine sends of such caches can be compared with what is computed here."""
    found = all_parts(empty)
    # A window that keeps its first rows has others in between, as its chunks were cut.
    return can_be_blocks(empty) and all(
        kind_of(part).shared and not getattr(part, "keep", 0) for part in found
    )


def block_rows(buffers: Sequence[RowBuffer], number: int) -> list[memoryview]:
    """The memory of a block's rows."""
    return [row for buffer in buffers for row in buffer.rows(number * _BLOCK, (number + 1) * _BLOCK)]


class BlockLayout(msgspec.Struct, frozen=True, dict=True):
    """``layers``: the shapes of the parts of what each layer keeps."""

    layers: tuple[tuple[AnyShape, ...], ...]

    @classmethod
    def of(cls, cache: Sequence[Any]) -> BlockLayout:
        """The layout of caches that are not empty. Raises TypeError if one of them cannot be written."""
        return cls(tuple(tuple(kind_of(part).shape(part) for part in parts(layer)) for layer in cache))

    @cached_property
    def _shapes(self) -> list[AnyShape]:
        return [shape for layer in self.layers for shape in layer]

    @cached_property
    def rows(self) -> list[RowShape]:
        """The shapes of all parts that have a row per token, in order."""
        shapes = (shape for shape in self._shapes if not isinstance(shape, RunningShape))
        return [shape for shape in shapes if shape.in_rows]

    @cached_property
    def states(self) -> list[KvShape | RunningShape]:
        """The shapes of all other parts, in order."""
        shapes = (shape for shape in self._shapes if not isinstance(shape, QuantisedShape))
        return [shape for shape in shapes if not shape.in_rows]

    @cached_property
    def _digest(self) -> str:
        """Equal for equal layouts."""
        return hashlib.sha256(repr(self.layers).encode()).hexdigest()[:32]

    @cached_property
    def _rings_bytes(self) -> int:
        """The most that the states of all windows take, as a snapshot has them."""
        return _LIST_BYTES + _RING_BYTES * sum(isinstance(shape, KvShape) for shape in self.states)

    @cached_property
    def most_snapshot_bytes(self) -> int:
        """The most bytes of a snapshot. Windows that keep no first rows have no more rows than the window."""
        states = [s.nbytes if isinstance(s, RunningShape) else sum(s.sizes(s.window)) for s in self.states]
        return self._rings_bytes + sum(states)

    def in_rows(self, cache: Sequence[Any]) -> list[Any]:
        """The parts of a cache that have rows, in order."""
        return [part for part, shape in zip(all_parts(cache), self._shapes, strict=True) if shape.in_rows]

    def header(self, number: int) -> BlockHeader:
        """The header of block ``number``: each array's heads, array by array, part by part."""
        sizes = []
        for shape in self.rows:
            for width, dtype in shape.row_arrays:
                if width:
                    sizes += [_BLOCK * width * dtype.size] * shape.heads
        return BlockHeader(f"rows {self._digest}", (number + 1) * _BLOCK, sizes)

    def snapshot(self, saved: Sequence[Any], tokens: int) -> tuple[BlockHeader, list[memoryview]]:
        """What ``checkpoints.saved`` gave after ``tokens``, evaluated, as a header and its payload."""
        each = (part for layer in saved for part in (layer if isinstance(layer, list) else [layer]))
        rings, buffers = [], []
        for part, shape in zip((part for part in each if part is not None), self.states, strict=True):
            arrays = kind_of(part).arrays(part)
            buffers += [buffer_of(as_bytes(mx.contiguous(array))) for array in arrays]
            if isinstance(shape, KvShape):
                rings.append(RingState.of(part))
        buffers.insert(0, memoryview(msgspec.msgpack.encode(rings)))
        return self._snapshot_header(tokens, [len(buffer) for buffer in buffers]), buffers

    def _snapshot_header(self, tokens: int, sizes: list[int]) -> BlockHeader:
        return BlockHeader(f"states {self._digest}", tokens, sizes)

    def check_snapshot(self, header: BlockHeader, tokens: int) -> None:
        """Raises BlockDamaged unless a snapshot of such a model after ``tokens`` has this header."""
        sizes, count = header.sizes[1:], sum(_arrays(shape) for shape in self.states)
        if header != self._snapshot_header(tokens, header.sizes) or len(sizes) != count:
            raise BlockDamaged("a snapshot of another layout")
        if header.sizes[0] > self._rings_bytes:
            raise BlockDamaged("a snapshot of more windows")
        for shape in self.states:
            own, sizes = sizes[: _arrays(shape)], sizes[_arrays(shape) :]
            if isinstance(shape, RunningShape):
                fits = own == [math.prod(array) * dtype.size for array, dtype in shape.arrays]
            else:
                held = own[0] // shape.sizes(1)[0]
                # With room to grow, which is never more than the window.
                fits = tuple(own) == shape.sizes(held)
                fits = fits and min(tokens, shape.window) <= held <= max(tokens, shape.window)
            if not fits:
                raise BlockDamaged("a snapshot of other shapes")


def _arrays(shape: KvShape | RunningShape) -> int:
    return len(shape.arrays) if isinstance(shape, RunningShape) else len(shape.row_arrays)


class ArrivingSnapshot:
    """Memory for a snapshot after ``tokens``, and the caches that it becomes."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self.tokens = 0
        self._buffers: list[memoryview] = []

    def targets(self, number: int, header: BlockHeader) -> list[memoryview]:
        """Buffers for the snapshot at the end of block ``number``. Raises BlockDamaged for another header."""
        self.tokens = (number + 1) * _BLOCK
        self._layout.check_snapshot(header, self.tokens)
        self._buffers = [memoryview(empty_bytes(size)).cast("B") for size in header.sizes]
        return self._buffers

    def check(self) -> None:
        """Raises BlockDamaged unless what has come is a snapshot."""
        self._rings()

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self._buffers)

    def _rings(self) -> list[RingState]:
        try:
            rings = from_msgpack(self._buffers[0], list[RingState])
        except UNREADABLE as error:
            raise BlockDamaged(str(error)) from error
        at, windows = 1, []
        for shape in self._layout.states:
            if isinstance(shape, KvShape):
                windows.append(len(self._buffers[at]) // shape.sizes(1)[0])
            at += _arrays(shape)
        fits = [
            ring.held == held and ring.seen == self.tokens and 0 < ring.index <= held
            for ring, held in zip(rings, windows, strict=False)
        ]
        if len(rings) != len(windows) or not all(fits):
            raise BlockDamaged("a window that rotated otherwise")
        return rings

    def cache(self, empty: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """The whole, each layer as its model takes it.

        Args:
            empty: caches of the model in which nothing is.
            rows: those that have rows, in order, of as many tokens as the snapshot.
        """
        rings = iter(self._rings()) if self._layout.states else iter(())
        buffers, in_rows = iter(self._buffers[1:]), iter(rows)
        found = []
        for layer, shapes in zip(empty, self._layout.layers, strict=True):
            kept = []
            for part, shape in zip(parts(layer), shapes, strict=True):
                if isinstance(shape, RunningShape):
                    kept.append(running(part, shape, [next(buffers) for _ in shape.arrays]))
                elif isinstance(shape, QuantisedShape) or shape.in_rows:
                    kept.append(next(in_rows))
                else:
                    ring, own = next(rings), [next(buffers), next(buffers)]
                    kept.append(rotated(part, shape, ring.seen, ring.index, own))
            found.append(assembled(layer, kept))
        return found
