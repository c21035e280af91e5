"""What a home worker does in any shared prefill: the caches, and what it makes of the helpers' frames.

No streams, no clock: ``home_prefill.SharedPrefill`` has them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state import checkpoints, rings, row_memory
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import assembled, parts
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated
from fleetd.engine.sequence_state.shapes import KvShape
from fleetd.engine.shared_prefill import frame_payloads
from fleetd.engine.shared_prefill.frame_payloads import Place, States
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.spot_check import LaterRows, Probe, Rows, drawn, one_of
from fleetd.engine.shared_prefill.state_check import KnownChunk, Snapshots, known_chunk
from fleetd.engine.streams.frames import Frame, FrameHeader
from fleetd.plan.prefill.split import Split

# A probe made once all is here, and what it is compared with.
LaterProbe = tuple[Probe, LaterRows | KnownChunk]


class HomePart(ABC):
    """The home's own layers or tokens, and the rows of all others as they arrive. It is a ``ReceivedRows``.

    ``checked_first``: whether ``done`` grows before the end, so that the spot check comes before other work.
    ``received``: the layers of which rows arrive.
    """

    checked_first: ClassVar[bool]

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, prompt: mx.array, prefix: Sequence[Any] | None
    ) -> None:
        self.stage, self.layout, self.split, self.prompt = stage, layout, split, prompt
        self.received = range(split.layers)
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

    # ---- what arrives, and what is computed of it ------------------------------------------------------

    def allocate(self) -> None:
        """Make room for what will arrive."""
        for layer in range(self.split.layers):
            self.caches[layer] = self.make(layer, self.split.tokens)
        for layer, part in self.places(self.received, in_rows=True):
            self.row_buffers[layer, part] = RowBuffer(self.caches[layer][part])

    @abstractmethod
    def take_frame(self, rank: int, frame: Frame) -> None:
        """Use a frame of helper ``rank``; its rows are in their buffers already."""

    @property
    @abstractmethod
    def computable(self) -> bool:
        """True if ``compute`` has what it needs."""

    @property
    @abstractmethod
    def computed(self) -> bool:
        """True once nothing is left of this machine's own part."""

    @abstractmethod
    def compute(self) -> None:
        """Compute one bounded step of this machine's own part."""

    @property
    @abstractmethod
    def done(self) -> int:
        """Leading tokens whose keys and values are here in all layers."""

    @property
    @abstractmethod
    def fraction(self) -> float:
        """The share of the whole prefill that is done."""

    @property
    @abstractmethod
    def next_fraction(self) -> float:
        """The share that will be done once the part that is waited for is here."""

    @abstractmethod
    def behind(self) -> int:
        """The helper that is waited for."""

    # ---- what is kept ----------------------------------------------------------------------------------

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
                made.append(preallocated(shape, tokens, prefix))
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
            row_memory.begun(cache, tokens) if shape.in_rows else rings.before(cache, tokens)
            for cache, shape in zip(self.kept(rank, layer), self.layout.parts(layer), strict=True)
        ]

    def buffers(self, head: FrameHeader) -> list[memoryview]:
        """The memory for an expected frame's payload. Called on a reader thread, after ``allocate``."""
        return frame_payloads.buffers(head, self.layout, self.row_buffers)

    def caches_at(self, done: int) -> list[Any]:
        """Caches of the first ``done`` tokens: the property ``done``, or the cached tokens."""
        if done == self.split.tokens:
            found = self.caches
        elif not done:
            found = [list(parts(empty)) for empty in self.stage.make_caches()[: self.split.layers]]
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

    def _extendable(self, layer: int, tokens: int, states: Sequence[Any] | Mapping[int, Any]) -> list[Any]:
        """Caches of the first ``tokens``, to be added to. ``states``: those without a row per token."""
        return [
            row_memory.begun(self.caches[layer][part], tokens)
            if shape.in_rows
            else copy_on_write(states[part])
            for part, shape in enumerate(self.layout.parts(layer))
        ]

    def after(self, layer: int, tokens: int) -> list[Any]:
        """``state_check.HomeStates.after``."""
        return self._extendable(layer, tokens, self.snapshots.after(tokens, layer))

    # ---- for the spot check ----------------------------------------------------------------------------

    @abstractmethod
    def probes(self) -> list[Probe]:
        """Probes of the first tokens, one for each helper at most."""

    @abstractmethod
    def later_probes(self, done: int, draw: random.Random) -> list[LaterProbe]:
        """Probes of tokens drawn from the first ``done``, one for each helper at most. Where states are kept:
        or of one of each helper's chunks."""

    @abstractmethod
    def end_probe(self, done: int, draw: random.Random) -> LaterProbe | None:
        """The probe of the last ones of the first ``done`` tokens that helpers computed; None where nothing
        of them can be compared."""

    @abstractmethod
    def context(self, rank: int, layer: int) -> list[Any] | None:
        """``ReceivedRows.context``."""

    @abstractmethod
    def arrived(self, rank: int, layer: int) -> bool:
        """``ReceivedRows.arrived``."""

    @abstractmethod
    def compared(self, rank: int, layer: int, count: int) -> Rows:
        """``ReceivedRows.compared``."""

    def hidden(self, rank: int, layer: int, count: int) -> mx.array | None:
        """``ReceivedRows.hidden``."""
        return None

    def last_hidden(self, layer: int) -> mx.array | None:
        """``state_check.HomeStates.last_hidden``."""
        return None

    def owner(self, rank: int, layer: int) -> int:
        """The helper that computes a layer of the tokens of helper ``rank``."""
        return rank

    def probe(self, rank: int, tokens: range, layers: range) -> Probe:
        # No more than the first chunk, which is the first thing that arrives.
        count = min(len(tokens), self.split.chunk, limits.SHARE_SPOT_TOKENS)
        return self._through(rank, range(tokens.start, tokens.start + count), layers)

    def _through(self, rank: int, tokens: range, layers: range) -> Probe:
        parts = [self.stage.part(layer, layer + 1) for layer in layers]
        return Probe.of(rank, parts, self.prompt, tokens)

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

    def later_check(
        self, rank: int, done: int, layers: range, draw: random.Random, *, onward: bool = False
    ) -> LaterProbe | None:
        """A check of helper ``rank``'s ``layers``, of its tokens among the first ``done``.

        ``onward``: also of the next layer, which rests on the hidden states that were sent.
        """
        tokens, further = self.split.tokens_of(rank), self._further(layers, onward=onward)
        found: list[LaterProbe | None] = [
            self.later_probe(rank, range(tokens.start, min(tokens.stop, done)), further, draw)
        ]
        if done == self.split.tokens:
            found.append(known_chunk(self, rank, layers, draw))
        able = [one for one in found if one is not None]
        return one_of(able, draw) if able else None

    def end_check(
        self, rank: int, done: int, layers: range, draw: random.Random, *, onward: bool = False
    ) -> LaterProbe | None:
        """The same of the last ones of these tokens: in all layers but the last they rest on all before."""
        tokens, further = self.split.tokens_of(rank), self._further(layers, onward=onward)
        stop = min(tokens.stop, done)
        last = range(max(tokens.start, stop - limits.SHARE_END_TOKENS), stop)
        found: LaterProbe | None = self.later_probe(rank, last, further, draw)
        if found is None and done == self.split.tokens:
            found = known_chunk(self, rank, layers, draw, last=True)
        return found

    def _further(self, layers: range, *, onward: bool) -> range:
        return range(layers.start, min(layers.stop + onward, self.split.layers))

    def rows(self, caches: Sequence[Any], start: int, count: int) -> Rows:
        """Keys and values of tokens [start, start + count), where each of a layer's caches still has them."""
        return [kind_of(cache).rows(cache, start, count) for cache in caches]
