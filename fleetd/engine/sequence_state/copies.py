"""Copies of mlx-lm's KV caches, and their beginnings."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


def copy_on_write(cache: Any) -> Any:
    """A cache that can be added to without changing this one. Nothing is copied until then."""
    return copy.deepcopy(cache)  # an array's copy is a second name for its memory


def prefix_copy(caches: list[Any], tokens: int, stored: int) -> list[Any] | None:
    """Caches of the first ``tokens`` of ``stored`` tokens, which can be added to without changing these.

    None where one of them cannot go back to there.
    """
    if tokens < stored and not can_go_back(caches):
        return None
    copies = []
    for layer in caches:
        if type(layer) is KVCache:
            copies.append(beginning(layer, tokens))
        else:
            copies.append(copy_on_write(layer))
            if tokens < stored:
                copies[-1].trim(stored - tokens)
    return copies


def can_go_back(caches: list[Any]) -> bool:
    """False where a recurrent state, or a window that has moved on, only stands for all of its tokens."""
    return all(layer.is_trimmable() for layer in caches)


def beginning(cache: KVCache, tokens: int) -> KVCache:
    """A cache of the first ``tokens`` rows, copied, without the room to grow that ``cache`` may have."""
    short = KVCache()
    short.keys = mx.contiguous(cache.keys[..., :tokens, :])
    short.values = mx.contiguous(cache.values[..., :tokens, :])
    short.offset = tokens
    return short
