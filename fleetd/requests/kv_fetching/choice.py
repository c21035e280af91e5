"""Whether fetching a prompt's keys and values beats computing them, from whom, and in which order. Pure.

first to last    the prompt waits for all of them
last to first    it is computed from its first token on meanwhile, until the two meet
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from fleetd import limits
from fleetd.plan.beginnings import gains, meeting_s, mixes
from fleetd.plan.fetch_speeds import FetchSpeed


class FetchSource(msgspec.Struct, frozen=True):
    """A machine that has the first ``blocks`` of those that lack, and how fast they come from it.
    ``state_bytes``: of the snapshots that come with them. ``equivalent``: other numerics had a part.
    ``cached``: how much of their files its system has in memory."""

    node_id: str
    name: str
    speed: FetchSpeed
    blocks: int
    state_bytes: int = 0
    equivalent: bool = False
    cached: float = 0.0

    def seconds(self, block_bytes: int, blocks: int | None = None) -> float:
        """Seconds from the decision to the last byte, for so many of the blocks or for all."""
        return self.speed.seconds(
            (self.blocks if blocks is None else blocks) * block_bytes + self.state_bytes
        )

    def mixed_s(self, block_bytes: int, computed_s: Sequence[float]) -> float:
        """Seconds from the decision until what is computed meets what comes, the last block first."""
        return meeting_s(
            self.blocks,
            lambda blocks: computed_s[blocks - 1] if blocks else 0.0,
            lambda blocks: self.seconds(block_bytes, blocks),
        )

    def block_s(self, block_bytes: int) -> float:
        """Seconds that a block takes, or a snapshot."""
        return max(block_bytes, self.state_bytes) / max(1.0, self.speed.bytes_per_s)


class FetchChoice(msgspec.Struct, frozen=True):
    """``seconds``: from the decision until the prompt's beginning is here, part of it computed if the blocks
    come ``last_first``."""

    source: FetchSource
    seconds: float
    last_first: bool = False


def choose_fetch(
    sources: Iterable[FetchSource], computed_s: Sequence[float], block_bytes: int
) -> FetchChoice | None:
    """The source that saves most; None if none saves FETCH_LEAST_GAIN of computing.

    Args:
        computed_s: what computing the first block takes, the first two, and so on.
    """
    best, most_s = None, 0.0
    for source in sources:
        if not 0 < source.blocks <= len(computed_s) or source.speed.bytes_per_s <= 0:
            continue
        alone_s = computed_s[source.blocks - 1]
        choice = _ordered(source, computed_s, block_bytes)
        if gains(choice.seconds, alone_s) and alone_s - choice.seconds > most_s:
            best, most_s = choice, alone_s - choice.seconds
    return best


def _ordered(source: FetchSource, computed_s: Sequence[float], block_bytes: int) -> FetchChoice:
    """Blocks come last to first only if that is clearly sooner: in order, what has come before a failure is
    of use at once. A state has no half, so a model that needs snapshots waits for them."""
    waited_s = source.seconds(block_bytes)
    if not source.state_bytes:
        mixed_s = source.mixed_s(block_bytes, computed_s)
        if mixes(mixed_s, waited_s):
            return FetchChoice(source, mixed_s, last_first=True)
    return FetchChoice(source, waited_s)


def within_s(choice: FetchChoice, computed_s: Sequence[float], spent_s: float) -> float:
    """The most that a fetch may take: so many times as long as planned, and no longer than computing what it
    brings, less what has been spent on asking.

    Args:
        computed_s: as in ``choose_fetch``.
    """
    most_s = min(limits.FETCH_LATE * choice.seconds, computed_s[choice.source.blocks - 1] - spent_s)
    return max(limits.FETCH_BLOCK_S, most_s)


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
