"""How far a cache that rotates has rotated, and how it was at an earlier token."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Annotated

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import RotatingKVCache
from msgspec import Meta

from fleetd import limits
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.write_index import set_write_index, write_index

_Count = Annotated[int, Meta(ge=0, le=limits.CACHE_TOKENS)]


class RingState(msgspec.Struct, frozen=True):
    """How far a cache has rotated: tokens seen, rows held, and where the next is written."""

    seen: _Count
    held: _Count
    index: _Count

    @classmethod
    def of(cls, cache: RotatingKVCache) -> RingState:
        held = 0 if cache.keys is None else cache.keys.shape[2]
        return cls(int(cache.offset), held, write_index(cache))

    def after(self, empty: RotatingKVCache, sizes: Iterable[int]) -> RingState:
        """After chunks of ``sizes`` more: mlx-lm's own cache tells, with rows of one number each."""
        rows = mx.zeros((1, 1, self.held, 1)) if self.held else None
        shadow = ring(empty, rows, rows, self.seen, self.index)
        for size in sizes:
            chunk = mx.zeros((1, 1, size, 1))
            shadow.update_and_fetch(chunk, chunk)
        return RingState.of(shadow)

    def saved(self, empty: RotatingKVCache) -> RingState:
        """The state in a copy by ``StateKind.saved``. A chunk leaves more rows than the window has; what
        is added next drops these before anything else, and the copy does without them."""
        window = int(empty.max_size)
        if empty.keep or self.index != self.held or self.held <= window:
            return self
        return RingState(self.seen, window, window)

    @property
    def first(self) -> int:
        """The first token that is still held."""
        return max(0, self.seen - self.held)


def ring(
    like: RotatingKVCache, keys: mx.array | None, values: mx.array | None, seen: int, index: int
) -> RotatingKVCache:
    """A cache of the kind of ``like`` with these rows, after ``seen`` tokens."""
    cache = copy.copy(like)
    cache.keys, cache.values, cache.offset = keys, values, seen
    set_write_index(cache, index)
    return cache


def rows(cache: RotatingKVCache, start: int, count: int) -> tuple[mx.array, mx.array] | None:
    """Keys and values of tokens [start, start + count), if all of them are still held; else None."""
    at = RingState.of(cache)
    if start < at.first or _is_mixed(cache, at):
        return None
    begin, stop = start - at.first, start - at.first + count
    return _in_order(cache.keys, at)[..., begin:stop, :], _in_order(cache.values, at)[..., begin:stop, :]


def saved(cache: RotatingKVCache) -> RotatingKVCache:
    """A copy that can be added to, without the rows that the next tokens drop."""
    at = RingState.of(cache)
    short = at.saved(cache)
    own = copy_on_write(cache)
    if short != at:
        own.keys, own.values = (mx.contiguous(x[..., -short.held :, :]) for x in (cache.keys, cache.values))
        set_write_index(own, short.index)
    return own


def first_cut(cache: RotatingKVCache) -> int:
    """The first token at which ``before`` can cut: a chunk leaves more rows than the window has."""
    at = RingState.of(cache)
    if not at.first:
        return 0
    return at.seen if _is_mixed(cache, at) else min(at.first + int(cache.max_size) - 1, at.seen)


def before(cache: RotatingKVCache, tokens: int) -> RotatingKVCache:
    """A cache of the first ``tokens``, to be added to; see ``first_cut``. Its rows are copies."""
    room = min(tokens, int(cache.max_size))
    count = min(tokens - RingState.of(cache).first, room)
    found = rows(cache, tokens - count, count) if count else None
    keys, values = (None, None) if found is None else (_filled(x, room) for x in found)
    return ring(cache, keys, values, tokens, room)


def _filled(rows: mx.array, room: int) -> mx.array:
    """A copy. The next token displaces the oldest row of a full window before it is read: zeros will do."""
    lacking = rows[..., : room - rows.shape[-2], :]
    return mx.contiguous(mx.concatenate([mx.zeros_like(lacking), rows], axis=-2))


def _is_mixed(cache: RotatingKVCache, at: RingState) -> bool:
    """True if the first rows, which such a cache always keeps, are no longer followed by the next tokens'."""
    return bool(cache.keep) and at.first > 0


def _in_order(rows: mx.array, at: RingState) -> mx.array:
    if at.index >= min(at.held, at.seen):
        return rows
    return mx.concatenate([rows[..., at.index :, :], rows[..., : at.index, :]], axis=-2)
