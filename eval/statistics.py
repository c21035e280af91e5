"""Shares and how sure one can be of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

_Z = 1.96  # 95 %


@dataclass(frozen=True, slots=True)
class Share:
    """``hits`` of ``of``, and the interval of Wilson (1927), which holds for few cases, also near 1."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        return self.hits / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        n, p = self.of, self.value
        middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        # At the ends the interval touches the share itself, but for rounding.
        return max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p))

    def __add__(self, other: Share) -> Share:
        return Share(self.hits + other.hits, self.of + other.of)

    def __str__(self) -> str:
        if not self.of:
            return "none"
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.0f} to {100 * high:.0f}, n={self.of})"
