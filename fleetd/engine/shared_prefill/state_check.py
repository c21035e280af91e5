"""The check of running states: this machine computes one of a helper's chunks too, and compares.

A running state cannot be taken back to a token that is drawn later. So each helper also sends the states
before its last chunk, and those at the split's places. Once all is here, the home draws one of the chunks
that begin with such states, and computes it from them through the helper's layers: the helper's keys, values
and hidden states of the chunk, and the states that it sent after it, must come of it. Windows are checked in
the same way, by a few tokens.

A helper that computed honestly from states that were already wrong before the first of these is not found.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.shapes import RunningShape
from fleetd.engine.shared_prefill.frame_payloads import States
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.spot_check import Probe, Rows, one_of
from fleetd.engine.streams.frames import Frame, Kind
from fleetd.plan.prefill.split import Split


class Snapshots:
    """States at earlier tokens, as helpers send them and as this machine saves its own."""

    def __init__(self, states: States, split: Split) -> None:
        self._states = states
        self._due = [frozenset(split.states_of(rank)) for rank in range(split.helpers)]
        self._found: dict[tuple[int, int], dict[int, Any]] = {}

    def take_frame(self, rank: int, frame: Frame) -> bool:
        """True if the frame is one of helper ``rank``'s snapshots, and is kept."""
        head = frame.head
        if head.kind is not Kind.STATE or head.end not in self._due[rank]:
            return False
        self.put(head.end, head.layer, head.part, self._states.saved(frame))
        return True

    def put(self, tokens: int, layer: int, part: int, saved: Any) -> None:
        self._found.setdefault((tokens, layer), {})[part] = saved

    def after(self, tokens: int, layer: int) -> Mapping[int, Any]:
        """A layer's, by the number of the part."""
        return self._found.get((tokens, layer), {})


class HomeStates(Protocol):
    """What the home has of helpers' chunks: ``home_part``."""

    stage: Stage
    layout: KvLayout
    split: Split
    prompt: mx.array  # (1, T)
    snapshots: Snapshots

    def owner(self, rank: int, layer: int) -> int:
        """The same as in ``ReceivedRows``."""

    def context(self, rank: int, layer: int) -> list[Any] | None:
        """The same as in ``ReceivedRows``."""

    def after(self, layer: int, tokens: int) -> list[Any]:
        """A layer's caches, to be added to, after ``tokens`` for which there are snapshots."""

    def kept(self, rank: int, layer: int) -> list[Any]:
        """The same as they were sent after the part of helper ``rank``. Those with a row per token may hold
        more."""

    def last_hidden(self, layer: int) -> mx.array | None:
        """The last chunk's hidden states (1, count, width) on the way into ``layer``, if they were sent."""


class StateProbe(Probe):
    """One of a helper's chunks. Running states are compared as well as rows."""

    def made(self, cache: Any) -> tuple[mx.array, ...] | None:
        return super().made(cache) if kind_of(cache).attention else tuple(kind_of(cache).kept(cache))


class KnownChunk:
    """``ReceivedRows`` of a chunk that is all here."""

    def __init__(self, work: HomeStates, tokens: range) -> None:
        self._work, self._tokens = work, tokens

    def owner(self, rank: int, layer: int) -> int:
        return self._work.owner(rank, layer)

    def context(self, rank: int, layer: int) -> list[Any] | None:
        if self._tokens.start == self._work.split.tokens_of(rank).start:
            return self._work.context(rank, layer)
        return self._work.after(layer, self._tokens.start)

    def arrived(self, rank: int, layer: int) -> bool:
        return True

    def compared(self, rank: int, layer: int, count: int) -> Rows:
        return [None if cache is None else self._compared(cache, count) for cache in self._kept(rank, layer)]

    def _compared(self, cache: Any, count: int) -> tuple[mx.array, ...] | None:
        kind = kind_of(cache)
        rows = kind.rows(cache, self._tokens.start, count)
        return rows if kind.attention else tuple(kind.kept(cache))

    def _kept(self, rank: int, layer: int) -> list[Any]:
        """A layer's caches after the chunk; None for a state that was not sent there."""
        kept = self._work.kept(rank, layer)
        if self._is_last(rank):
            return kept
        states = self._work.snapshots.after(self._tokens.stop, layer)
        shapes = self._work.layout.parts(layer)
        return [
            cache if shape.in_rows else states.get(part)
            for part, (cache, shape) in enumerate(zip(kept, shapes, strict=True))
        ]

    def hidden(self, rank: int, layer: int, count: int) -> mx.array | None:
        return self._work.last_hidden(layer) if self._is_last(rank) else None

    def _is_last(self, rank: int) -> bool:
        return self._tokens.stop == self._work.split.tokens_of(rank).stop


def known_chunk(
    work: HomeStates, rank: int, layers: Sequence[int], draw: random.Random, *, last: bool = False
) -> tuple[StateProbe, KnownChunk] | None:
    """The probe of one of helper ``rank``'s chunks through these layers; None if the states before none of
    them are here, or if there are no states. ``last``: of the first tokens of the last one."""
    split = work.split
    if not work.layout.keeps_states(layers):
        return None
    shapes = [shape for layer in layers for shape in work.layout.parts(layer)]
    windows = any(not (shape.in_rows or isinstance(shape, RunningShape)) for shape in shapes)
    # Windows are sent at places alone.
    begins = split.sent_places if windows else split.states_of(rank)
    chunks = split.chunks_of(rank)
    known = [chunk for chunk in chunks if chunk.start in begins]
    ends = {*split.states_of(rank), split.tokens_of(rank).stop}
    if not any(shape.in_rows for shape in shapes):
        if last:
            return None  # only states show anything, at a chunk's end
        # Nothing shows what came of the others.
        known = [chunk for chunk in known if chunk.stop in ends]
    if not known and (windows or len(chunks) > 1):
        return None
    tokens = (known or chunks)[-1] if last else one_of(known or chunks, draw)
    if last:
        tokens = tokens[: limits.SHARE_END_TOKENS]
    elif windows or tokens.stop not in ends:
        # Only rows are compared, and those of tokens further on rest less on the states that were sent.
        tokens = tokens[: limits.SHARE_SPOT_TOKENS]
    parts = [work.stage.part(layer, layer + 1) for layer in layers]
    return StateProbe.of(rank, parts, work.prompt, tokens), KnownChunk(work, tokens)
