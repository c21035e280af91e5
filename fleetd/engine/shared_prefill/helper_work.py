"""What a helper computes of a shared prefill, and what it sends on.

    layers: tokens or hidden states, chunk by chunk ─► own layers ─► hidden states to the next, rows to home
    tokens: rows of all tokens before, layer by layer ─► cache ─► own tokens through the layer ─► rows of all
            so far to the next, of the own ones to home

No streams, no clock: ``helper_prefill.HelperPrefill`` has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state import row_memory
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import assembled, parts
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated
from fleetd.engine.sequence_state.shapes import KvShape
from fleetd.engine.shared_prefill import frame_payloads, passes
from fleetd.engine.shared_prefill.frame_payloads import LayersArrived, Place, States
from fleetd.engine.shared_prefill.frame_schedule import snapshot_parts
from fleetd.engine.shared_prefill.frame_writer import FrameWriter
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.passes import LayerMajor
from fleetd.engine.shared_prefill.warm_store import WarmCaches
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import Split, SplitKind, prefix_hashes


class _HelperWork:
    """What all kinds of split have in common. ``stage`` has the helper's layers, or more.

    Each of them has besides: ``take_frame(frame)``, which is given each frame; ``computable``: whether
    ``compute()``, one bounded step, has what it needs; ``computed``: whether nothing is left; ``fraction``:
    how much is done.
    """

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, rank: int, warm: WarmCaches | None = None
    ) -> None:
        self.layout, self.split, self.rank, self._warm = layout, split, rank, warm
        self.layers = split.layers_of(rank)
        self.stage = stage.part(self.layers.start, self.layers.stop)
        self.tokens = split.tokens_of(rank)
        self._snapshots = frozenset(split.states_of(rank))
        self.prompt: mx.array | None = None  # (1, T)
        # By layer, the parts of what it keeps.
        self.caches: dict[int, list[Any]] = {}
        self.row_buffers: dict[Place, RowBuffer] = {}
        empty = {
            (layer, part): cache
            for layer, each in zip(self.layers, self.stage.empty, strict=True)
            for part, cache in enumerate(parts(each))
        }
        # Caches with a row per token, once they hold all of this helper's tokens.
        self.whole: dict[Place, Any] = {}
        # Caches whose cached prefix has not come yet.
        self.lacking = set(empty) if split.cached else set()
        if warm is not None and warm.rows.tokens == split.cached:
            self.lacking -= set(warm.caches)
        self.states = States(empty, layout, split)

    def allocate(self, *, arriving: bool) -> None:
        """Make caches. ``arriving``: rows come from another machine even where no prefix is cached."""
        for layer, made in zip(self.layers, self.stage.make_caches(), strict=True):
            self.caches[layer] = list(parts(made))
            for part, shape in enumerate(self.layout.parts(layer)):
                if isinstance(shape, KvShape) and shape.in_rows:
                    before = None if self._warm is None else self._warm.caches.get((layer, part))
                    cache = preallocated(shape, self.tokens.stop, before)
                    self.caches[layer][part] = cache
                    if arriving or self.split.cached:
                        self.row_buffers[layer, part] = RowBuffer(cache)

    def cache(self, layer: int) -> Any:
        """What a layer keeps, as its model takes it."""
        return assembled(self.stage.empty[layer - self.stage.first], self.caches[layer])

    def hold(self, layer: int, caches: Sequence[Any]) -> None:
        """Remember the rows of a layer that is computed and sent."""
        for part, (cache, shape) in enumerate(zip(caches, self.layout.parts(layer), strict=True)):
            if shape.in_rows:
                self.whole[layer, part] = cache

    def buffers(self, head: FrameHeader) -> list[memoryview]:
        """The memory for an expected frame's payload. Called on a reader thread."""
        return frame_payloads.buffers(head, self.layout, self.row_buffers)

    def send_snapshots(self, layer: int, tokens: int, home: FrameWriter) -> None:
        """What is due of a layer after ``tokens``, which it has just computed."""
        if tokens in self._snapshots:
            for part in snapshot_parts(layer, tokens, self.split, self.layout):
                cache = self.caches[layer][part]
                home.cache(kind_of(cache).saved(cache))

    def take_tokens(self, frame: Frame) -> mx.array:
        ids = np.frombuffer(frame.buffers[0], "<i4")
        if self._warm is not None:
            known = self._warm.rows
            if prefix_hashes(bytes(frame.buffers[0]), [known.tokens])[known.tokens] != known.prefix:
                raise ProtocolError("On home came other tokens than those whose rows are here.")
        self.stage.check_tokens(ids.tolist(), len(ids))
        self.prompt = prompt = mx.array(ids)[None]
        return prompt

    def take_prefix(self, frame: Frame) -> None:
        layer, part = frame.head.layer, frame.head.part
        if frame.head.kind is Kind.STATE:
            cache = self.states.received(frame)
            self.states.start((layer, part), cache)
            self.caches[layer][part] = cache
        else:
            kind_of(self.caches[layer][part]).set_held(self.caches[layer][part], self.split.cached)
        self.lacking.discard((layer, part))


class LayersOfHelper(_HelperWork):
    """Work of a helper that runs some layers on all new tokens."""

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, rank: int, warm: WarmCaches | None = None
    ) -> None:
        super().__init__(stage, layout, split, rank, warm)
        self._chunks = deque(split.chunks_of(rank))
        self._n_chunks = len(self._chunks)
        self._hidden: deque[mx.array] = deque()
        self.allocate(arriving=False)

    def take_frame(self, frame: Frame) -> None:
        match frame.head.kind:
            case Kind.TOKENS:
                self.take_tokens(frame)
            case Kind.HIDDEN:
                self._hidden.append(frame_payloads.hidden_of(frame, self.layout))
            case _:
                self.take_prefix(frame)
                self.row_buffers.pop((frame.head.layer, frame.head.part), None)

    @property
    def computable(self) -> bool:
        if not self._chunks or self.lacking or self.prompt is None:
            return False
        return bool(self._hidden) if self.rank else True

    @property
    def computed(self) -> bool:
        return not self._chunks

    @property
    def fraction(self) -> float:
        return 1 - len(self._chunks) / self._n_chunks

    def compute(self, home: FrameWriter, following: FrameWriter | None) -> None:
        """Run the next chunk through the layers, and send the results."""
        if self.prompt is None:
            return
        tokens = self._chunks.popleft()
        ids = self.prompt[:, tokens.start : tokens.stop]
        hidden = self._hidden.popleft() if self.rank else self.stage.embed(ids)
        caches = [self.cache(layer) for layer in self.layers]
        inputs = self.stage.inputs(ids, tokens.start)
        out = passes.run(self.stage, hidden, caches, inputs)
        rows = [row_memory.copied(cache, tokens.start, tokens.stop) for cache in self._kept(in_rows=True)]
        mx.eval(rows)
        passes.evaluate(caches, out)
        mx.clear_cache()
        # The next machine waits for these, and no machine waits for the rows yet.
        if following is not None and out is not None:
            following.hidden(out)
        for keys, values in rows:
            home.rows(keys, values)
        for layer in self.layers:
            self.send_snapshots(layer, tokens.stop, home)
        if not self._chunks:
            for cache in self._kept(in_rows=False):
                home.cache(cache)
            for layer in self.layers:
                self.hold(layer, self.caches[layer])

    def _kept(self, *, in_rows: bool) -> list[Any]:
        """The caches that have a row per token, or those that have not, in the order of their frames."""
        return [
            cache
            for layer in self.layers
            for cache, shape in zip(self.caches[layer], self.layout.parts(layer), strict=True)
            if shape.in_rows is in_rows
        ]


class TokensOfHelper(_HelperWork):
    """Work of a helper that runs all layers on some of the tokens."""

    def __init__(
        self, stage: Stage, layout: KvLayout, split: Split, rank: int, warm: WarmCaches | None = None
    ) -> None:
        super().__init__(stage, layout, split, rank, warm)
        self._major: LayerMajor | None = None
        # Frames of the tokens before this helper's, but for the cached ones.
        self._frames = 0
        self._arriving = LayersArrived(layout, self.layers)
        self.allocate(arriving=rank > 0)

    def take_frame(self, frame: Frame) -> None:
        head = frame.head
        if head.kind is Kind.TOKENS:
            self._major = LayerMajor(self.stage, self.take_tokens(frame), self.split.chunks_of(self.rank))
        elif (head.layer, head.part) in self.lacking:
            self.take_prefix(frame)
            if not self.rank:
                self.row_buffers.pop((head.layer, head.part), None)
        else:
            if head.kind is Kind.STATE:
                self.caches[head.layer][head.part] = self.states.checked(frame)
            else:
                cache = self.caches[head.layer][head.part]
                kind_of(cache).set_held(cache, self.tokens.start)
            self.row_buffers.pop((head.layer, head.part), None)
            self._frames += 1

    @property
    def computable(self) -> bool:
        major = self._major
        if major is None or major.finished:
            return False
        if not major.begins:
            return True
        lacks = any(layer == major.layer for layer, _ in self.lacking)
        return not lacks and (not self.rank or major.layer < self._arriving.after(self._frames))

    @property
    def computed(self) -> bool:
        return self._major is not None and self._major.finished

    @property
    def fraction(self) -> float:
        return 0.0 if self._major is None else self._major.fraction

    def compute(self, home: FrameWriter, following: FrameWriter | None) -> None:
        """Run the next chunk through the next layer, and send the layer once it is complete."""
        if self._major is None:
            return
        layer, tokens = self._major.layer, self._major.next
        ended = self._major.step(self.cache(layer))
        self.send_snapshots(layer, tokens.stop, home)
        if ended:
            # Only the streams need them now, and free them as they go.
            ended_caches = self.caches.pop(layer)
            self.hold(layer, ended_caches)
            for cache in ended_caches:
                if following is not None:
                    following.cache(cache)
                home.cache(cache)


_WORK: dict[SplitKind, type[LayersOfHelper | TokensOfHelper]] = {
    "layers": LayersOfHelper,
    "tokens": TokensOfHelper,
}


def helper_work(
    stage: Stage, layout: KvLayout, split: Split, rank: int, warm: WarmCaches | None = None
) -> LayersOfHelper | TokensOfHelper:
    """The work of helper ``rank`` of ``split``. ``warm``: rows that are here already."""
    return _WORK[split.kind](stage, layout, split, rank, warm)
