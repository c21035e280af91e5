"""Copies of caches, and caches made of arrays."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from fleetd.engine.sequence_state.packed_caches import emptied


def copy_on_write(cache: Any) -> Any:
    """A cache that can be added to without changing this one. Nothing is copied until then."""
    return copy.deepcopy(cache)  # an array's copy is a second name for its memory


def cache_of(like: Any, keys: mx.array, values: mx.array, tokens: int) -> KVCache:
    """A cache that holds rows as ``like`` does, and whose first ``tokens`` are those of ``keys`` and
    ``values``, which it takes over."""
    cache = emptied(like)
    cache.keys, cache.values, cache.offset = keys, values, tokens
    return cache


def beginning(cache: KVCache, tokens: int) -> KVCache:
    """A cache of the first ``tokens`` rows, copied, without the room to grow that ``cache`` may have."""
    keys, values = (mx.contiguous(part[..., :tokens, :]) for part in (cache.keys, cache.values))
    return cache_of(cache, keys, values, tokens)
