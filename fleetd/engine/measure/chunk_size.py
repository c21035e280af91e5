"""How many prompt tokens one turn of prefill computes.

A turn cannot be interrupted: it delays every running answer by its length, and a cancelled request by up to
as much. So turns are bounded in time: generously while no other request waits, tightly while others decode.

Two ways to keep to it. If the numbers do not depend on how a prompt is cut (the CPU, see ``cpu.py``), the
size follows the speed just measured, which falls as the context grows. Elsewhere it follows from what sizes
took at load and from the place in the prompt alone: the same prompt is then always cut in the same places.

    tokens/s                  ┌── the bound: a chunk takes too long from here on
        │          ·    ·     │
        │     ·               │    the knee: the smallest size that is nearly as fast as the fastest
        │  ·     ▲
        └────────┴──────────────── tokens in a chunk
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

# While no answer runs: a client that goes away has its slot back within this and what it takes to notice it,
# and a request that comes waits as long. On a CPU that is to be a second in all, a fifth of which is left to
# noticing it and to a chunk that is slower than the one before. A GPU gains up to two seconds; Metal ends
# what takes five.
ALONE_S, ALONE_GPU_S = 0.8, 2.0
# Beside running answers: what each of them waits for its next token.
SHARED_S = 0.15
# If even small chunks take longer than the bound, as all weights are read for each: a chunk may take so
# many times as long as the smallest. Fewer chunks then hold answers up for less in all.
FLAT = 1.5
# The knee: the share of the best throughput that is good enough. Smaller chunks take less time and memory.
KNEE = 0.95
STEP = 32
# The smallest size that a GPU is given.
SMALLEST = 64
# A CPU takes as long for a token in a chunk of 256 as in a larger one.
CPU_LARGEST = 256


class FixedChunks(msgspec.Struct, frozen=True):
    """The same size in every turn."""

    alone: int
    shared: int

    def size(self, *, shared: bool, context: int = 0) -> int:
        return self.shared if shared else self.alone

    def learn(self, tokens: int, seconds: float) -> None:
        """Nothing follows from it."""


class MeasuredChunks:
    """Sizes by what they took.

    Args:
        seconds: of a chunk on an empty context, by its tokens, measured once.
        context_s: what each token of context adds to each token's time.
    """

    def __init__(self, seconds: Mapping[int, float], context_s: float = 0.0) -> None:
        known = {n: took_s for n, took_s in sorted(seconds.items()) if n >= SMALLEST}
        self._seconds, self._context_s = known or {SMALLEST: 1.0}, context_s

    def size(self, *, shared: bool, context: int = 0) -> int:
        """``context``: tokens before the chunk."""
        took_s = {n: s + n * context * self._context_s for n, s in self._seconds.items()}
        smallest = min(took_s)
        bound_s = SHARED_S if shared else ALONE_GPU_S
        if shared:
            bound_s = max(bound_s, FLAT * took_s[smallest])
        rates = {n: n / s for n, s in took_s.items() if s <= bound_s or n == smallest}
        return min(n for n, rate in rates.items() if rate >= KNEE * max(rates.values()))

    def learn(self, tokens: int, seconds: float) -> None:
        """Nothing follows from it."""


@dataclass(slots=True)
class PacedChunks:
    """A size that follows the speed of the turn before."""

    largest: int = CPU_LARGEST
    _tokens_per_s: float = CPU_LARGEST / (2 * ALONE_S)

    def size(self, *, shared: bool, context: int = 0) -> int:
        fitting = self._tokens_per_s * (SHARED_S if shared else ALONE_S)
        return max(STEP, min(self.largest, int(fitting) // STEP * STEP))

    def learn(self, tokens: int, seconds: float) -> None:
        # The few tokens at the end of a prompt say more about fixed costs than about speed.
        if tokens >= STEP and seconds > 0:
            self._tokens_per_s = tokens / seconds


Chunks = FixedChunks | MeasuredChunks | PacedChunks
