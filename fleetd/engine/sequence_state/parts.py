"""A layer's cache and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from fleetd.control.model_facts import StateSizes
from fleetd.engine.sequence_state.kinds import kind_of


def parts(cache: Any) -> tuple[Any, ...]:
    """The single caches that a layer keeps, in order; none if ``cache`` is None."""
    if cache is None:
        return ()
    return tuple(cache.caches) if isinstance(cache, CacheList) else (cache,)


def all_parts(caches: Iterable[Any]) -> list[Any]:
    """The parts of all layers' caches, in the order of the layers."""
    return [part for cache in caches for part in parts(cache)]


def arrays(caches: Iterable[Any]) -> list[mx.array]:
    """All arrays of some layers' caches."""
    found = (array for part in all_parts(caches) for array in kind_of(part).arrays(part))
    return [array for array in found if array is not None]


def kept_from(caches: Iterable[Any], first: int) -> list[mx.array]:
    """All keys and values of tokens from ``first`` on, where they lie by position, and the running states."""
    found = []
    for part in all_parts(caches):
        kind = kind_of(part)
        kept = [array for array in kind.kept(part) if array is not None]
        found += kept if kind.needs_mark(part) else [rows[..., first:, :] for rows in kept]
    return found


def sizes(caches: Iterable[Any]) -> StateSizes:
    """What such caches take for any number of tokens; these hold a few."""
    return sum((kind_of(part).sizes(part) for part in all_parts(caches)), StateSizes(0))


def assembled(empty: Any, kept: Sequence[Any]) -> Any:
    """A layer's cache of the same kind as ``empty``, as its model takes it, of its parts."""
    if isinstance(empty, CacheList):
        return CacheList(*kept)
    return kept[0] if kept else None
