"""What crosses each stream of a shared prefill, in which order: the same list at both ends.

Pure. A sender takes its heads from here and a receiver refuses every other, so that neither has to trust the
other for where a number belongs. With C chunks, L the helper's layers, [a, b) its tokens:

    home → helper      TOKENS, then per cache ROWS of [warm, cached), or STATE; it has the rows before warm
    layers: helper → home       per chunk, per cache with a row per token ROWS; then SNAPSHOTs, where some are
                                due; at the end per other cache STATE; DONE
            helper → next       per chunk HIDDEN
    tokens: helper → home       per layer: SNAPSHOTs; per cache ROWS of [a, b) or STATE; DONE
            helper → next       per cache ROWS of [cached, b) or STATE

A SNAPSHOT is the STATE of an earlier token. After the split's places, every cache without a row per token has
one: home keeps them for prompts that go on from there. Before the last chunk running states have one: from
it home can compute that chunk again (``state_check``).
Most layers have one cache; some have several, or none. The size of a cache that rotates depends on how it was
filled, so the head of its STATE says it within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from fleetd.engine.streams.frames import NO_PREFIX, Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import TOKEN_BYTES, Split, SplitKind, WarmRows, prefix_hashes

# A cache that rotates makes room in steps of this many rows, as mlx-lm has it.
_STEP = 256


class _Shape(Protocol):
    @property
    def in_rows(self) -> bool:
        """True if a token is a row, and more tokens are more rows."""

    @property
    def state_sizes(self) -> tuple[int, int] | None:
        """``FrameHeader.sizes`` of a STATE, where that is always the same."""

    def sizes(self, rows: int) -> tuple[int, int]: ...


class Sizes(Protocol):
    """What has to be known of a model: ``kv_layout.KvLayout``."""

    def parts(self, layer: int) -> Sequence[_Shape]:
        """The caches of a layer, in order."""

    def hidden_bytes(self, tokens: int) -> int: ...


# ---- The streams -----------------------------------------------------------------------------------------

HOME, IN, OUT = "home", "in", "out"


def helper_name(rank: int) -> str:
    """Name of the home worker's stream to helper ``rank``."""
    return f"helper{rank}"


def home_streams(split: Split) -> list[str]:
    """The streams that the home worker needs before it can begin."""
    names = [helper_name(rank) for rank in range(split.helpers)]
    return [*names, IN] if split.has_next(split.helpers - 1) else names


def helper_streams(split: Split, rank: int) -> list[str]:
    """The streams that helper ``rank`` needs before it can begin."""
    return [HOME, *([IN] if rank else []), *([OUT] if split.has_next(rank) else [])]


# ---- The lists -------------------------------------------------------------------------------------------


def to_helper(split: Split, rank: int, sizes: Sizes, warm: WarmRows | None = None) -> Iterator[FrameHeader]:
    """The frames from home to helper ``rank``, which has the rows ``warm`` already."""
    yield FrameHeader(Kind.TOKENS, 0, 0, split.tokens, (TOKEN_BYTES * split.tokens, 0))
    if split.cached:
        for layer in split.layers_of(rank):
            there = 0 if warm is None else warm.of(layer)
            heads = _kept(layer, there, split.cached, sizes)
            yield from (head for head in heads if head.count or not _is_rows(head))


def to_home(split: Split, rank: int, sizes: Sizes) -> Iterator[FrameHeader]:
    """The frames from helper ``rank`` to home."""
    yield from _FRAMES[split.kind].to_home(split, rank, sizes)
    yield FrameHeader(Kind.DONE, 0, 0, split.tokens_of(rank).stop)


def to_next(split: Split, rank: int, sizes: Sizes) -> Iterator[FrameHeader]:
    """The frames from helper ``rank`` to the next machine; none if ``split.has_next`` is False."""
    if split.has_next(rank):
        yield from _FRAMES[split.kind].to_next(split, rank, sizes)


class _LayersFrames:
    """Frames of helpers that run some layers, chunk after chunk."""

    @staticmethod
    def to_home(split: Split, rank: int, sizes: Sizes) -> Iterator[FrameHeader]:
        layers, snapshots = split.layers_of(rank), split.states_of(rank)
        for chunk in split.chunks_of(rank):
            for layer in layers:
                yield from (head for head in _kept(layer, chunk.start, chunk.stop, sizes) if _is_rows(head))
            if chunk.stop in snapshots:
                for layer in layers:
                    yield from _snapshots(layer, chunk.stop, split, sizes)
        for layer in layers:
            yield from (head for head in _kept(layer, 0, split.tokens, sizes) if not _is_rows(head))

    @staticmethod
    def to_next(split: Split, rank: int, sizes: Sizes) -> Iterator[FrameHeader]:
        layer = split.layers_of(rank).stop
        for chunk in split.chunks_of(rank):
            n_bytes = sizes.hidden_bytes(len(chunk))
            yield FrameHeader(Kind.HIDDEN, layer, chunk.start, len(chunk), (n_bytes, 0))


class _TokensFrames:
    """Frames of helpers that run some tokens, layer after layer."""

    @staticmethod
    def to_home(split: Split, rank: int, sizes: Sizes) -> Iterator[FrameHeader]:
        own, snapshots = split.tokens_of(rank), split.states_of(rank)
        for layer in split.layers_of(rank):
            for tokens in snapshots:
                yield from _snapshots(layer, tokens, split, sizes)
            yield from _kept(layer, own.start, own.stop, sizes)

    @staticmethod
    def to_next(split: Split, rank: int, sizes: Sizes) -> Iterator[FrameHeader]:
        for layer in split.layers_of(rank):
            yield from _kept(layer, split.cached, split.tokens_of(rank).stop, sizes)


_FRAMES: dict[SplitKind, type[_LayersFrames | _TokensFrames]] = {
    "layers": _LayersFrames,
    "tokens": _TokensFrames,
}


def _kept(layer: int, start: int, stop: int, sizes: Sizes) -> Iterator[FrameHeader]:
    """A layer's caches of tokens [start, stop), or of all before ``stop`` where a token is not a row."""
    for part, shape in enumerate(sizes.parts(layer)):
        if shape.in_rows:
            yield FrameHeader(Kind.ROWS, layer, start, stop - start, shape.sizes(stop - start), part=part)
        else:
            yield FrameHeader(Kind.STATE, layer, 0, stop, shape.state_sizes or (0, 0), part=part)


def _snapshots(layer: int, tokens: int, split: Split, sizes: Sizes) -> Iterator[FrameHeader]:
    for part in snapshot_parts(layer, tokens, split, sizes):
        state_sizes = sizes.parts(layer)[part].state_sizes or (0, 0)
        yield FrameHeader(Kind.STATE, layer, 0, tokens, state_sizes, part=part)


def snapshot_parts(layer: int, tokens: int, split: Split, sizes: Sizes) -> list[int]:
    """The caches of a layer that have a SNAPSHOT after ``tokens``, one of ``Split.states_of``."""
    shapes = enumerate(sizes.parts(layer))
    if tokens in split.sent_places:
        return [part for part, shape in shapes if not shape.in_rows]
    # A window's last tokens can be checked without.
    return [part for part, shape in shapes if shape.state_sizes is not None]


def _is_rows(head: FrameHeader) -> bool:
    return head.kind is Kind.ROWS


def prefixes(split: Split, tokens: bytes) -> dict[int, bytes]:
    """The hash of the tokens before each frame's end; ``tokens`` as a TOKENS frame has them."""
    ends = {split.cached, split.tokens}
    for machine in range(split.machines):
        ends.update(chunk.stop for chunk in split.chunks_of(machine))
    return prefix_hashes(tokens, sorted(ends))


# ---- The two ends ----------------------------------------------------------------------------------------


class Outgoing:
    """The sending end: hands out the heads in order."""

    def __init__(self, heads: Iterable[FrameHeader], hashes: dict[int, bytes]) -> None:
        self._heads = iter(heads)
        self._hashes = hashes

    def next(self) -> FrameHeader:
        head = next(self._heads)
        return replace(head, prefix=self._hashes[head.end])

    @staticmethod
    def state(head: FrameHeader, sizes: tuple[int, int], index: int) -> FrameHeader:
        """The STATE head that is due, with what only its cache knows."""
        return replace(head, sizes=sizes, index=index)


class Incoming:
    """The receiving end of one stream.

    ``buffers`` is where a frame's payload goes. ``place`` runs on the thread that reads, ``taken`` on the one
    that computes.
    """

    def __init__(
        self,
        stream: str,
        heads: Iterable[FrameHeader],
        sizes: Sizes,
        buffers: Callable[[FrameHeader], list[memoryview]],
    ) -> None:
        self._stream = stream
        self._expected = list(heads)
        self._taken = iter(self._expected)
        self._due = iter(self._expected)
        self._sizes = sizes
        self._buffers = buffers
        self.left = len(self._expected)

    def place(self, head: FrameHeader) -> list[memoryview]:
        """Raises ProtocolError for any frame but the next of the list."""
        due = next(self._due, None)
        if due is None:
            raise ProtocolError(f"On {self._stream} came a frame after the last one.")
        for field in ("kind", "layer", "part", "start", "count"):
            if getattr(head, field) != getattr(due, field):
                raise ProtocolError(f"On {self._stream} came {head}, whose {field} is not that of {due}.")
        shape = self._sizes.parts(due.layer)[due.part] if due.kind is Kind.STATE else None
        if shape is not None and shape.state_sizes is None:
            self._check_ring(head, shape)
        elif (head.sizes, head.index) != (due.sizes, 0):
            raise ProtocolError(f"On {self._stream} came {head}, whose size is not that of {due}.")
        return self._buffers(head)

    def _check_ring(self, head: FrameHeader, shape: _Shape) -> None:
        one = shape.sizes(1)
        rows = head.sizes[0] // one[0]
        fits = head.sizes == (rows * one[0], rows * one[1]) and 1 <= rows <= head.count + _STEP
        if not fits or head.index > rows:
            raise ProtocolError(f"On {self._stream} came {head}: not a state of {head.count} tokens.")

    def take_frame(self, frame: Frame, hashes: dict[int, bytes]) -> None:
        """Count a frame that arrived. Raises ProtocolError if it was computed from other tokens."""
        due = next(self._taken)
        self.left -= 1
        if frame.head.prefix != hashes.get(due.end, NO_PREFIX):
            raise ProtocolError(f"On {self._stream} came {frame.head}, which is of other tokens than these.")

    @property
    def began(self) -> bool:
        return self.left < len(self._expected)
