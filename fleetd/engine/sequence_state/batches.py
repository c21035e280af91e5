"""Sequences' caches in one batch, and out of it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def can_merge(cache: Sequence[Any]) -> bool:
    """True if a sequence with these caches can be decoded in a batch."""
    return all(hasattr(layer, "merge") for layer in cache)


def merged(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """The caches of a batch of these sequences, layer by layer; copies."""
    return [layers[0].merge(list(layers)) for layers in zip(*sequences, strict=True)]


def extracted(batch: Sequence[Any], row: int) -> list[Any]:
    """One sequence's caches, copied out of a batch."""
    return [layer.extract(row) for layer in batch]
