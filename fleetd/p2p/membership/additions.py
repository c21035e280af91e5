"""How many machines the word of each member may add here in a day. Pure.

Counted are the machines that no entry named before, on this machine's monotonic clock. The bound says when an
entry is taken, not whether: so clocks that are set change nothing, replays cost nothing, and rosters become
alike. It is counted by branch, the confirmed machine through which a signer is known, or each machine that a
member invents could invent as many again.
"""

from __future__ import annotations

from fleetd import limits
from fleetd.p2p.token_bucket import TokenBucket

_DAY_S = 86400.0


class Additions:
    """The counts of each branch."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, bool], TokenBucket] = {}

    def take(self, branch: str, now: float, *, direct: bool) -> bool:
        """Count a machine; False, and it is not counted, if the branch has added as many as it may for now.

        ``direct``: added by the confirmed machine itself. What those behind it add is counted apart, so that
        one of them cannot use up what it may add. ``now`` is monotonic seconds.
        """
        most = limits.ROSTER_ADDED_PER_DAY
        left = self._left.setdefault((branch, direct), TokenBucket(most, most / _DAY_S))
        return left.take(1, now)
