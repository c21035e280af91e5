"""Roster records that members send: merged at once while they are few, and once a tick when they are many.

Each merge computes the members anew. A member that sends valid records without end would otherwise keep this
machine from everything else. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.p2p.membership.roster import rank
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.token_bucket import TokenBucket


class RosterInbox:
    """Records that wait to be merged: by one signer about one machine only the newest."""

    def __init__(self) -> None:
        self._budgets: dict[str, TokenBucket] = {}
        self._waiting: dict[tuple[bytes, str], RosterRecord] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def receive(self, sender: str, records: Sequence[RosterRecord], now_s: float) -> list[RosterRecord]:
        """Those to merge now: all of them, or none while ``sender`` has sent too many."""
        budget = self._budgets.get(sender)
        if budget is None:
            budget = self._budgets[sender] = TokenBucket(
                limits.ROSTER_MERGES_AT_ONCE, limits.ROSTER_MERGES_PER_S
            )
        if budget.take(max(1, len(records)), now_s):
            return list(records)
        for record in records:
            key = record.certificate, record.signer
            held = self._waiting.get(key)
            if held is None and len(self._waiting) >= limits.ROSTER_RECORDS:
                continue  # its sender has it still: rosters are compared with each session
            if held is None or rank(held) < rank(record):
                self._waiting[key] = record
        return []

    def due(self) -> list[RosterRecord]:
        """The next of those that wait, at most ``limits.ROSTER_RECORDS_PER_TICK``."""
        keys = list(self._waiting)[: limits.ROSTER_RECORDS_PER_TICK]
        return [self._waiting.pop(key) for key in keys]

    def forget(self, sender: str) -> None:
        """The machine is no member any more."""
        self._budgets.pop(sender, None)
