"""How long this machine takes to load a model: by what loads of it took, else by its size and other loads.

Pure. The estimate by size (``chip_speeds.load_s``) knows neither the disk nor what a load measures; the loads
that were seen correct it for models that were never loaded here.
"""

from __future__ import annotations

from fleetd import limits
from fleetd.plan import chip_speeds

# Weight of the newest load in a moving average.
WEIGHT = 0.5
# Bound of the factor by which loads here differ from the estimate by size.
MOST = 20.0


def stall_s(load_s: float) -> float:
    """How long a load that should take ``load_s`` may stand still before it is given up."""
    return min(limits.ENGINE_LOAD_S, max(limits.LOAD_STALL_S, limits.LOAD_LATE * load_s))


class LoadTimes:
    """Seconds that loads take, by model."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._factor = 1.0

    def took(self, model: str, weights_bytes: int, seconds: float) -> None:
        """Record one load. Nothing is learned from a load that took no time."""
        if seconds <= 0:
            return
        seen = min(MOST, max(1 / MOST, seconds / chip_speeds.load_s(weights_bytes)))
        self._factor = self._factor + WEIGHT * (seen - self._factor) if self._seconds else seen
        known = self._seconds.pop(model, seconds)
        self._seconds[model] = known + WEIGHT * (seconds - known)
        if len(self._seconds) > limits.CARD_MODELS:
            del self._seconds[next(iter(self._seconds))]

    def seconds(self, model: str, weights_bytes: int) -> float:
        """What the next load of a model probably takes."""
        known = self._seconds.get(model)
        return chip_speeds.load_s(weights_bytes) * self._factor if known is None else known
