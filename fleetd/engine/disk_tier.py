"""The disk beside the prefix cache: what a prompt's keys and values are as blocks, and back.

Only for models whose every layer keeps a row per token. Rows are written from and read into the caches'
own memory, by threads of ``fleetd.cache``; the compute thread only says which.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from fleetd import limits
from fleetd.cache import block_names
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.cache.pricing import PrefillCost, restore_s, worth_per_gib
from fleetd.cache.restoring import BlockReader, Restore, RestoreState
from fleetd.cache.settings import DiskCacheSettings
from fleetd.cache.write_behind import BlocksToWrite, WriteBehind, WriterFigures
from fleetd.engine.prefix_cache import DENSE, Hit, PrefixCache
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated
from fleetd.engine.sequence_state.shapes import KvShape

_BLOCK = limits.CACHE_BLOCK_TOKENS


def namespace(arithmetic: str, *, local_only: bool) -> str:
    """``arithmetic``: the prefix cache's namespace. Prompts that may not leave this machine are kept apart:
    no other machine is ever told of them."""
    return f"{arithmetic}, local only" if local_only else arithmetic


@dataclass(frozen=True, slots=True)
class _RowLayout:
    """What each layer keeps per token. ``text``: equal for equal layouts."""

    layers: tuple[KvShape, ...]

    @classmethod
    def of(cls, cache: Sequence[KVCache]) -> _RowLayout:
        """Of caches in which there is something."""
        shapes = ((c.keys.shape, c.values.shape, c.keys.dtype) for c in cache)
        return cls(tuple(KvShape(k[1], k[3], v[3], dtype, 0) for k, v, dtype in shapes))

    @property
    def text(self) -> str:
        parts = ((s.heads, s.key_width, s.value_width, str(s.dtype)) for s in self.layers)
        return "rows " + hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()[:32]

    def header(self, number: int) -> BlockHeader:
        """Of a block of this number: each head's keys, then each head's values, layer by layer."""
        sizes = []
        for shape in self.layers:
            for width in (shape.key_width, shape.value_width):
                sizes += [_BLOCK * width * shape.dtype.size] * shape.heads
        return BlockHeader(self.text, (number + 1) * _BLOCK, sizes)


def _rows(buffers: Sequence[RowBuffer], number: int) -> list[memoryview]:
    return [row for buffer in buffers for row in buffer.rows(number * _BLOCK, (number + 1) * _BLOCK)]


@dataclass
class DiskTier:
    """``basis``: decides the bytes besides the tokens. ``cost``: of this model's prefill on this machine.
    ``most_queued_bytes``: of keys and values that wait to be written."""

    settings: DiskCacheSettings
    model: Any
    model_name: str
    basis: bytes
    cost: PrefillCost
    most_queued_bytes: int
    wake: Callable[[], None] = field(default=lambda: None, init=False)

    def __post_init__(self) -> None:
        self.writer = WriteBehind(self._open, self.most_queued_bytes)
        self.reader = BlockReader(self._open, lambda: self.wake())
        self._layout: _RowLayout | None = None

    @classmethod
    def suits(cls, cache: Sequence[Any]) -> bool:
        """True if a model with these caches can be kept in blocks."""
        return bool(cache) and all(type(layer) is KVCache for layer in cache)

    def _open(self) -> BlockStore:
        return BlockStore(self.settings)

    @property
    def figures(self) -> WriterFigures:
        return self.writer.figures

    def free_memory(self) -> None:
        """Let go of what waits to be written."""
        self.writer.drop()

    def close(self) -> None:
        """Write what is queued, within ``limits.CACHE_FLUSH_S``."""
        self.reader.close()
        self.writer.close()

    # ---- to the disk -------------------------------------------------------------------------------------

    def store(self, tokens: list[int], cache: list[Any], arithmetic: str, *, local_only: bool) -> None:
        """Queue the whole blocks of ``tokens``, which ``cache`` holds, evaluated and not written to again."""
        names = self._names(tokens, arithmetic, local_only=local_only)
        if not names or not self.suits(cache):
            return
        layout = self._layout = self._layout or _RowLayout.of(cache)
        buffers = [RowBuffer(layer) for layer in cache]
        header = layout.header(0)
        self.writer.put(
            BlocksToWrite(
                self.model_name,
                names,
                self._worth(names, header.nbytes),
                sum(int(layer.nbytes) for layer in cache),
                layout.header,
                lambda number: _rows(buffers, number),
            )
        )

    def _names(self, tokens: list[int], arithmetic: str, *, local_only: bool) -> list[bytes]:
        found = block_names.names(self.basis, namespace(arithmetic, local_only=local_only), tokens)
        return [block_names.kept_as(name, local_only=local_only) for name in found]

    def names_for_others(self, tokens: list[int]) -> list[bytes]:
        """What other machines call the whole blocks of ``tokens``, if they compute the same bytes."""
        return block_names.names(self.basis, DENSE, tokens)

    def _worth(self, names: Sequence[bytes], block_bytes: int) -> float:
        tokens = len(names) * _BLOCK
        return worth_per_gib(self.cost.seconds(0, tokens), len(names) * block_bytes)

    # ---- from the disk -----------------------------------------------------------------------------------

    def begin(
        self, tokens: list[int], prefix: PrefixCache, arithmetics: Sequence[str], *, local_only: bool
    ) -> Restoring | None:
        """Look for the beginning of a prompt whose last token is left to compute; None if the prefix cache
        has all that the disk could have."""
        have = prefix.longest(tokens, *arithmetics)
        head = tokens[:-1]
        if have >= block_names.whole_blocks(len(head)) * _BLOCK:
            return None
        candidates = [(a, self._names(head, a, local_only=local_only)) for a in arithmetics]
        return Restoring(self, tokens, prefix, have, self.reader.look(self.model_name, candidates))

    def layout(self) -> _RowLayout:
        """Computed from one token if no prompt was computed yet."""
        if self._layout is None:
            cache = make_prompt_cache(self.model)
            self.model(mx.array([[0]]), cache=cache)
            self._layout = _RowLayout.of(cache)
        return self._layout


class Restoring:
    """One prompt's beginning on its way from the disk into caches with room for the whole prompt. ``have``:
    tokens of it that the prefix cache holds."""

    def __init__(
        self, tier: DiskTier, tokens: list[int], prefix: PrefixCache, have: int, restore: Restore
    ) -> None:
        self._tier = tier
        self._tokens = tokens
        self._prefix = prefix
        self._have = have
        self._restore = restore
        self._begun_s = time.monotonic()
        self._cache: list[KVCache] = []
        self._first = 0
        self.tokens = 0
        self.n_bytes = 0

    @property
    def ready(self) -> bool:
        """True if ``step`` has something to do."""
        return (
            self._restore.state in (RestoreState.FOUND, RestoreState.DONE)
            or time.monotonic() >= self._restore.due_s
        )

    @property
    def due_s(self) -> float:
        """When it is ready even if the disk hangs, in monotonic seconds."""
        return self._restore.due_s

    @property
    def seconds(self) -> float:
        """Since the prompt was looked for."""
        return time.monotonic() - self._begun_s

    def step(self) -> Hit | None:
        """Go on, if it is ready. At the end the restored beginning, which has 0 tokens where the disk was of
        no use; None before that."""
        if self._restore.state is RestoreState.FOUND:
            if not self._pays():
                return self._none()
            self._read()
            return None
        if self._restore.state is not RestoreState.DONE:
            if not self.ready:
                return None
            self.close()
        return self._hit()

    def close(self) -> None:
        """Wait for nothing more."""
        self._tier.reader.give_up(self._restore)

    def _pays(self) -> bool:
        """True if reading is predicted to be sooner than computing what the prefix cache lacks."""
        restore = self._restore
        self._first = self._have // _BLOCK
        blocks = restore.found.blocks - self._first
        if restore.found.blocks * _BLOCK <= self._have:
            return False
        n_bytes = restore.found.nbytes * blocks // restore.found.blocks
        computed_s = self._tier.cost.seconds(self._have, restore.found.blocks * _BLOCK)
        return restore_s(n_bytes, restore.found.bytes_per_s) < computed_s

    def _read(self) -> None:
        layout, namespace_ = self._tier.layout(), self._restore.namespace
        memory = self._prefix.fetch(self._tokens, namespace_) if self._first else Hit(0, None)
        # Of two namespaces the other one may have had more.
        self._first = min(self._first, memory.tokens // _BLOCK)
        before = memory.cache or [None] * len(layout.layers)
        self._cache = [
            preallocated(shape, len(self._tokens), prefix)
            for shape, prefix in zip(layout.layers, before, strict=True)
        ]
        buffers = [RowBuffer(layer) for layer in self._cache]

        def targets(number: int, header: BlockHeader) -> list[memoryview]:
            if header != layout.header(number):
                raise BlockDamaged("a block of another layout")
            return _rows(buffers, number)

        worth = self._tier._worth(self._restore.names, layout.header(0).nbytes)
        self._tier.reader.read(self._restore, self._first, worth, targets)

    def _hit(self) -> Hit:
        blocks = self._restore.blocks
        if not self._cache or blocks * _BLOCK <= self._have:
            return self._none()
        self.tokens = (blocks - self._first) * _BLOCK
        self.n_bytes = (blocks - self._first) * self._tier.layout().header(0).nbytes
        for layer in self._cache:
            layer.offset = blocks * _BLOCK
        saved_s = self._tier.cost.seconds(self._have, blocks * _BLOCK) - self.seconds
        self._tier.reader.count(self._restore, self.tokens, self.n_bytes, saved_s)
        return Hit(blocks * _BLOCK, list(self._cache), self._restore.namespace)

    def _none(self) -> Hit:
        self._cache = []
        return Hit(0, None, DENSE)
