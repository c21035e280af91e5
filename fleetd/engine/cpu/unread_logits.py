"""Calls of a model for what they leave in its cache, as a prompt's are.

MLX computes what is read. Packed products are computed when they are called, so they have to be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

# What of a pass nothing reads: "logits", or "states" too, which are what the last layer gives.
Unread = Literal["", "logits", "states"]
_unread: ContextVar[Unread] = ContextVar("unread_logits", default="")


@contextmanager
def unread_logits(*, states_are_read: bool = False) -> Iterator[None]:
    """Meanwhile, models are called in this thread for their caches only: logits may have any numbers.

    So may the hidden states that the last layer gives, unless ``states_are_read``.
    """
    before = _unread.set("logits" if states_are_read else "states")
    try:
        yield
    finally:
        _unread.reset(before)


def are_unread(what: Unread = "logits") -> bool:
    """True within ``unread_logits``, if nothing reads ``what`` there. False for ""."""
    return bool(what) and _unread.get() in (what, "states")
