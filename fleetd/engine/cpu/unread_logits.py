"""Calls of a model for what they leave in its cache, as a prompt's are.

MLX computes what is read. Packed products are computed when they are called, so they have to be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_unread: ContextVar[bool] = ContextVar("unread_logits", default=False)


@contextmanager
def unread_logits() -> Iterator[None]:
    """Meanwhile, models are called in this thread for their caches only: logits may have any numbers."""
    before = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(before)


def are_unread() -> bool:
    """True within ``unread_logits``."""
    return _unread.get()
