"""Whether fetching a prompt's keys and values beats computing them, and from which machine. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetd import limits
from fleetd.plan.beginnings import fetch_s
from fleetd.plan.costs import LinkSpeed


@dataclass(frozen=True, slots=True)
class FetchSource:
    """A machine that has the first ``blocks`` of those that lack; ``bytes_per_s``: of its disk, 0 unknown.
    ``state_bytes``: of the snapshots that come with them. ``plan``: other numerics had a part."""

    node_id: str
    name: str
    link: LinkSpeed
    blocks: int
    bytes_per_s: float = 0.0
    state_bytes: int = 0
    plan: bool = False

    def seconds(self, block_bytes: int) -> float:
        """From the decision to the last byte."""
        return fetch_s(self.blocks * block_bytes + self.state_bytes, self.link, self.bytes_per_s)

    def block_s(self, block_bytes: int) -> float:
        """What a block takes, or a snapshot."""
        disk = self.bytes_per_s or limits.CACHE_READ_BYTES_PER_S
        return max(block_bytes, self.state_bytes) / max(1.0, min(self.link.bytes_per_s, disk))


def best_source(
    sources: Iterable[FetchSource], computed_s: Sequence[float], block_bytes: int
) -> FetchSource | None:
    """The one that saves most; None where none saves FETCH_LEAST_GAIN of computing.

    Args:
        computed_s: what computing the first block takes, the first two, and so on.
    """
    best, most_s = None, 0.0
    for source in sources:
        if not 0 < source.blocks <= len(computed_s) or source.link.bytes_per_s <= 0:
            continue
        alone_s = computed_s[source.blocks - 1]
        fetched_s = source.seconds(block_bytes)
        if fetched_s <= (1 - limits.FETCH_LEAST_GAIN) * alone_s and alone_s - fetched_s > most_s:
            best, most_s = source, alone_s - fetched_s
    return best


def checked_by(states: Sequence[tuple[int, int]], blocks: int = 0) -> tuple[tuple[int, int], ...]:
    """The furthest snapshot that can be checked by the one before it: both, or none.

    Args:
        states: at the ends of how many blocks there are some, ascending, with the bytes of each.
        blocks: only the one at the end of so many will do.
    """
    for earlier, later in reversed(list(itertools.pairwise(states))):
        if later[0] - earlier[0] <= limits.FETCH_CHECK_BLOCKS and blocks in (0, later[0]):
            return earlier, later
    return ()
