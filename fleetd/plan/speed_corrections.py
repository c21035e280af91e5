"""How long each machine really takes for each kind of work, as a factor of the time that its figures predict.

Pure. Calibration at load measures a device for a second or two. On a busy device it may be wrong several
times over, and then every balanced cut is wrong. The parts of shared prefills and of scoring measure all
machines at the same time. A factor fades with time: a slow machine is asked for less, so no new measurement
would correct it.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from fleetd import limits

# Scoring stops after some of the layers and keeps attention that prefill throws away: one says little of the
# other.
PromptWork = Literal["prefill", "score", "decode"]

# Weight of the newest measurement in the moving average: the next prompt should already be cut better.
WEIGHT = 0.5
# Bound of a factor, whatever a machine reports. A calibration beside other programs was seen to be 4.6 times
# too slow.
MOST = 8.0
# The same for answers, whose time was taken here: a machine that claims too much really is so much slower.
MOST_SEEN = 1024.0
# Shorter work measures overhead more than speed.
LEAST_S = 0.1
# A factor's distance from 1 halves in this time.
HALF_S = 300.0
# If a machine's own figure changed by more than this, it was measured again and the factor no longer holds.
CHANGED = 1.5


class CorrectedWork(NamedTuple):
    """What one factor belongs to. ``model``: its digest, or its name before that is known."""

    node_id: str
    model: str
    work: PromptWork


class _LearnedSpeed(msgspec.Struct, frozen=True):
    """``figure_s``: the machine's own figure then. ``token_s``: the same by what was measured.

    ``seen_here``: this machine took the time.
    """

    figure_s: float
    token_s: float
    at_s: float
    seen_here: bool = False

    def holds(self, token_s: float) -> bool:
        """False if the machine was measured again. It cannot undo what was seen here by a faster figure."""
        return token_s / self.figure_s <= CHANGED and (self.seen_here or self.figure_s / token_s <= CHANGED)


class SpeedCorrections:
    """Factors by machine, model and kind of work; 1 until one is measured.

    ``token_s``: the machine's own figure, ``costs.PrefillSpeed.token_s``. ``now_s``: monotonic seconds.
    """

    def __init__(self) -> None:
        self._learned: dict[CorrectedWork, _LearnedSpeed] = {}
        # What was computed once where kernels are compiled late, with its length as a power of two.
        self._compiled: dict[tuple[CorrectedWork, int], None] = {}

    def factor(self, of: CorrectedWork, token_s: float, now_s: float) -> float:
        learned = self._learned.get(of)
        if learned is None or not learned.holds(token_s):
            return 1.0
        # Not by the figure of then: a machine that corrects its own must not be corrected twice.
        return 1.0 + (learned.token_s / token_s - 1.0) * math.exp2((learned.at_s - now_s) / HALF_S)

    def ran(
        self,
        of: CorrectedWork,
        token_s: float,
        now_s: float,
        *,
        expected_s: float,
        took_s: float,
        seen_here: bool = False,
        compiles: bool = False,
    ) -> None:
        """Record one measurement; ``expected_s`` is by the machine's own figures.

        Args:
            seen_here: this machine took the time, of an answer from there; otherwise that machine did.
            compiles: the machine's kernels are compiled when they are first used (``chip_speeds``): the first
                work of each kind and length teaches nothing, for it may have taken a minute more.
        """
        # What should have taken no time at all tells nothing, unless it did.
        if max(expected_s, took_s if seen_here else 0.0) < LEAST_S or min(took_s, token_s, expected_s) <= 0:
            return
        if compiles and self._first(of, expected_s):
            return
        known = self.factor(of, token_s, now_s)
        seen = min(MOST_SEEN if seen_here else MOST, max(1 / MOST, took_s / expected_s))
        factor = known + WEIGHT * (seen - known)
        self._learned.pop(of, None)
        self._learned[of] = _LearnedSpeed(token_s, token_s * factor, now_s, seen_here)
        if len(self._learned) > limits.SPEED_CORRECTIONS:
            del self._learned[next(iter(self._learned))]

    def _first(self, of: CorrectedWork, expected_s: float) -> bool:
        """Note work of about such a length; True if there was none before."""
        kind = of, math.frexp(expected_s)[1]
        first = kind not in self._compiled
        self._compiled.pop(kind, None)
        self._compiled[kind] = None
        if len(self._compiled) > limits.SPEED_CORRECTIONS:
            del self._compiled[next(iter(self._compiled))]
        return first
