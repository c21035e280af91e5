"""How long keys and values from another machine take: by the last fetches from there. Pure.

    seconds = opening + bytes / rate

The opening is the time from the decision to the first byte: round trips, a connection, memory for what comes,
the first block read there. The rate is that of the whole way from files into caches: reading, sealing twice,
the link. Each fetch measures both, so neither is put together from figures once there was a fetch. Files that
the other machine's system has in memory and those on its disk differ tenfold, and are measured apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from fleetd import limits
from fleetd.cache.disk_speed import is_cached
from fleetd.plan.costs import LinkSpeed

# A link that is measured so many times slower than blocks came over it is not the same link any more.
_OTHER_LINK = 1.5


class FetchSpeed(msgspec.Struct, frozen=True):
    """``opening_s``: from the decision to the first byte. ``bytes_per_s``: from there to the last one; 0
    where nothing can come."""

    opening_s: float
    bytes_per_s: float

    @classmethod
    def by_figures(cls, link: LinkSpeed, bytes_per_s: float) -> FetchSpeed:
        """The speed before anything has come.

        Args:
            bytes_per_s: of the other machine's disk, 0 if that is not measured.
        """
        disk = bytes_per_s or limits.CACHE_READ_BYTES_PER_S
        return cls(limits.FETCH_FIXED_S + 4 * link.rtt_s, min(link.bytes_per_s, disk))

    def seconds(self, n_bytes: float) -> float:
        """Seconds from the decision to the last of so many bytes."""
        return self.opening_s + n_bytes / max(1.0, self.bytes_per_s)

    def mixed(self, other: FetchSpeed, share: float) -> FetchSpeed:
        """The speed where this share of the bytes comes so, and the others as ``other`` says."""
        byte_s = share / max(1.0, self.bytes_per_s) + (1 - share) / max(1.0, other.bytes_per_s)
        return FetchSpeed(share * self.opening_s + (1 - share) * other.opening_s, 1 / byte_s)


class _PastFetch(msgspec.Struct, frozen=True):
    """One fetch; ``bytes_per_s`` is None where too little came to tell."""

    at_s: float
    opening_s: float
    bytes_per_s: float | None


class FetchSpeeds:
    """What the last fetches from each machine took. ``now_s``: monotonic seconds.

    A machine that was slow is not asked, so nothing would correct that: what is old is forgotten.
    """

    def __init__(self) -> None:
        # By machine, and whether its files were in memory.
        self._last: dict[tuple[str, bool], deque[_PastFetch]] = {}

    def fetched(
        self, node_id: str, cached: float, n_bytes: float, *, opening_s: float, took_s: float, now_s: float
    ) -> None:
        """Record a fetch that brought so many bytes.

        Args:
            cached: how much of the files the other machine's system had in memory.
        """
        if (place := is_cached(cached)) is None:
            return
        tells = n_bytes >= limits.CACHE_SPEED_BYTES and took_s > opening_s
        rate = n_bytes / (took_s - opening_s) if tells else None
        last = self._last.setdefault((node_id, place), deque(maxlen=limits.FETCH_SPEEDS))
        last.append(_PastFetch(now_s, opening_s, rate))

    def speed(
        self, node_id: str, link: LinkSpeed, bytes_per_s: float, cached: float, now_s: float
    ) -> FetchSpeed:
        """How fast blocks will come.

        Args:
            bytes_per_s: as in ``FetchSpeed.by_figures``.
            cached: as in ``fetched``.
        """
        figures = FetchSpeed.by_figures(link, bytes_per_s)
        if figures.bytes_per_s <= 0:
            return figures
        memory, disk = (self._measured(node_id, place, link, figures, now_s) for place in (True, False))
        return memory.mixed(disk, cached)

    def _measured(
        self, node_id: str, place: bool, link: LinkSpeed, figures: FetchSpeed, now_s: float
    ) -> FetchSpeed:
        last = self._last.get((node_id, place), ())
        recent = [each for each in last if now_s - each.at_s < limits.FETCH_SPEED_S]
        rates = [each.bytes_per_s for each in recent if each.bytes_per_s is not None]
        opening_s = _median(each.opening_s for each in recent) if recent else figures.opening_s
        rate = min(_median(rates), _OTHER_LINK * link.bytes_per_s) if rates else figures.bytes_per_s
        return FetchSpeed(opening_s, rate)


def _median(figures: Iterable[float]) -> float:
    """The middle one, without ``statistics``, which a daemon at rest has no need to load."""
    ordered = sorted(figures)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
