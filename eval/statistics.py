"""Shares and how sure one can be of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.figures import wilson


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
        return wilson(self.hits, self.of)

    def __add__(self, other: Share) -> Share:
        return Share(self.hits + other.hits, self.of + other.of)

    def __str__(self) -> str:
        if not self.of:
            return "none"
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.0f} to {100 * high:.0f}, n={self.of})"


def area(higher: npt.NDArray[np.float64], lower: npt.NDArray[np.float64]) -> float:
    """How often one of ``higher`` is above one of ``lower``: 0.5 tells nothing."""
    return float(np.mean(higher[:, None] > lower[None, :]))


_RESAMPLED = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """One sum over another, of ``of`` cases, and the interval of the bootstrap over cases (Efron 1979)."""

    value: float
    interval: tuple[float, float]
    of: int

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """Deterministic. Samples in which the second sum is 0 are left out."""
        chance = random.Random(0)
        found = []
        for _ in range(_RESAMPLED if pairs else 0):
            sample = chance.choices(pairs, k=len(pairs))
            if below := sum(b for _, b in sample):
                found.append(sum(a for a, _ in sample) / below)
        below = sum(b for _, b in pairs)
        value = sum(a for a, _ in pairs) / below if below else math.nan
        if not found:
            return cls(value, (0.0, math.inf), len(pairs))
        found.sort()
        return cls(value, (found[int(0.025 * len(found))], found[int(0.975 * len(found))]), len(pairs))

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "none"
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.0f} to {100 * high:.0f}, n={self.of} prompts)"
