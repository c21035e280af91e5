"""How many prompt tokens one turn of prefill computes.

A turn cannot be interrupted: it delays every running answer by its length, and a cancelled request by up to
as much. So turns are bounded in time: generously while no other request waits, tightly while others decode.

Two ways to keep to it. Where the numbers do not depend on how a prompt is cut (the CPU, see ``cpu.py``), the
size follows the speed just measured, which falls as the context grows. Elsewhere it is chosen once, at load,
and stays: the same prompt is then always cut in the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

# A client that goes away has its slot back within a second; that leaves room for noticing it.
ALONE_S = 0.5
SHARED_S = 0.15
STEP = 32
# Sizes that a GPU may be given; mlx-lm's own default is the largest.
FIXED = (64, 128, 256, 512, 1024, 2048)
# Larger chunks gain nothing on a CPU.
CPU_LARGEST = 256


@dataclass(frozen=True, slots=True)
class FixedChunks:
    """The same size in every turn."""

    alone: int
    shared: int

    @classmethod
    def of_rate(cls, tokens_per_s: float) -> FixedChunks:
        """The largest sizes that keep to the bounds at a speed measured on a short context."""
        return cls(_largest(tokens_per_s * ALONE_S), _largest(tokens_per_s * SHARED_S))

    def size(self, *, shared: bool) -> int:
        return self.shared if shared else self.alone

    def took(self, tokens: int, seconds: float) -> None:
        """Nothing follows from it."""


@dataclass(slots=True)
class PacedChunks:
    """A size that follows the speed of the turn before."""

    largest: int = CPU_LARGEST
    _tokens_per_s: float = CPU_LARGEST / (2 * ALONE_S)

    def size(self, *, shared: bool) -> int:
        fitting = self._tokens_per_s * (SHARED_S if shared else ALONE_S)
        return max(STEP, min(self.largest, int(fitting) // STEP * STEP))

    def took(self, tokens: int, seconds: float) -> None:
        # The few tokens at the end of a prompt say more about fixed costs than about speed.
        if tokens >= STEP and seconds > 0:
            self._tokens_per_s = tokens / seconds


Chunks = FixedChunks | PacedChunks


def _largest(tokens: float) -> int:
    return max((size for size in FIXED if size <= tokens), default=FIXED[0])
