"""Where a cache that rotates, or one of a batch, writes its next row: a member that mlx-lm keeps to itself,
and the one place that touches it."""

from __future__ import annotations

from typing import Any


def write_index(cache: Any) -> int:
    """The row behind the newest one. Raises AttributeError for a cache that has none."""
    return int(cache._idx)


def set_write_index(cache: Any, index: int) -> None:
    # Another name would be taken in silence.
    if not hasattr(cache, "_idx"):
        raise AttributeError(f"a {type(cache).__name__} has no _idx in this version of mlx-lm")
    cache._idx = index
