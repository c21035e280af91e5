"""The home worker's own part of a shared prefill, and what it makes of the helpers' frames.

    layers: rows of the helpers' layers ─────────────────────────► caches
            hidden states, chunk by chunk ─► own layers ─────────► caches
    tokens: rows of the helpers' tokens, layer by layer ─► cache of layer j ─► own tokens through layer j

No streams, no clock: ``sharing.SharedPrefill`` has them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from fleetd import limits
from fleetd.engine.kv_caches import copy_on_write
from fleetd.engine.shared_prefill import layer_kv, passes
from fleetd.engine.shared_prefill.layer_kv import KvLayout, RingState, RingStates, RowBuffer
from fleetd.engine.shared_prefill.slots import Slots
from fleetd.engine.shared_prefill.spot_check import LaterRows, Pair, Probe, drawn
from fleetd.engine.stage import Stage
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.plan.prefill.split import Split, SplitKind


class _HomeWork:
    """What all kinds of split have in common. Each of them has besides:

    ``allocate()`` makes room for what will arrive; ``take(place, frame)`` is given each frame of a helper.
    ``computable``: whether ``compute()``, one bounded step, has what it needs; ``computed``: whether nothing
    is left of this machine's own part.
    ``done``: leading tokens whose keys and values are here in all layers.
    ``fraction``: how much of the whole prefill is behind us; ``next_fraction``: how much will be when that is
    here which is waited for; ``behind()``: from which helper.
    ``checked_first``: whether ``done`` grows before the end, so that the spot check comes before other work.
    ``later_probes(done, draw)``: of tokens drawn from the first ``done``, one for each helper at most.
    What ``spot_check.ReceivedRows`` asks for.
    """

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
    ) -> None:
        self.stage, self.layout, self.split, self.slots = stage, layout, split, slots
        self.prefix = list(prefix) if prefix is not None else stage.make_caches()
        self.caches: list[Any] = [None] * split.layers
        self.row_buffers: dict[int, RowBuffer] = {}
        self._ring_states = RingStates(dict(enumerate(stage.empty)), split)
        for layer, cache in enumerate(self.prefix):
            if layout.layer(layer).window:
                self._ring_states.start(layer, cache)
        # Without them everything that is computed can be taken back to any token.
        self.rotates = layout.rotates(range(split.layers))

    def make(self, layer: int, tokens: int) -> Any:
        """A cache to compute with or to be written into, holding the cached prefix."""
        prefix = self.prefix[layer]
        if not self.layout.layer(layer).window:
            cache = layer_kv.preallocated(
                self.layout.layer(layer), tokens, prefix, sparse=bool(self.split.prompt_span)
            )
            # From now on the prefix is in there; kept twice it would take twice the memory.
            self.prefix[layer] = None
            return cache
        return copy_on_write(prefix)

    def before(self, layer: int, tokens: int) -> Any:
        """A cache of the first ``tokens`` to be added to. Only these are copied then, not all the room."""
        short = layer_kv.empty(sparse=bool(self.split.prompt_span))
        if tokens:
            short.keys = self.caches[layer].keys[..., :tokens, :]
            short.values = self.caches[layer].values[..., :tokens, :]
            short.offset = tokens
        return short

    def buffers(self, head: FrameHeader) -> list[memoryview]:
        """The memory for an expected frame's payload. Called on a reader thread, after ``allocate``."""
        return layer_kv.buffers(head, self.layout, self.row_buffers)

    def rotated(self, frame: Frame) -> RotatingKVCache:
        return self._ring_states.taken(frame, self.layout.layer(frame.head.layer))

    def caches_at(self, done: int) -> list[Any]:
        """Caches of the first ``done`` tokens: the property ``done``, or the cached tokens."""
        if done == self.split.tokens:
            return self.caches
        if not done:
            return (
                [layer_kv.empty(sparse=True) for _ in self.caches]
                if self.split.prompt_span
                else self.stage.make_caches()
            )
        return [
            self.prefix[layer] if self.layout.layer(layer).window else layer_kv.truncated(cache, done)
            for layer, cache in enumerate(self.caches)
        ]

    def owner(self, place: int, layer: int) -> int:
        """The helper that computes a layer of the tokens of helper ``place``."""
        return place

    def probe(self, place: int, tokens: range, layers: range) -> Probe:
        # No more than the first chunk, which is the first thing that arrives.
        count = min(len(tokens), self.split.chunk, limits.SHARE_SPOT_TOKENS)
        return self._through(place, range(tokens.start, tokens.start + count), layers)

    def _through(self, place: int, tokens: range, layers: range) -> Probe:
        parts = [self.stage.part(layer, layer + 1) for layer in layers]
        return Probe.of(place, parts, self.slots, tokens)

    def later_probe(
        self, place: int, tokens: range, layers: range, draw: random.Random
    ) -> tuple[Probe, LaterRows] | None:
        """A few of ``tokens``, drawn; None where a layer's cache rotates and has no row for each token."""
        if not tokens or not layers or self.layout.rotates(layers):
            return None
        found = drawn(tokens, min(self.split.chunk, limits.SHARE_SPOT_TOKENS), draw)
        return self._through(place, found, layers), LaterRows(self, found)

    def rows(self, cache: Any, start: int, count: int) -> Pair | None:
        """Keys and values of tokens [start, start + count), where the cache still has them."""
        if isinstance(cache, RotatingKVCache):
            row = RingState.of(cache).row_of(start)
            if row is None:
                return None
            start = row
        return cache.keys[..., start : start + count, :], cache.values[..., start : start + count, :]


class LayersAtHome(_HomeWork):
    """The last layers here, chunk after chunk; the rows of all others arrive."""

    checked_first = True

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
    ) -> None:
        super().__init__(stage, layout, split, slots, prefix)
        self._own = split.layers_of(split.helpers)
        self._part = stage.part(self._own.start, self._own.stop) if self._own else None
        self._where = [slots.where(chunk) for chunk in split.chunks_of(split.helpers)]
        self._chunks = len(self._where)
        self._hidden: deque[mx.array] = deque()
        self._begin: mx.array | None = None
        self._computed = 0
        # Frames of rows that arrived of each helper, and how many of them make a chunk.
        self._arrived = [0] * split.helpers
        self._rows = [
            sum(not layout.layer(layer).window for layer in split.layers_of(place))
            for place in range(split.helpers)
        ]
        self._ended = [False] * split.helpers

    def allocate(self) -> None:
        for layer in range(self.split.layers):
            self.caches[layer] = self.make(layer, self.split.tokens)
            if layer not in self._own and not self.layout.layer(layer).window:
                self.row_buffers[layer] = RowBuffer(self.caches[layer])

    def take(self, place: int, frame: Frame) -> None:
        match frame.head.kind:
            case Kind.ROWS:
                self._arrived[place] += 1
            case Kind.STATE:
                self.caches[frame.head.layer] = self.rotated(frame)
            case Kind.HIDDEN:
                hidden = layer_kv.hidden_of(frame, self.layout)
                if self._begin is None:
                    self._begin = hidden[:, : limits.SHARE_SPOT_TOKENS]
                self._hidden.append(hidden)
            case _:
                self._ended[place] = True
                for layer in self.split.layers_of(place):
                    if self.row_buffers.pop(layer, None) is not None:
                        self.caches[layer].offset = self.split.tokens

    @property
    def computable(self) -> bool:
        return bool(self._hidden)

    @property
    def computed(self) -> bool:
        return self._part is None or self._computed == self._chunks

    def compute(self) -> None:
        if self._part is None:
            return
        caches = self.caches[self._own.start :]
        passes.run(self._part, self._hidden.popleft(), caches, self._where[self._computed])
        passes.evaluate(caches)
        mx.clear_cache()
        self._computed += 1

    def _chunks_of(self, place: int) -> int:
        """Chunks of helper ``place`` that are all here."""
        if self._ended[place]:
            return self._chunks
        return self._arrived[place] // self._rows[place] if self._rows[place] else 0

    def _whole(self) -> int:
        """Chunks that are here in all layers."""
        own = self._chunks if self._part is None else self._computed
        return min(own, *(self._chunks_of(place) for place in range(self.split.helpers)))

    @property
    def done(self) -> int:
        whole = self._whole()
        if all(self._ended) and whole == self._chunks:
            return self.split.tokens
        if self.rotates:
            return self.split.cached
        # The last chunk counts with the end.
        return self.split.cached + min(whole, self._chunks - 1) * self.split.chunk

    @property
    def fraction(self) -> float:
        return (self._whole() if self._part is None else self._computed) / self._chunks

    @property
    def next_fraction(self) -> float:
        if self._part is not None and self.computed:
            return 1.0
        step = self._whole() if self._part is None else self._computed
        return min(1.0, (step + 1 + self.split.helpers) / (self._chunks + self.split.helpers))

    def behind(self) -> int:
        return min(range(self.split.helpers), key=self._chunks_of)

    # ---- for the spot check ----------------------------------------------------------------------------

    def probes(self) -> list[Probe]:
        return [self.probe(0, self.split.tokens_of(0), range(self._own.start))]

    def later_probes(self, done: int, draw: random.Random) -> list[tuple[Probe, LaterRows]]:
        # What this machine's first layer made of the tokens shows the hidden states that it was sent.
        layers = range(min(self._own.start + 1, self.split.layers))
        found = self.later_probe(0, range(self.split.cached, done), layers, draw)
        return [found] if found is not None else []

    def owner(self, place: int, layer: int) -> int:
        # The first layer here rests on what the last helper sent.
        places = (i for i in range(self.split.helpers) if layer in self.split.layers_of(i))
        return next(places, self.split.helpers - 1)

    def context(self, place: int, layer: int) -> Any:
        if self.layout.layer(layer).window:
            return copy_on_write(self.prefix[layer])
        return self.before(layer, self.split.cached)

    def arrived(self, place: int, layer: int) -> bool:
        owner = self.owner(place, layer)
        if self._part is not None and layer + 1 == self._own.start and self._begin is None:
            return False
        if self.layout.layer(layer).window or not self._rows[owner]:
            return self._ended[owner]
        return self._chunks_of(owner) > 0

    def compared(self, place: int, layer: int, count: int) -> Pair | None:
        return self.rows(self.caches[layer], self.split.cached, count)

    def hidden(self, place: int, layer: int, count: int) -> mx.array | None:
        if self._begin is None or layer != self._own.start:
            return None
        return self._begin[:, :count]


class TokensAtHome(_HomeWork):
    """The last tokens here, layer after layer; the rows of all tokens before them arrive."""

    checked_first = False

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
    ) -> None:
        super().__init__(stage, layout, split, slots, prefix)
        self._major = passes.LayerMajor(stage, slots, split.chunks_of(split.helpers))
        self._cut = split.tokens_of(split.helpers).start
        # Layers that arrived of each helper, in order.
        self._arrived = [0] * split.helpers
        self._ended = [False] * split.helpers
        # Caches that rotate, as they are after each helper's tokens.
        self._states: list[dict[int, RotatingKVCache]] = [{} for _ in range(split.helpers)]

    def allocate(self) -> None:
        for layer in range(self.split.layers):
            self.caches[layer] = self.make(layer, self.split.tokens)
            if not self.layout.layer(layer).window:
                self.row_buffers[layer] = RowBuffer(self.caches[layer])

    def take(self, place: int, frame: Frame) -> None:
        layer = frame.head.layer
        match frame.head.kind:
            case Kind.DONE:
                self._ended[place] = True
                return
            case Kind.STATE:
                self._states[place][layer] = self.rotated(frame)
        self._arrived[place] += 1
        if min(self._arrived) > layer:
            self._complete(layer)

    def _complete(self, layer: int) -> None:
        """All rows before this machine's own have arrived."""
        self.row_buffers.pop(layer, None)
        if self.layout.layer(layer).window:
            self.caches[layer] = copy_on_write(self._states[-1][layer])
        else:
            self.caches[layer].offset = self._cut

    @property
    def computable(self) -> bool:
        return not self.computed and (not self._major.begins or min(self._arrived) > self._major.layer)

    @property
    def computed(self) -> bool:
        return self._major.finished

    def compute(self) -> None:
        self._major.step(self.caches[self._major.layer])

    @property
    def done(self) -> int:
        if not all(self._ended):
            return self.split.cached
        if self.computed:
            return self.split.tokens
        return self.split.cached if self.rotates else self._cut

    @property
    def fraction(self) -> float:
        return min(self._arrived) / self.split.layers if self.computed else self._major.fraction

    @property
    def next_fraction(self) -> float:
        layers, step = self.split.layers, min(self._arrived)
        return min(1.0, (step + 1 + self.split.helpers) / (layers + self.split.helpers))

    def behind(self) -> int:
        return min(range(self.split.helpers), key=lambda place: self._arrived[place])

    # ---- for the spot check ----------------------------------------------------------------------------

    def probes(self) -> list[Probe]:
        layers = range(self.split.layers)
        return [self.probe(i, self.split.tokens_of(i), layers) for i in range(self.split.helpers)]

    def later_probes(self, done: int, draw: random.Random) -> list[tuple[Probe, LaterRows]]:
        layers, found = range(self.split.layers), []
        for i in range(self.split.helpers):
            tokens = self.split.tokens_of(i)
            found.append(self.later_probe(i, range(tokens.start, min(tokens.stop, done)), layers, draw))
        return [probe for probe in found if probe is not None]

    def context(self, place: int, layer: int) -> Any | None:
        if min(self._arrived[:place], default=self.split.layers) <= layer:
            return None
        if not self.layout.layer(layer).window:
            return self.before(layer, self.split.tokens_of(place).start)
        return copy_on_write(self._states[place - 1][layer] if place else self.prefix[layer])

    def arrived(self, place: int, layer: int) -> bool:
        return self._arrived[place] > layer

    def compared(self, place: int, layer: int, count: int) -> Pair | None:
        cache = self._states[place].get(layer, self.caches[layer])
        return self.rows(cache, self.split.tokens_of(place).start, count)

    def hidden(self, place: int, layer: int, count: int) -> mx.array | None:
        return None


_WORK: dict[SplitKind, type[LayersAtHome | TokensAtHome]] = {"layers": LayersAtHome, "tokens": TokensAtHome}


def home_work(
    stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
) -> LayersAtHome | TokensAtHome:
    """The work of ``split``'s last machine.

    Args:
        slots: all of the split's tokens.
        prefix: private caches of the cached ones.
    """
    return _WORK[split.kind](stage, layout, split, slots, prefix)
