"""How long this machine has slept: what a clock that goes on during sleep has and one that stops has not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# Two readings are some microseconds apart; a machine does not sleep for less than this.
_LEAST_S = 1.0


def _clocks() -> tuple[int, int] | None:
    """The ids of the clock that goes on and of the one that stops."""
    if sys.platform == "darwin":
        return time.CLOCK_MONOTONIC, time.CLOCK_UPTIME_RAW
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC
    return None


def asleep_s() -> float:
    """Seconds that this machine has slept since it started; 0 if the system does not tell."""
    clocks = _clocks()
    return time.clock_gettime(clocks[0]) - time.clock_gettime(clocks[1]) if clocks is not None else 0.0


class SleepClock:
    def __init__(self, asleep_s: Callable[[], float] = asleep_s) -> None:
        self._asleep_s = asleep_s
        self._told_s = asleep_s()

    def slept_s(self) -> float:
        """Seconds of sleep since the last call that told of any; 0 for none."""
        now_s = self._asleep_s()
        slept_s = now_s - self._told_s
        if slept_s < _LEAST_S:
            return 0.0
        self._told_s = now_s
        return slept_s
