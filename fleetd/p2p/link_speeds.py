"""What a path sustains, by its last transfers: which of them count, and when it has to be measured again.

Sans-IO. Other work on either machine, or on the network, makes a transfer slower, never faster. So a transfer
that was clearly faster than earlier ones takes their place, and one that stands alone, disagrees with its
repetition, or is far below what is usual for its kind of path is doubtful: it is repeated, soon at first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleetd import limits

# A transfer more than this many times as fast as an earlier one takes its place.
RAISED = 2.0
# Bursts of one size that agree differ by no more than this factor.
AGREE = 1.5
# Below this share of what is usual for the kind of path, bursts that agree are repeated too, until there were
# so many measurements; then the path is as slow as that.
SLOW = 0.25
TRIES = 4
# Until the first repetition; each further one waits twice as long.
AGAIN_S = 15.0

Burst = tuple[int, float]  # bytes, seconds


class _Transfer(msgspec.Struct, frozen=True):
    bytes_per_s: float
    at_s: float
    sure: bool


class LinkSpeeds:
    """The last transfers over one path. ``now``: monotonic seconds."""

    def __init__(self) -> None:
        self._last: deque[_Transfer] = deque(maxlen=limits.LINK_SPEEDS)

    @property
    def bytes_per_s(self) -> float | None:
        """The lower quartile of the transfers that count; None without any."""
        sure = [transfer.bytes_per_s for transfer in self._last if transfer.sure]
        return quantile(sure or [transfer.bytes_per_s for transfer in self._last], 0.25)

    def doubtful(self, now: float) -> bool:
        """True until a transfer was sure, and again once that was long ago."""
        return not any(found.sure and now - found.at_s < limits.LINK_SPEED_S for found in self._last)

    def transferred(self, bytes_per_s: float, now: float, *, sure: bool = True) -> None:
        """Record a measurement."""
        kept = [
            before
            for before in self._last
            if now - before.at_s < limits.LINK_SPEED_S and before.bytes_per_s * RAISED >= bytes_per_s
        ]
        self._last = deque([*kept, _Transfer(bytes_per_s, now, sure)], limits.LINK_SPEEDS)

    def carried(self, bytes_per_s: float, now: float) -> None:
        """Record a transfer that may have waited for other things: the path is at least as fast."""
        if bytes_per_s > (self.bytes_per_s or 0.0):
            self.transferred(bytes_per_s, now)

    def doubt(self) -> None:
        """A transfer was much later than these say."""
        self._last = deque(
            (_Transfer(found.bytes_per_s, found.at_s, sure=False) for found in self._last), limits.LINK_SPEEDS
        )


@dataclass(slots=True)
class ProbeSchedule:
    """When one path is measured. ``epoch``: of the peer then; ``tries``: bursts since some were believed."""

    epoch: int = -1
    echoes_s: float = -math.inf
    bursts_s: float = -math.inf
    tries: int = 0

    def wants_bursts(self, speeds: LinkSpeeds, epoch: int, now: float, *, idle: bool) -> bool:
        """True for a new session, and while what is known is doubtful and nothing else runs there."""
        again_s = min(limits.LINK_SPEED_S, AGAIN_S * 2.0 ** (min(self.tries, 32) - 1))
        return epoch != self.epoch or (idle and speeds.doubtful(now) and now - self.bursts_s >= again_s)

    def wants_echoes(self, now: float) -> bool:
        return now - self.echoes_s >= limits.LINK_PROBE_S

    def began(self, epoch: int, now: float, *, bursts: bool) -> None:
        self.tries = self.tries if epoch == self.epoch else 0
        self.epoch, self.echoes_s = epoch, now
        if bursts:
            self.bursts_s = now
            self.tries += 1

    def judged(self, bursts: Sequence[Burst], usual_bytes_per_s: float) -> tuple[Burst, bool] | None:
        """The best burst of the largest size, and whether it is to be believed; None without any."""
        if not bursts:
            return None
        runs = _largest(bursts)
        size = bursts[-1][0]
        usual = size / runs[0] >= SLOW * usual_bytes_per_s
        sure = _agree(runs) and (usual or self.tries >= TRIES)
        if sure:
            self.tries = 0
        return (size, runs[0]), sure


def again(bursts: Sequence[Burst]) -> bool:
    """True if the last size should be sent once more: there is no other run of it, or none that agrees."""
    runs = _largest(bursts)
    return bool(runs) and (len(runs) < 2 or (len(runs) < TRIES and not _agree(runs)))


def quantile(samples: Sequence[float] | deque[float], share: float) -> float | None:
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[round(share * (len(ordered) - 1))]


def _largest(bursts: Sequence[Burst]) -> list[float]:
    """Seconds of the runs of the largest size, the best first."""
    return sorted(seconds for size, seconds in bursts if size == bursts[-1][0])


def _agree(runs: Sequence[float]) -> bool:
    return len(runs) > 1 and runs[1] <= AGREE * runs[0] and math.isfinite(runs[1])
