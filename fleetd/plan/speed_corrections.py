"""What shared prefills really take on each machine, held against what its figures promise.

Pure. Calibration at load looks at a device for a second or two; on a busy one it may be wrong by a third, and
with it every balanced cut. What the machines then report of their parts tells, and it tells about all of them
at the same time, which is what a cut depends on. It fades: a machine that was found slow is asked no more, so
nothing else would ever find it fast again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetd import limits

# Weight of the newest part in the moving average: the next prompt should already be cut better.
WEIGHT = 0.5
# Whatever a machine reports of itself.
MOST = 4.0
# Shorter work says more about its beginning and its end.
LEAST_S = 0.1
# What was learned counts half after this long.
HALF_S = 300.0
# Figures that changed by more than this were measured anew; what was learned of the old ones is void.
CHANGED = 1.5


@dataclass(frozen=True, slots=True)
class _LearnedSpeed:
    factor: float
    token_s: float
    at_s: float


class SpeedCorrections:
    """By machine and model: how many times as long as by its figures it takes; 1 until something is known.

    ``token_s``: those figures, ``costs.PrefillSpeed.token_s``. ``now_s``: monotonic.
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
        """A part of a prefill was computed; ``expected_s`` by the machine's figures alone."""
        if expected_s < LEAST_S or took_s <= 0 or token_s <= 0:
            return
        known = self.factor(node_id, model, token_s, now_s)
        seen = min(MOST, max(1 / MOST, took_s / expected_s))
        self._learned.pop((node_id, model), None)
        self._learned[node_id, model] = _LearnedSpeed(known + WEIGHT * (seen - known), token_s, now_s)
        if len(self._learned) > limits.PACES:
            del self._learned[next(iter(self._learned))]
