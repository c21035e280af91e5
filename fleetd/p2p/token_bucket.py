"""A bound on how often something may happen: a burst at once, and a steady rate after it."""

from __future__ import annotations


class TokenBucket:
    """Holds ``burst`` tokens at first and at most, and gains ``per_s`` of them every second."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._left = self._burst
        self._counted_s = 0.0

    def take(self, count: float, now_s: float) -> bool:
        """Take ``count`` tokens; False, and none is taken, if fewer are left. ``now_s`` is monotonic."""
        earned = max(0.0, now_s - self._counted_s) * self._per_s
        self._left = min(self._burst, self._left + earned)
        self._counted_s = now_s
        if self._left < count:
            return False
        self._left -= count
        return True
