"""How long each machine really takes for each kind of work, as a factor of the time that its figures predict.

Pure. Calibration at load measures a device for a second or two. On a busy device it may be wrong several
times over, and then every balanced cut is wrong. The parts of shared prefills and of scoring measure all
machines at the same time. A factor fades with time: a slow machine is asked for less, so no new measurement
would correct it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fleetd import limits

# Scoring stops after some of the layers and keeps attention that prefill throws away: one says little of the
# other.
PromptWork = Literal["prefill", "score"]

# Weight of the newest measurement in the moving average: the next prompt should already be cut better.
WEIGHT = 0.5
# Bound of a factor, whatever a machine reports. A calibration beside other programs was seen to be 4.6 times
# too slow.
MOST = 8.0
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


@dataclass(frozen=True, slots=True)
class _LearnedSpeed:
    """``figure_s``: the machine's own figure then. ``token_s``: the same by what was measured."""

    figure_s: float
    token_s: float
    at_s: float


class SpeedCorrections:
    """Factors by machine, model and kind of work; 1 until one is measured.

    ``token_s``: the machine's own figure, ``costs.PrefillSpeed.token_s``. ``now_s``: monotonic seconds.
    """

    def __init__(self) -> None:
        self._learned: dict[CorrectedWork, _LearnedSpeed] = {}

    def factor(self, of: CorrectedWork, token_s: float, now_s: float) -> float:
        learned = self._learned.get(of)
        if learned is None or not 1 / CHANGED <= token_s / learned.figure_s <= CHANGED:
            return 1.0
        # Not by the figure of then: a machine that corrects its own must not be corrected twice.
        return 1.0 + (learned.token_s / token_s - 1.0) * math.exp2((learned.at_s - now_s) / HALF_S)

    def ran(
        self, of: CorrectedWork, token_s: float, now_s: float, *, expected_s: float, took_s: float
    ) -> None:
        """Record one measurement; ``expected_s`` is by the machine's own figures."""
        if expected_s < LEAST_S or took_s <= 0 or token_s <= 0:
            return
        known = self.factor(of, token_s, now_s)
        seen = min(MOST, max(1 / MOST, took_s / expected_s))
        factor = known + WEIGHT * (seen - known)
        self._learned.pop(of, None)
        self._learned[of] = _LearnedSpeed(token_s, token_s * factor, now_s)
        if len(self._learned) > limits.SPEED_CORRECTIONS:
            del self._learned[next(iter(self._learned))]
