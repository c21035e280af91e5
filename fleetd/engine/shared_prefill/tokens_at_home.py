"""The home's part where a prompt is split by tokens: the last tokens are here.

rows of the helpers' tokens, layer by layer ─► cache of layer j ─► own tokens through layer j
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.shared_prefill import passes
from fleetd.engine.shared_prefill.frame_payloads import LayersArrived, Place
from fleetd.engine.shared_prefill.home_part import HomePart, LaterProbe
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.spot_check import Probe, Rows
from fleetd.engine.streams.frames import Frame, Kind
from fleetd.plan.prefill.split import Split


class TokensAtHome(HomePart):
    """The last tokens here, layer after layer; the rows of all tokens before them arrive."""

    checked_first = False

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, prompt: mx.array, prefix: Sequence[Any] | None
    ) -> None:
        super().__init__(stage, layout, split, prompt, prefix)
        self._major = passes.LayerMajor(stage, prompt, split.chunks_of(split.helpers))
        self._cut = split.tokens_of(split.helpers).start
        # Frames that arrived of each helper, in order, and layers that have arrived of all.
        self._frames = [0] * split.helpers
        self._layers = LayersArrived(layout, range(split.layers))
        self._completed = 0
        self._ended = [False] * split.helpers
        # Caches without a row per token, as they are after each helper's tokens.
        self._after: list[dict[Place, Any]] = [{} for _ in range(split.helpers)]

    def take_frame(self, rank: int, frame: Frame) -> None:
        if self.snapshots.take_frame(rank, frame):
            return
        match frame.head.kind:
            case Kind.DONE:
                self._ended[rank] = True
                return
            case Kind.STATE:
                layer, part = frame.head.layer, frame.head.part
                self._after[rank][layer, part] = cache = self._states.checked(frame)
                if frame.head.end in self._places:
                    self.snapshots.put(frame.head.end, layer, part, kind_of(cache).saved(cache))
        self._frames[rank] += 1
        while self._completed < self._here:
            self._complete(self._completed)
            self._completed += 1

    def _complete(self, layer: int) -> None:
        """All that comes before this machine's own tokens has arrived."""
        for part, shape in enumerate(self.layout.parts(layer)):
            self.row_buffers.pop((layer, part), None)
            if shape.in_rows:
                kind_of(self.caches[layer][part]).set_held(self.caches[layer][part], self._cut)
            else:
                self.caches[layer][part] = copy_on_write(self._after[-1][layer, part])

    def _of(self, rank: int) -> int:
        """Layers that arrived of helper ``rank``."""
        return self._layers.after(self._frames[rank])

    @property
    def _here(self) -> int:
        """Layers that arrived of all helpers."""
        return self._layers.after(min(self._frames))

    @property
    def computable(self) -> bool:
        return not self.computed and (not self._major.begins or self._here > self._major.layer)

    @property
    def computed(self) -> bool:
        return self._major.finished

    def compute(self) -> None:
        layer, tokens = self._major.layer, self._major.next
        self._major.step(self.cache(layer))
        self.save(layer, tokens.stop)

    @property
    def done(self) -> int:
        if not all(self._ended):
            return self.split.cached
        if self.computed:
            return self.split.tokens
        return self.split.cached if self.keeps_states else self._cut

    @property
    def fraction(self) -> float:
        return self._here / self.split.layers if self.computed else self._major.fraction

    @property
    def next_fraction(self) -> float:
        layers, step = self.split.layers, self._here
        return min(1.0, (step + 1 + self.split.helpers) / (layers + self.split.helpers))

    def behind(self) -> int:
        return min(range(self.split.helpers), key=self._frames.__getitem__)

    # ---- for the spot check ----------------------------------------------------------------------------

    def probes(self) -> list[Probe]:
        layers = range(self.split.layers)
        return [self.probe(i, self.split.tokens_of(i), layers) for i in range(self.split.helpers)]

    def later_probes(self, done: int, draw: random.Random) -> list[LaterProbe]:
        layers = range(self.split.layers)
        found = (self.later_check(i, done, layers, draw) for i in range(self.split.helpers))
        return [probe for probe in found if probe is not None]

    def end_probe(self, done: int, draw: random.Random) -> LaterProbe | None:
        # The last helper's rest on those of all others.
        return self.end_check(self.split.helpers - 1, done, range(self.split.layers), draw)

    def context(self, rank: int, layer: int) -> list[Any] | None:
        if min(map(self._of, range(rank)), default=self.split.layers) <= layer:
            return None
        states = self.prefix[layer]
        if rank:
            states = [self._after[rank - 1].get((layer, part)) for part in range(len(states))]
        return self._extendable(layer, self.split.tokens_of(rank).start, states)

    def arrived(self, rank: int, layer: int) -> bool:
        return self._of(rank) > layer

    def kept(self, rank: int, layer: int) -> list[Any]:
        return [self._after[rank].get((layer, part), own) for part, own in enumerate(self.caches[layer])]

    def compared(self, rank: int, layer: int, count: int) -> Rows:
        return self.rows(self.kept(rank, layer), self.split.tokens_of(rank).start, count)
