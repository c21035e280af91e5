"""How long this machine takes to load a model: by what loads of it took, else by its size and other loads.

Pure. A first load also compares the checksums of the files, measures the model and probes it, and later ones
keep the results.
What that takes is learned from first loads of other models here. The estimate by size
(``chip_speeds.load_s``) does not know the disk; the loads that were seen correct it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetd import limits
from fleetd.plan import chip_speeds

# Weight of the newest load in a moving average.
WEIGHT = 0.5
# Bound of the factor by which loads here differ from the estimate by size.
MOST = 20.0
# Stages that only the first load of a model has: one takes as long as the files are large, and the others are
# calibration and the probe for exactness.
VERIFYING = "verifying"
FIRST_STAGES = frozenset(("measuring", "probing for exactness"))
# Before a first load was seen here: seconds of these stages, and bytes per second of the checksums.
FIRST_S, VERIFIED_BYTES_PER_S = 6.0, 1e9


def stall_s(load_s: float) -> float:
    """How long a load that should take ``load_s`` may stand still before it is given up."""
    return min(limits.ENGINE_LOAD_S, max(limits.LOAD_STALL_S, limits.LOAD_LATE * load_s))


class LoadTimes:
    """Seconds that loads take, by model."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._factor = 1.0
        self._first_s = FIRST_S
        self._verified_bytes_per_s = VERIFIED_BYTES_PER_S

    def took(self, model: str, weights_bytes: int, stages: Iterable[tuple[str, float]]) -> None:
        """Record one load, by the seconds of its stages. Nothing is learned from one that took no time."""
        first_s = verified_s = seconds = 0.0
        for name, took_s in stages:
            if name == VERIFYING:
                verified_s += took_s
            elif name in FIRST_STAGES:
                first_s += took_s
            else:
                seconds += took_s
        if first_s > 0:
            self._first_s += WEIGHT * (first_s - self._first_s)
        if first_s > 0 and verified_s > 0:
            self._verified_bytes_per_s += WEIGHT * (weights_bytes / verified_s - self._verified_bytes_per_s)
        else:
            # Later loads compare little.
            seconds += verified_s
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
        if known is not None:
            return known
        verified_s = weights_bytes / max(1.0, self._verified_bytes_per_s)
        return chip_speeds.load_s(weights_bytes) * self._factor + verified_s + self._first_s
