"""mlx-lm's caches of rows whose keys and values are held quantised (``row_packing``).

A row is quantised when it is computed, before any token attends to it, and attention is given numbers again:
all rows of one layer at a time. So the models' own attention runs, and what an answer is does not depend on
how a prompt was cut into chunks, on a batch or on drafts, if it does not without quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from fleetd.engine.sequence_state.row_packing import RowPacking


class PackedCache:
    """A part of a cache class of mlx-lm, before its own: ``keys`` and ``values`` are words."""

    # Not ``bits``: by that name mlx-lm's attention knows arrays of another form.
    packing: RowPacking

    @classmethod
    def of(cls, words: Any, packing: RowPacking) -> Self:
        """A cache that takes over the arrays of one of words."""
        found = cls.__new__(cls)
        vars(found).update(vars(words))
        found.packing = packing
        return found

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add rows; returns the numbers of all."""
        base: Any = super()
        found: tuple[mx.array, mx.array] = base.update_and_fetch(
            self.packing.pack(keys), self.packing.pack(values)
        )
        return found  # of ``keys_and_values``, as the classes of mlx-lm have it

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The numbers of all rows."""
        base: Any = super()
        keys, values = base.keys_and_values()
        return (
            self.packing.unpack(keys, self.packing.key_width),
            self.packing.unpack(values, self.packing.value_width),
        )


class PackedKVCache(PackedCache, KVCache):  # type: ignore[misc]
    """The rows of one sequence."""

    def __init__(self, packing: RowPacking) -> None:
        super().__init__()
        self.packing = packing

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PackedBatchKVCache:
        return PackedBatchKVCache.of(BatchKVCache.merge(caches), caches[0].packing)


class PackedBatchKVCache(PackedCache, BatchKVCache):  # type: ignore[misc]
    """The rows of several sequences."""

    def extract(self, idx: int) -> PackedKVCache:
        return PackedKVCache.of(super().extract(idx), self.packing)


def emptied(cache: Any) -> KVCache:
    """A cache of rows, as ``cache`` holds them, with nothing in it."""
    packing = getattr(cache, "packing", None)
    return KVCache() if packing is None else PackedKVCache(packing)


def with_packings(empty: Any, packings: Sequence[RowPacking | None]) -> Any:
    """A layer's cache with nothing in it, whose parts hold plain rows as ``packings`` say: quantised, or as
    they are. Parts of other kinds stay. ``empty`` is not changed."""
    if isinstance(empty, CacheList):
        each = zip(empty.caches, packings, strict=True)
        return CacheList(*(with_packings(part, [packing]) for part, packing in each))
    if type(empty) not in (KVCache, PackedKVCache):
        return empty
    (packing,) = packings
    return KVCache() if packing is None else PackedKVCache(packing)
