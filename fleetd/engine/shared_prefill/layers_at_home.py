"""The home's part where a prompt is split by layers: the last layers are here.

rows of the helpers' layers ─────────────────────────► caches
hidden states, chunk by chunk ─► own layers ─────────► caches
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.shared_prefill import frame_payloads, passes
from fleetd.engine.shared_prefill.home_part import HomePart, LaterProbe
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.spot_check import Probe, Rows
from fleetd.engine.streams.frames import Frame, Kind
from fleetd.plan.prefill.split import Split


class LayersAtHome(HomePart):
    """The last layers here, chunk after chunk; the rows of all others arrive."""

    checked_first = True

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, prompt: mx.array, prefix: Sequence[Any] | None
    ) -> None:
        super().__init__(stage, layout, split, prompt, prefix)
        self._own = split.layers_of(split.helpers)
        self.received = range(self._own.start)
        self._part = stage.part(self._own.start, self._own.stop) if self._own else None
        self._tokens = split.chunks_of(split.helpers)
        self._chunks = len(self._tokens)
        # Hidden states (1, count, width) on the way into the own layers: chunks that are not computed yet,
        # the prompt's first tokens, and the chunk that arrived last.
        self._hidden: deque[mx.array] = deque()
        self._begin: mx.array | None = None
        self._latest: mx.array | None = None
        self._computed = 0
        # Frames of rows that arrived of each helper, and how many of them make a chunk.
        self._arrived = [0] * split.helpers
        self._rows = [len(self.places(split.layers_of(rank), in_rows=True)) for rank in range(split.helpers)]
        self._ended = [False] * split.helpers

    def take_frame(self, rank: int, frame: Frame) -> None:
        if self.snapshots.take_frame(rank, frame):
            return
        match frame.head.kind:
            case Kind.ROWS:
                self._arrived[rank] += 1
            case Kind.STATE:
                self.caches[frame.head.layer][frame.head.part] = self._states.checked(frame)
            case Kind.HIDDEN:
                hidden = frame_payloads.hidden_of(frame, self.layout)
                if self._begin is None:
                    self._begin = hidden[:, : limits.SHARE_SPOT_TOKENS]
                self._hidden.append(hidden)
                self._latest = hidden
            case _:
                self._ended[rank] = True
                for layer, part in self.places(self.split.layers_of(rank), in_rows=True):
                    if self.row_buffers.pop((layer, part), None) is not None:
                        cache = self.caches[layer][part]
                        kind_of(cache).set_held(cache, self.split.tokens)

    @property
    def computable(self) -> bool:
        return bool(self._hidden)

    @property
    def computed(self) -> bool:
        return self._part is None or self._computed == self._chunks

    def compute(self) -> None:
        if self._part is None:
            return
        caches = [self.cache(layer) for layer in self._own]
        chunk = self._tokens[self._computed]
        inputs = self._part.inputs(self.prompt[:, chunk.start : chunk.stop], chunk.start)
        passes.run(self._part, self._hidden.popleft(), caches, inputs)
        passes.evaluate(caches)
        for layer in self._own:
            self.save(layer, chunk.stop)
        mx.clear_cache()
        self._computed += 1

    def _chunks_of(self, rank: int) -> int:
        """Chunks of helper ``rank`` that are all here."""
        if self._ended[rank]:
            return self._chunks
        return self._arrived[rank] // self._rows[rank] if self._rows[rank] else 0

    def _whole(self) -> int:
        """Chunks that are here in all layers."""
        own = self._chunks if self._part is None else self._computed
        return min(own, *(self._chunks_of(rank) for rank in range(self.split.helpers)))

    @property
    def done(self) -> int:
        whole = self._whole()
        if all(self._ended) and whole == self._chunks:
            return self.split.tokens
        if self.keeps_states:
            return self.split.cached
        # The last chunk counts with the end.
        return self._tokens[min(whole, self._chunks - 1)].start

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
        return [self.probe(0, self.split.tokens_of(0), self.received)]

    def later_probes(self, done: int, draw: random.Random) -> list[LaterProbe]:
        # What this machine's first layer made of the tokens shows the hidden states that it was sent.
        found = self.later_check(0, done, self.received, draw, onward=True)
        return [found] if found is not None else []

    def end_probe(self, done: int, draw: random.Random) -> LaterProbe | None:
        return self.end_check(0, done, self.received, draw, onward=True)

    def last_hidden(self, layer: int) -> mx.array | None:
        return self._latest if layer == self._own.start else None

    def owner(self, rank: int, layer: int) -> int:
        # The first layer here rests on what the last helper sent.
        places = (i for i in range(self.split.helpers) if layer in self.split.layers_of(i))
        return next(places, self.split.helpers - 1)

    def context(self, rank: int, layer: int) -> list[Any]:
        return self._extendable(layer, self.split.cached, self.prefix[layer])

    def arrived(self, rank: int, layer: int) -> bool:
        owner = self.owner(rank, layer)
        if self._part is not None and layer + 1 == self._own.start and self._begin is None:
            return False
        if self.layout.keeps_states([layer]) or not self._rows[owner]:
            return self._ended[owner]
        return self._chunks_of(owner) > 0

    def compared(self, rank: int, layer: int, count: int) -> Rows:
        return self.rows(self.caches[layer], self.split.cached, count)

    def hidden(self, rank: int, layer: int, count: int) -> mx.array | None:
        if self._begin is None or layer != self._own.start:
            return None
        return self._begin[:, :count]
