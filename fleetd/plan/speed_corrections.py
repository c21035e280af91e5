"""How long each machine really takes for prefills, as a factor of the time that its own figures predict.

Pure. Calibration at load measures a device for a second or two. On a busy device it may be wrong by a third,
and then every balanced cut is wrong. The parts of shared prefills and of scoring measure all machines at the
same time. A factor fades with time: a slow machine is asked for less, so no new measurement would correct it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetd import limits

# Weight of the newest measurement in the moving average: the next prompt should already be cut better.
WEIGHT = 0.5
# Bound of a factor, whatever a machine reports.
MOST = 4.0
# Shorter work measures overhead more than speed.
LEAST_S = 0.1
# A factor's distance from 1 halves in this time.
HALF_S = 300.0
# If a machine's own figure changed by more than this, it was measured again and the factor no longer holds.
CHANGED = 1.5


@dataclass(frozen=True, slots=True)
class _LearnedSpeed:
    factor: float
    token_s: float
    at_s: float


class SpeedCorrections:
    """Factors by machine and model (its digest, or its name before that is known); 1 until one is measured.

    ``token_s``: the machine's own figure, ``costs.PrefillSpeed.token_s``. ``now_s``: monotonic seconds.
    """

    def __init__(self) -> None:
        self._learned: dict[tuple[str, str], _LearnedSpeed] = {}

    def factor(self, node_id: str, model: str, token_s: float, now_s: float) -> float:
        learned = self._learned.get((node_id, model))
        if learned is None or not 1 / CHANGED <= token_s / learned.token_s <= CHANGED:
            return 1.0
        return 1.0 + (learned.factor - 1.0) * math.exp2((learned.at_s - now_s) / HALF_S)

    def ran(
        self, node_id: str, model: str, token_s: float, now_s: float, *, expected_s: float, took_s: float
    ) -> None:
        """Record one measurement; ``expected_s`` is by the machine's own figures."""
        if expected_s < LEAST_S or took_s <= 0 or token_s <= 0:
            return
        known = self.factor(node_id, model, token_s, now_s)
        seen = min(MOST, max(1 / MOST, took_s / expected_s))
        self._learned.pop((node_id, model), None)
        self._learned[node_id, model] = _LearnedSpeed(known + WEIGHT * (seen - known), token_s, now_s)
        if len(self._learned) > limits.SPEED_CORRECTIONS:
            del self._learned[next(iter(self._learned))]
