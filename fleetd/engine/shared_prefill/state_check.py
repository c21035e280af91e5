"""The check of running states: this machine computes a helper's last chunk too, and compares.

A running state cannot be taken back to a token that is drawn later. So each helper also sends the states
before its last chunk. Once all is here, the home computes that chunk from them through the helper's layers:
the helper's keys, values and hidden states of the chunk, and the states that it sent last, must come of it.

A helper that computed honestly from states that were already wrong before its last chunk is not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx

from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.shapes import RunningShape
from fleetd.engine.shared_prefill.frame_payloads import States
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.slots import Slots
from fleetd.engine.shared_prefill.spot_check import Probe, Rows
from fleetd.engine.stage import Stage
from fleetd.engine.streams.frames import Frame, Kind
from fleetd.plan.prefill.split import Split


class HomeStates(Protocol):
    """What the home has of helpers' last chunks: ``home_work``."""

    stage: Stage
    layout: KvLayout
    split: Split
    slots: Slots

    def owner(self, place: int, layer: int) -> int:
        """As ``ReceivedRows``."""

    def context(self, place: int, layer: int) -> list[Any] | None:
        """As ``ReceivedRows``."""

    def before_last_chunk(self, place: int, layer: int) -> list[Any] | None:
        """The same before the last chunk of helper ``place``, if it has several."""

    def kept(self, place: int, layer: int) -> list[Any]:
        """The same as they were sent after it. Those with a row per token may hold more."""

    def last_hidden(self, layer: int) -> mx.array | None:
        """The chunk's hidden states (1, count, width) on the way into ``layer``, if they were sent."""


class Snapshots:
    """The running states before each helper's last chunk, as they arrive."""

    def __init__(self, states: States, split: Split) -> None:
        self._states, self._split = states, split
        self._found: dict[tuple[int, int], dict[int, Any]] = {}

    def took(self, place: int, frame: Frame) -> bool:
        """True if the frame is one of helper ``place``'s snapshots, and is kept."""
        head = frame.head
        if head.kind is not Kind.STATE or head.end != self._split.snapshot_of(place):
            return False
        self._found.setdefault((place, head.layer), {})[head.part] = self._states.received(frame)
        return True

    def of(self, place: int, layer: int) -> Mapping[int, Any]:
        """A layer's, by the number of the part."""
        return self._found.get((place, layer), {})


class StateProbe(Probe):
    """A helper's last chunk. Running states are compared as well as rows."""

    def made(self, cache: Any) -> tuple[mx.array, ...] | None:
        return super().made(cache) if kind_of(cache).attention else tuple(kind_of(cache).kept(cache))


class LastChunk:
    """``ReceivedRows`` of a last chunk that is all here."""

    def __init__(self, work: HomeStates, tokens: range) -> None:
        self._work, self._tokens = work, tokens

    def owner(self, place: int, layer: int) -> int:
        return self._work.owner(place, layer)

    def context(self, place: int, layer: int) -> list[Any] | None:
        found = self._work.before_last_chunk(place, layer)
        return self._work.context(place, layer) if found is None else found

    def arrived(self, place: int, layer: int) -> bool:
        return True

    def compared(self, place: int, layer: int, count: int) -> Rows:
        found: Rows = []
        for cache in self._work.kept(place, layer):
            kind = kind_of(cache)
            rows = kind.rows(cache, self._tokens.start, count)
            found.append(rows if kind.attention else tuple(kind.kept(cache)))
        return found

    def hidden(self, place: int, layer: int, count: int) -> mx.array | None:
        return self._work.last_hidden(layer)


def last_chunk(work: HomeStates, place: int, layers: range) -> tuple[StateProbe, LastChunk] | None:
    """The probe of helper ``place`` through these layers; None where windows slide: they have no snapshot."""
    shapes = [shape for layer in layers for shape in work.layout.parts(layer)]
    if not layers or any(not (shape.in_rows or isinstance(shape, RunningShape)) for shape in shapes):
        return None
    parts = [work.stage.part(layer, layer + 1) for layer in layers]
    tokens = work.split.chunks_of(place)[-1]
    return StateProbe.of(place, parts, work.slots, tokens), LastChunk(work, tokens)
