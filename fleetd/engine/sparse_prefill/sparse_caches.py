"""KV caches in which a token's slot is not its position.

    positions   0 1 2 3 4 5 6 7 8 9     kept 0 1 2 7 9, to be decoded at 10
    slots       0 1 2 . . . . 3 . 4     the next slot is 5: ``ahead`` is 5

Full attention only needs the true position of each new token: every key it meets was rotated by its own. In
mlx-lm's batch a row's ``offset`` is its position and its slots are counted apart, so a row that is ahead
is one like any other. A sliding window hides keys by position; once the whole window is without gaps, its
cache is that of a dense prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, create_attention_mask

from fleetd.engine.sequence_state.copies import beginning
from fleetd.engine.sequence_state.kinds import Rows, register
from fleetd.engine.sequence_state.packed_caches import PackedBatchKVCache, PackedCache, PackedKVCache
from fleetd.engine.sequence_state.rings import ring
from fleetd.engine.sequence_state.row_packing import RowPacking
from fleetd.engine.sparse_prefill.rope import RopeOffset

_Positions = npt.NDArray[np.int64]
_DENSE_ROWS = (KVCache, PackedKVCache)


class SparseKV(KVCache):  # type: ignore[misc]
    """Full attention. ``offset`` counts slots, as in a KVCache; ``ahead`` is what positions have more."""

    offset: int

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0

    @classmethod
    def after(cls, dense: KVCache) -> SparseKV:
        """Takes over the rows of a dense prefix, which are held as there."""
        cache = PackedSparseKV(dense.packing) if isinstance(dense, PackedCache) else cls()
        cache.keys, cache.values, cache.offset = dense.keys, dense.values, dense.offset
        return cache

    def expect(self, positions: Sequence[int]) -> None:
        """The next pass computes tokens at ``positions``, ascending."""
        self.offset = RopeOffset.at(int(self.offset), positions)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        # Not by the method of the base: MLX takes no subclass of int for an offset.
        return create_attention_mask(n, int(self.offset), return_array, window_size)

    def finished(self, position: int) -> SparseKV:
        """Decoding goes on at ``position``."""
        self.ahead = position - self.offset
        return self

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchKVCache:
        """Merge as KVCache does, each row at its own position; see ``rows``."""
        batch = BatchKVCache.merge(caches)
        batch.offset = batch.offset + mx.array([getattr(cache, "ahead", 0) for cache in caches])
        return batch


class PackedSparseKV(PackedCache, SparseKV):
    """The same with rows that are held quantised."""

    def __init__(self, packing: RowPacking) -> None:
        super().__init__()
        self.packing = packing

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PackedBatchKVCache:
        return PackedBatchKVCache.of(super().merge(caches), caches[0].packing)


class ApartKV(SparseKV):
    """A SparseKV of a sequence that is decoded by itself, maybe several tokens per pass: the tokens of each
    pass follow those before without a gap, so ``offset`` tells their first position unasked."""

    def __init__(self) -> None:
        self._slots = 0
        super().__init__()

    @classmethod
    def of(cls, cache: KVCache, ahead: int) -> ApartKV:
        """Takes over the rows of a full attention's cache; positions are ``ahead`` of its slots."""
        made = cls()
        made.keys, made.values, made.offset, made.ahead = cache.keys, cache.values, cache.offset, ahead
        return made

    @property
    def offset(self) -> RopeOffset:
        return RopeOffset(self._slots, self._slots + self.ahead)

    @offset.setter
    def offset(self, slots: int) -> None:
        self._slots = int(slots)

    def together(self) -> SparseKV:
        """The same rows as a batch takes them."""
        cache = SparseKV.after(self)
        cache.offset, cache.ahead = self._slots, self.ahead
        return cache


class SparseWindow:
    """A sliding window while a prompt is prefilled: the rows that the coming tokens can still see.

    ``max_size`` is the window, the token itself included.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self._held: _Positions = np.empty(0, np.int64)
        self._coming: _Positions = np.empty(0, np.int64)

    @classmethod
    def after(cls, dense: RotatingKVCache) -> SparseWindow:
        """Takes over the rows of a dense prefix."""
        cache = cls(dense.max_size)
        if dense.keys is not None:
            cache.keys = dense._temporal_order(dense.keys)
            cache.values = dense._temporal_order(dense.values)
            cache._held = np.arange(dense.offset - cache.keys.shape[2], dense.offset)
        cache.offset = dense.offset
        return cache

    def expect(self, positions: Sequence[int]) -> None:
        """Expect tokens as SparseKV does, and drop the rows that none of them sees."""
        self._coming = np.array(positions, np.int64)
        hidden = int(np.searchsorted(self._held, positions[0] - self.max_size, side="right"))
        if hidden and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[..., hidden:, :], self.values[..., hidden:, :]
            self._held = self._held[hidden:]
        self.offset = RopeOffset.at(int(self.offset), positions)

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> Any:
        window = window_size or self.max_size
        asks = self._coming[:, None]
        keys = np.concatenate([self._held, self._coming])[None]
        near = asks - keys < window
        if near.all() and not return_array:
            return None if n == 1 else "causal"
        return mx.array(near & (keys <= asks))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self._held = np.concatenate([self._held, self._coming])
        self.offset += len(self._coming)
        return keys, values

    def finished(self, position: int) -> RotatingKVCache:
        """What a dense prompt would have here; the ``max_size`` tokens before ``position`` must be held."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing was computed")
        rows = min(self.max_size, position)
        if not np.array_equal(self._held[-rows:], np.arange(position - rows, position)):
            raise ValueError("a window with gaps cannot be decoded in")
        keys, values = (mx.contiguous(array[..., -rows:, :]) for array in (self.keys, self.values))
        return ring(RotatingKVCache(self.max_size), keys, values, position, rows)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else int(self.keys.nbytes + self.values.nbytes)


class _SparseRows(Rows):
    """A SparseKV: its rows are those of the tokens that were computed, in order."""

    def cut(self, cache: SparseKV, stored: int, tokens: int) -> SparseKV:
        return SparseKV.after(beginning(cache, tokens))

    def compact(self, cache: SparseKV) -> SparseKV:
        return self.cut(cache, cache.offset, cache.offset)


register(SparseKV, _SparseRows())
register(PackedSparseKV, _SparseRows())
register(ApartKV, _SparseRows())


@singledispatch
def sparse_cache(empty_or_prefix: Any) -> Any:
    """The sparse kind of a dense cache, which may hold a prefix. Raises TypeError for other kinds. Packages
    that define caches register theirs."""
    if type(empty_or_prefix) in _DENSE_ROWS:
        return SparseKV.after(empty_or_prefix)
    if type(empty_or_prefix) is RotatingKVCache and empty_or_prefix.keep == 0:
        return SparseWindow.after(empty_or_prefix)
    raise TypeError(f"no sparse kind of {type(empty_or_prefix).__name__}")


@singledispatch
def dense_beginning(cache: Any, tokens: int) -> Any:
    """A dense cache of the first ``tokens`` slots, which have no gap; None of a window."""
    return beginning(cache, tokens) if isinstance(cache, SparseKV) else None


def as_sparse(caches: Sequence[Any]) -> list[Any]:
    """The sparse kinds of caches, some of which may be sparse already."""
    return [each if isinstance(each, SparseKV | SparseWindow) else sparse_cache(each) for each in caches]


def rows(cache: Sequence[Any]) -> list[Any]:
    """``cache`` as a batch is to take it. A batch is made by the first row's ``merge``, and a dense row's
    would take a sparse one's slots for positions: every row comes as one that may be sparse."""
    return [_row(layer) for layer in cache]


def _row(layer: Any) -> Any:
    if isinstance(layer, ApartKV):
        return layer.together()
    return SparseKV.after(layer) if type(layer) in _DENSE_ROWS else layer


def can_part(cache: Sequence[Any]) -> bool:
    """True if a sparse prompt with these caches can be decoded by itself. Those of other packages cannot, nor
    those whose rows are held quantised."""
    return all(
        isinstance(layer, KVCache | RotatingKVCache) and not isinstance(layer, PackedCache) for layer in cache
    )


def parted(cache: Sequence[Any], ahead: int) -> list[Any]:
    """The caches of a sparse prompt that is decoded by itself, where positions are ``ahead`` of slots. A
    window's is that of a dense prompt."""
    return [ApartKV.of(layer, ahead) if isinstance(layer, KVCache) else layer for layer in cache]
