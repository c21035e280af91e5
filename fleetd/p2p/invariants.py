"""How ``validate`` methods of the p2p classes report a broken invariant; tests call them after each step."""

from __future__ import annotations


def check(holds: object, invariant: str) -> None:
    """Raise AssertionError with ``invariant`` if ``holds`` is false."""
    if not holds:
        raise AssertionError(invariant)
