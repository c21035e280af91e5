"""How much of the processor other programs had while something was measured, if the platform tells it."""

from __future__ import annotations

import time

import msgspec
import psutil

# The counters advance in steps of 10 ms on each core: over less time than this they say too little.
LEAST_S = 0.2
# Time in which nothing ran, and time of guests, which is counted as user's already.
_NOT_BUSY = frozenset({"idle", "iowait", "guest", "guest_nice"})


class CpuReading(msgspec.Struct, frozen=True):
    """Seconds since some start: of all cores while they were busy, of this process, and on the clock."""

    busy_s: float
    own_s: float
    at_s: float
    cores: int

    @classmethod
    def now(cls) -> CpuReading | None:
        """None if the system does not say."""
        try:
            spent, cores = psutil.cpu_times()._asdict(), psutil.cpu_count() or 1
        except Exception:  # psutil meets kernels that it does not know
            return None
        busy_s = sum(seconds for name, seconds in spent.items() if name not in _NOT_BUSY)
        return cls(busy_s, time.process_time(), time.monotonic(), cores)

    def others_share(self, since: CpuReading) -> float:
        """The share of all cores that other programs had; 0 if the time since then was too short to tell."""
        elapsed_s = self.at_s - since.at_s
        if elapsed_s < LEAST_S:
            return 0.0
        others_s = (self.busy_s - since.busy_s) - (self.own_s - since.own_s)
        return min(1.0, max(0.0, others_s / (elapsed_s * self.cores)))
