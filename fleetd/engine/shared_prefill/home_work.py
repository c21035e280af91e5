"""The home worker's own part of a shared prefill, and what it makes of the helpers' frames.

    layers: rows of the helpers' layers ─────────────────────────► caches
            hidden states, chunk by chunk ─► own layers ─────────► caches
    tokens: rows of the helpers' tokens, layer by layer ─► cache of layer j ─► own tokens through layer j

No streams, no clock: ``sharing.SharedPrefill`` has them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.sequence_state import checkpoints, rings, row_memory
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import assembled, parts
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated
from fleetd.engine.sequence_state.shapes import KvShape
from fleetd.engine.shared_prefill import frame_payloads, passes
from fleetd.engine.shared_prefill.frame_payloads import LayersArrived, Place, States
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.slots import Slots
from fleetd.engine.shared_prefill.spot_check import LaterRows, Probe, Rows, drawn, one_of
from fleetd.engine.shared_prefill.state_check import KnownChunk, Snapshots, known_chunk
from fleetd.engine.sparse_prefill.sparse_caches import row_cache
from fleetd.engine.stage import Stage
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.plan.prefill.split import Split, SplitKind

# A probe made once all is here, and what it is compared with.
LaterProbe = tuple[Probe, LaterRows | KnownChunk]


class _HomeWork:
    """What all kinds of split have in common. Each of them has besides:

    ``allocate()`` makes room for what will arrive; ``take(rank, frame)`` is given each frame of a helper.
    ``computable``: whether ``compute()``, one bounded step, has what it needs; ``computed``: whether nothing
    is left of this machine's own part.
    ``done``: leading tokens whose keys and values are here in all layers.
    ``fraction``: how much of the whole prefill is behind us; ``next_fraction``: how much will be when that is
    here which is waited for; ``behind()``: from which helper.
    ``checked_first``: whether ``done`` grows before the end, so that the spot check comes before other work.
    ``later_probes(done, draw)``: of tokens drawn from the first ``done``, one for each helper at most. Where
    states are kept: or of one of each helper's chunks.
    ``last_hidden``: what ``state_check`` asks for besides.
    What ``spot_check.ReceivedRows`` asks for.
    """

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
    ) -> None:
        self.stage, self.layout, self.split, self.slots = stage, layout, split, slots
        # By layer, then by part of what the layer keeps: before the new tokens, and with them.
        self.prefix: list[list[Any]] = [
            list(parts(cache)) for cache in (stage.spread(prefix) if prefix else stage.make_caches())
        ]
        self.caches: list[list[Any]] = [[] for _ in range(split.layers)]
        self.row_buffers: dict[Place, RowBuffer] = {}
        empty = {
            (layer, part): cache
            for layer, each in enumerate(stage.empty)
            for part, cache in enumerate(parts(each))
        }
        self._states = States(empty, layout, split)
        for place in self.places(range(split.layers), in_rows=False):
            self._states.start(place, self.prefix[place[0]][place[1]])
        self.snapshots = Snapshots(self._states, split)
        # Without states everything that is computed can be taken back to any token.
        self.keeps_states = layout.keeps_states(range(split.layers))
        if split.cached in self._places:
            for layer in range(split.layers):
                self._save(layer, split.cached, self.prefix[layer])

    @property
    def _places(self) -> Sequence[int]:
        """The tokens after which states are kept for later prompts: as ``prefill.Prefiller`` has it."""
        split = self.split
        if not self.keeps_states or not split.sent:
            return ()
        begins = split.cached and not split.cached % limits.CHECKPOINT_BLOCK_TOKENS
        return (split.cached, *split.sent_places) if begins else split.sent_places

    def save(self, layer: int, tokens: int) -> None:
        """Keep what ``states`` needs of a layer that this machine has just computed up to ``tokens``."""
        if tokens in self._places:
            self._save(layer, tokens, self.caches[layer])

    def _save(self, layer: int, tokens: int, caches: Sequence[Any]) -> None:
        for part, (cache, shape) in enumerate(zip(caches, self.layout.parts(layer), strict=True)):
            if not shape.in_rows:
                saved = kind_of(cache).saved(cache)
                mx.eval(kind_of(saved).arrays(saved))
                self.snapshots.put(tokens, layer, part, saved)

    @property
    def states(self) -> dict[int, list[Any]]:
        """What ``checkpoints.saved`` gives of the whole prompt's caches, by token; once all is here."""
        return {
            at: [
                checkpoints.of_parts(empty, self._states_of(layer, at))
                for layer, empty in enumerate(self.stage.empty[: self.split.layers])
                if empty is not None
            ]
            for at in self._places
        }

    def _states_of(self, layer: int, at: int) -> list[Any]:
        found = self.snapshots.after(at, layer)
        return [None if shape.in_rows else found[part] for part, shape in enumerate(self.layout.parts(layer))]

    def places(self, layers: Iterable[int], *, in_rows: bool) -> list[Place]:
        """The caches of some layers that have a row per token, or those that have not."""
        return [
            (layer, part)
            for layer in layers
            for part, shape in enumerate(self.layout.parts(layer))
            if shape.in_rows is in_rows
        ]

    def make(self, layer: int, tokens: int) -> list[Any]:
        """Caches to compute with or to be written into, holding the cached prefix."""
        made = []
        for part, shape in enumerate(self.layout.parts(layer)):
            prefix = self.prefix[layer][part]
            if isinstance(shape, KvShape) and shape.in_rows:
                empty = row_cache(sparse=bool(self.split.prompt_span))
                made.append(preallocated(shape, tokens, prefix, empty=empty))
                # From now on the prefix is in there; kept twice it would take twice the memory.
                self.prefix[layer][part] = None
            else:
                made.append(copy_on_write(prefix))
        return made

    def cache(self, layer: int) -> Any:
        """What a layer keeps of all that is here, as its model takes it."""
        return assembled(self.stage.empty[layer], self.caches[layer])

    def kept(self, rank: int, layer: int) -> list[Any]:
        """``HomeRows.kept``."""
        return self.caches[layer]

    def before(self, rank: int, layer: int, tokens: int) -> list[Any]:
        """``HomeRows.before``; not before the windows' ``first_cut``, and not of a running state."""
        return [
            self._begun(cache, tokens) if shape.in_rows else rings.before(cache, tokens)
            for cache, shape in zip(self.kept(rank, layer), self.layout.parts(layer), strict=True)
        ]

    def _begun(self, cache: Any, tokens: int) -> Any:
        """The first ``tokens`` of a cache, to be added to. Only these are copied then, not all the room."""
        short = row_cache(sparse=bool(self.split.prompt_span))
        if tokens:
            keys, values = (array[..., :tokens, :] for array in kind_of(cache).arrays(cache))
            kind_of(short).fill(short, keys, values, tokens)
        return short

    def buffers(self, head: FrameHeader) -> list[memoryview]:
        """The memory for an expected frame's payload. Called on a reader thread, after ``allocate``."""
        return frame_payloads.buffers(head, self.layout, self.row_buffers)

    def caches_at(self, done: int) -> list[Any]:
        """Caches of the first ``done`` tokens: the property ``done``, or the cached tokens."""
        if done == self.split.tokens:
            found = self.caches
        elif not done:
            found = [
                [row_cache(sparse=True) for _ in each] if self.split.prompt_span else list(parts(empty))
                for each, empty in zip(self.caches, self.stage.make_caches(), strict=False)
            ]
        else:
            found = [self._short(layer, done) for layer in range(self.split.layers)]
        return [assembled(empty, each) for empty, each in zip(self.stage.empty, found, strict=False) if each]

    def _short(self, layer: int, done: int) -> list[Any]:
        """A layer's caches of the first ``done`` tokens."""
        return [
            row_memory.truncated(cache, done) if shape.in_rows else self.prefix[layer][part]
            for part, (cache, shape) in enumerate(
                zip(self.caches[layer], self.layout.parts(layer), strict=True)
            )
        ]

    def _context(self, layer: int, tokens: int, states: Sequence[Any] | Mapping[int, Any]) -> list[Any]:
        """Caches of the first ``tokens``, to be added to. ``states``: those without a row per token."""
        return [
            self._begun(self.caches[layer][part], tokens) if shape.in_rows else copy_on_write(states[part])
            for part, shape in enumerate(self.layout.parts(layer))
        ]

    def after(self, layer: int, tokens: int) -> list[Any]:
        """``state_check.HomeStates.after``."""
        return self._context(layer, tokens, self.snapshots.after(tokens, layer))

    def owner(self, rank: int, layer: int) -> int:
        """The helper that computes a layer of the tokens of helper ``rank``."""
        return rank

    def probe(self, rank: int, tokens: range, layers: range) -> Probe:
        # No more than the first chunk, which is the first thing that arrives.
        count = min(len(tokens), self.split.chunk, limits.SHARE_SPOT_TOKENS)
        return self._through(rank, range(tokens.start, tokens.start + count), layers)

    def _through(self, rank: int, tokens: range, layers: range) -> Probe:
        parts = [self.stage.part(layer, layer + 1) for layer in layers]
        return Probe.of(rank, parts, self.slots, tokens)

    def later_probe(
        self, rank: int, tokens: range, layers: range, draw: random.Random
    ) -> tuple[Probe, LaterRows] | None:
        """A few of ``tokens``, drawn from those whose windows are still here.

        None if there are none, or where a layer keeps a running state.
        """
        if not tokens or not layers or self.layout.keeps_running(layers):
            return None
        windows = self.places(layers, in_rows=False)
        cuts = (rings.first_cut(self.kept(rank, layer)[part]) for layer, part in windows)
        tokens = range(max(tokens.start, *cuts, 0), tokens.stop)
        if not tokens:
            return None
        found = drawn(tokens, min(self.split.chunk, limits.SHARE_SPOT_TOKENS), draw)
        return self._through(rank, found, layers), LaterRows(self, found)

    def rows(self, caches: Sequence[Any], start: int, count: int) -> Rows:
        """Keys and values of tokens [start, start + count), where each of a layer's caches still has them."""
        return [kind_of(cache).rows(cache, start, count) for cache in caches]


class LayersAtHome(_HomeWork):
    """The last layers here, chunk after chunk; the rows of all others arrive."""

    checked_first = True

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
    ) -> None:
        super().__init__(stage, layout, split, slots, prefix)
        self._own = split.layers_of(split.helpers)
        self._part = stage.part(self._own.start, self._own.stop) if self._own else None
        self._tokens = split.chunks_of(split.helpers)
        self._chunks = len(self._tokens)
        self._hidden: deque[mx.array] = deque()
        self._begin: mx.array | None = None
        self._latest: mx.array | None = None
        self._computed = 0
        # Frames of rows that arrived of each helper, and how many of them make a chunk.
        self._arrived = [0] * split.helpers
        self._rows = [len(self.places(split.layers_of(rank), in_rows=True)) for rank in range(split.helpers)]
        self._ended = [False] * split.helpers

    def allocate(self) -> None:
        for layer in range(self.split.layers):
            self.caches[layer] = self.make(layer, self.split.tokens)
        for layer, part in self.places(range(self._own.start), in_rows=True):
            self.row_buffers[layer, part] = RowBuffer(self.caches[layer][part])

    def take(self, rank: int, frame: Frame) -> None:
        if self.snapshots.took(rank, frame):
            return
        match frame.head.kind:
            case Kind.ROWS:
                self._arrived[rank] += 1
            case Kind.STATE:
                self.caches[frame.head.layer][frame.head.part] = self._states.taken(frame)
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
        inputs = self._part.inputs(self.slots.tokens(chunk), chunk.start)
        passes.run(self._part, self._hidden.popleft(), caches, self.slots.where(chunk), inputs)
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
        return [self.probe(0, self.split.tokens_of(0), range(self._own.start))]

    def later_probes(self, done: int, draw: random.Random) -> list[LaterProbe]:
        # What this machine's first layer made of the tokens shows the hidden states that it was sent.
        found = later_check(self, 0, done, range(self._own.start), draw, onward=True)
        return [found] if found is not None else []

    def last_hidden(self, layer: int) -> mx.array | None:
        return self._latest if layer == self._own.start else None

    def owner(self, rank: int, layer: int) -> int:
        # The first layer here rests on what the last helper sent.
        places = (i for i in range(self.split.helpers) if layer in self.split.layers_of(i))
        return next(places, self.split.helpers - 1)

    def context(self, rank: int, layer: int) -> list[Any]:
        return self._context(layer, self.split.cached, self.prefix[layer])

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


class TokensAtHome(_HomeWork):
    """The last tokens here, layer after layer; the rows of all tokens before them arrive."""

    checked_first = False

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, slots: Slots, prefix: Sequence[Any] | None
    ) -> None:
        super().__init__(stage, layout, split, slots, prefix)
        self._major = passes.LayerMajor(stage, slots, split.chunks_of(split.helpers))
        self._cut = split.tokens_of(split.helpers).start
        # Frames that arrived of each helper, in order, and layers that have arrived of all.
        self._frames = [0] * split.helpers
        self._layers = LayersArrived(layout, range(split.layers))
        self._completed = 0
        self._ended = [False] * split.helpers
        # Caches without a row per token, as they are after each helper's tokens.
        self._after: list[dict[Place, Any]] = [{} for _ in range(split.helpers)]

    def allocate(self) -> None:
        for layer in range(self.split.layers):
            self.caches[layer] = self.make(layer, self.split.tokens)
        for layer, part in self.places(range(self.split.layers), in_rows=True):
            self.row_buffers[layer, part] = RowBuffer(self.caches[layer][part])

    def take(self, rank: int, frame: Frame) -> None:
        if self.snapshots.took(rank, frame):
            return
        match frame.head.kind:
            case Kind.DONE:
                self._ended[rank] = True
                return
            case Kind.STATE:
                layer, part = frame.head.layer, frame.head.part
                self._after[rank][layer, part] = cache = self._states.taken(frame)
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
        found = (later_check(self, i, done, layers, draw) for i in range(self.split.helpers))
        return [probe for probe in found if probe is not None]

    def context(self, rank: int, layer: int) -> list[Any] | None:
        if min(map(self._of, range(rank)), default=self.split.layers) <= layer:
            return None
        states = self.prefix[layer]
        if rank:
            states = [self._after[rank - 1].get((layer, part)) for part in range(len(states))]
        return self._context(layer, self.split.tokens_of(rank).start, states)

    def arrived(self, rank: int, layer: int) -> bool:
        return self._of(rank) > layer

    def kept(self, rank: int, layer: int) -> list[Any]:
        return [self._after[rank].get((layer, part), own) for part, own in enumerate(self.caches[layer])]

    def last_hidden(self, layer: int) -> mx.array | None:
        return None

    def compared(self, rank: int, layer: int, count: int) -> Rows:
        return self.rows(self.kept(rank, layer), self.split.tokens_of(rank).start, count)

    def hidden(self, rank: int, layer: int, count: int) -> mx.array | None:
        return None


def later_check(
    work: LayersAtHome | TokensAtHome,
    rank: int,
    done: int,
    layers: range,
    draw: random.Random,
    *,
    onward: bool = False,
) -> LaterProbe | None:
    """A check of helper ``rank``'s ``layers``, of its tokens among the first ``done``. ``onward``: also of
    the next layer, which rests on the hidden states that were sent."""
    tokens = work.split.tokens_of(rank)
    further = range(layers.start, min(layers.stop + onward, work.split.layers))
    found: list[LaterProbe | None] = [
        work.later_probe(rank, range(tokens.start, min(tokens.stop, done)), further, draw)
    ]
    if done == work.split.tokens:
        found.append(known_chunk(work, rank, layers, draw))
    able = [one for one in found if one is not None]
    return one_of(able, draw) if able else None


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
