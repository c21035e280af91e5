"""Copies of mlx-lm's KV caches, and their beginnings."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


def copy_on_write(cache: Any) -> Any:
    """A cache that can be added to without changing this one. Nothing is copied until then."""
    return copy.deepcopy(cache)  # an array's copy is a second name for its memory


def beginning(cache: KVCache, tokens: int) -> KVCache:
    """A cache of the first ``tokens`` rows, copied, without the room to grow that ``cache`` may have."""
    short = KVCache()
    short.keys = mx.contiguous(cache.keys[..., :tokens, :])
    short.values = mx.contiguous(cache.values[..., :tokens, :])
    short.offset = tokens
    return short
