"""Roster records that members send: merged at once while they are few, and once a tick when they are many.

Each merge computes the members anew. A member that sends valid records without end would otherwise keep this
machine from everything else. Records about more machines than a member may add in a day wait longer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.p2p.membership.roster import rank
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.token_bucket import TokenBucket

_Records = dict[tuple[bytes, str], RosterRecord]  # by certificate and signer


class RosterInbox:
    """Records that wait to be merged: by one signer about one machine only the newest."""

    def __init__(self) -> None:
        self._budgets: dict[str, TokenBucket] = {}
        self._waiting: _Records = {}
        self._late: _Records = {}
        self._late_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def late(self) -> list[RosterRecord]:
        """Entries about machines over the bound of a day."""
        return list(self._late.values())

    def receive(self, sender: str, records: Sequence[RosterRecord], now_s: float) -> list[RosterRecord]:
        """Those to merge now: all of them, or none while ``sender`` has sent too many."""
        budget = self._budgets.get(sender)
        if budget is None:
            budget = self._budgets[sender] = TokenBucket(
                limits.ROSTER_MERGES_AT_ONCE, limits.ROSTER_MERGES_PER_S
            )
        if budget.take(max(1, len(records)), now_s):
            return list(records)
        _keep(self._waiting, records)
        return []

    def put_off(self, records: Sequence[RosterRecord], now_s: float) -> None:
        """Keep records to merge in ``limits.ROSTER_LATE_S``."""
        if not self._late:
            self._late_s = now_s
        _keep(self._late, records)

    def due(self, now_s: float) -> list[RosterRecord]:
        """The next of those that wait, at most ``limits.ROSTER_RECORDS_PER_TICK``."""
        if self._late and now_s - self._late_s >= limits.ROSTER_LATE_S:
            self._late_s = now_s
            return _take(self._late)
        return _take(self._waiting)

    def forget(self, sender: str) -> None:
        """The machine is no member any more."""
        self._budgets.pop(sender, None)


def _keep(kept: _Records, records: Sequence[RosterRecord]) -> None:
    for record in records:
        key = record.certificate, record.signer
        held = kept.get(key)
        if held is None and len(kept) >= limits.ROSTER_RECORDS:
            continue  # its sender has it still: rosters are compared with each session
        if held is None or rank(held) < rank(record):
            kept[key] = record


def _take(kept: _Records) -> list[RosterRecord]:
    return [kept.pop(key) for key in list(kept)[: limits.ROSTER_RECORDS_PER_TICK]]
