"""How far a cache that rotates has rotated."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache


@dataclass(frozen=True, slots=True)
class RingState:
    """How far a cache has rotated: tokens seen, rows held, and where the next is written."""

    seen: int = 0
    held: int = 0
    index: int = 0

    @classmethod
    def of(cls, cache: RotatingKVCache) -> RingState:
        held = 0 if cache.keys is None else cache.keys.shape[2]
        return cls(int(cache.offset), held, int(cache._idx))

    def after(self, empty: RotatingKVCache, sizes: Iterable[int]) -> RingState:
        """After chunks of ``sizes`` more: mlx-lm's own cache tells, with rows of one number each."""
        shadow = copy.copy(empty)
        shadow.offset, shadow._idx = self.seen, self.index
        if self.held:
            shadow.keys = shadow.values = mx.zeros((1, 1, self.held, 1))
        for size in sizes:
            chunk = mx.zeros((1, 1, size, 1))
            shadow.update_and_fetch(chunk, chunk)
        return RingState.of(shadow)

    def row_of(self, token: int) -> int | None:
        """The row that holds ``token``, where rows are still in the order of their tokens; else None."""
        first = max(0, self.seen - self.held)
        ordered = self.index == min(self.held, self.seen)
        return token - first if ordered and token >= first else None
