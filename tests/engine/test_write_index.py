"""The member of mlx-lm's caches that this project relies on is there in the version that is installed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.sequence_state.write_index import set_write_index, write_index

pytestmark = pytest.mark.usefixtures("on_cpu")


def rows(count: int, first: float = 0.0) -> mx.array:
    return mx.arange(first, first + count)[None, None, :, None] * mx.ones((1, 1, 1, 64))


def test_a_cache_that_rotates_says_where_it_writes_next() -> None:
    cache = RotatingKVCache(8)
    assert write_index(cache) == 0
    cache.update_and_fetch(rows(5), rows(5))
    assert write_index(cache) == 5
    for token in range(5, 10):
        cache.update_and_fetch(rows(1, token), rows(1, token))
    # The tenth token lies where the second one did.
    assert RingState.of(cache) == RingState(10, 8, 2)
    end = kind_of(cache).end(cache)
    assert cache.keys[0, 0, end - 1, 0].item() == 9


def test_so_do_caches_of_a_batch() -> None:
    one, window = KVCache(), RotatingKVCache(8)
    for cache in (one, window):
        cache.update_and_fetch(rows(5), rows(5))
    for batch in (BatchKVCache.merge([one]), BatchRotatingKVCache.merge([window])):
        assert write_index(batch) == 5


def test_a_cache_without_that_member_is_refused_instead_of_given_another() -> None:
    with pytest.raises(AttributeError, match="has no _idx"):
        set_write_index(KVCache(), 3)


def test_rows_of_packed_numbers_are_cut_in_all_their_arrays() -> None:
    cache = QuantizedKVCache(group_size=64, bits=8)
    cache.update_and_fetch(rows(9), rows(9))
    kind = kind_of(cache)
    found = kind.rows(cache, 2, 4)
    assert found is not None
    assert [array.shape[2] for array in found] == [4] * 6
    for part, whole in zip(found, kind.arrays(cache), strict=True):
        assert mx.array_equal(part, whole[..., 2:6, :])
