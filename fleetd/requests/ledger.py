"""The usage ledger: who computed how much, for which model, and when. Never what.

Each request has one row: **reserved** before any work, then **settled** with its tokens and times, or
**refunded** with a reason and no tokens. A row still reserved at the next start was lost in a crash, and is
refunded as such.

No answer ever waits for, or fails because of, the ledger: when the disk does not take a row, one line per
minute says so, and the row is written with the settlement if the disk has recovered by then.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import groupby
from operator import itemgetter

import msgspec

from fleetd import limits
from fleetd.control.usage_report import FirstTokenTimes, Span, UsageReport, UsageRow, UsageTotals
from fleetd.engine.protocol import Timings, Usage
from fleetd.errors import FleetError
from fleetd.process.observe import get_logger
from fleetd.storage.store import Store, StoreUnavailable

log = get_logger("fleetd.requests.ledger")

_DAY_S = 86_400.0

#: The route of rows for the scoring of a prompt, which serves a request and is none.
SCORE_ROUTE = "score"


class Reservation(msgspec.Struct, frozen=True):
    """What is known before the work; ``at_s`` is Unix time."""

    request_id: str
    model: str
    node: str
    route: str
    at_s: float


class Gain(msgspec.Struct, frozen=True):
    """What other machines, drafts and smart prefill did for one request."""

    # As ``Trace`` has it.
    saved_s: float = 0.0
    # Of it, by drafts and by smart prefill.
    drafts_s: float = 0.0
    smart_s: float = 0.0
    # Whether several machines read the prompt together.
    shared: bool = False


class Spent(msgspec.Struct):
    """What work has taken so far."""

    usage: Usage = Usage()
    timings: Timings = Timings()


_NO_GAIN = Gain()
# How the start of a row is named by the day and by the hour.
_SPANS: Mapping[str, str] = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d %H:00"}


class Ledger:
    """Reserve, settle and refund from the event loop; the rest blocks and belongs in a thread."""

    def __init__(
        self,
        store: Store,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._now = now
        self._monotonic = monotonic
        self._told_s = float("-inf")
        self._lost = 0

    async def reserve(self, reservation: Reservation) -> None:
        """Write the row before work begins; stops waiting (not writing) after ``limits.LEDGER_WAIT_S``."""
        try:
            future = self._store.submit(lambda db: _insert(db, reservation))
        except StoreUnavailable as error:
            self._complain(error)
            return
        future.add_done_callback(self._written)
        done = asyncio.wrap_future(future)
        # Its failure is told by _written; asyncio would tell it again, with a traceback, for every request.
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([done], timeout=limits.LEDGER_WAIT_S)

    @asynccontextmanager
    async def entry(self, row: Reservation) -> AsyncIterator[Spent]:
        """A row for the work within: reserved, then settled with what was noted of it by then, or refunded.

        The reason of a refund is the code of the FleetError that ended it, else "cancelled".
        """
        spent = Spent()
        try:
            await self.reserve(row)
            yield spent
        except BaseException as error:
            self.refund(row, error.code if isinstance(error, FleetError) else "cancelled")
            raise
        self.settle(row, spent.usage, spent.timings, "stop")

    def settle(
        self,
        reservation: Reservation,
        usage: Usage,
        timings: Timings,
        reason: str,
        *,
        first_s: float | None = None,
        gain: Gain = _NO_GAIN,
    ) -> None:
        """Record what was computed; does not wait. ``reason`` is the finish reason, or "cancelled".

        ``first_s``: from the request's arrival to its first token.
        """
        self._close(reservation, "settled", reason, usage, timings, first_s, gain)

    def refund(self, reservation: Reservation, reason: str) -> None:
        """Record that nothing was delivered; does not wait. ``reason`` is an error code."""
        self._close(reservation, "refunded", reason, Usage(), Timings())

    def _close(
        self,
        row: Reservation,
        state: str,
        reason: str,
        usage: Usage,
        timings: Timings,
        first_s: float | None = None,
        gain: Gain = _NO_GAIN,
    ) -> None:
        ended_s = self._now()

        def write(db: sqlite3.Connection) -> None:
            # The reservation may not have reached the disk; the settlement then brings the whole row.
            _insert(db, row)
            db.execute(
                "UPDATE usage SET state = ?, reason = ?, ended_s = ?, prompt_tokens = ?, cached_tokens = ?,"
                " completion_tokens = ?, queue_s = ?, prefill_s = ?, decode_s = ?, first_s = ?, saved_s = ?,"
                " drafts_s = ?, smart_s = ?, shared = ?, node = ?"
                " WHERE request_id = ? AND state = 'reserved'",
                (
                    state,
                    reason,
                    ended_s,
                    usage.prompt_tokens,
                    usage.cached_tokens,
                    usage.completion_tokens,
                    timings.queue_s,
                    timings.prefill_s,
                    timings.decode_s,
                    first_s,
                    gain.saved_s,
                    gain.drafts_s,
                    gain.smart_s,
                    gain.shared,
                    row.node,  # where it ended up, which need not be where it was first sent
                    row.request_id,
                ),
            )

        try:
            self._store.submit(write).add_done_callback(self._written)
        except StoreUnavailable as error:
            self._complain(error)

    def _written(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Log at most one line per ``limits.REPEAT_LOG_S``. Runs on the loop and on the store's thread."""
        self._lost += 1
        now_s = self._monotonic()
        if now_s - self._told_s >= limits.REPEAT_LOG_S:
            self._told_s = now_s
            log.warning(
                "ledger.degraded", error=str(error), writes_lost=self._lost, note="answers are not affected"
            )

    # ---- blocking ----------------------------------------------------------------------------------------

    def recover(self) -> int:
        """Refund what a crash left reserved; returns how many. Call before the first reservation."""
        return self._store.call(
            lambda db: (
                db.execute(
                    "UPDATE usage SET state = 'refunded', reason = 'crash', ended_s = ?"
                    " WHERE state = 'reserved'",
                    (self._now(),),
                ).rowcount
            )
        )

    def prune(self, keep_days: int) -> int:
        """Delete rows that are ``keep_days`` older than now and than the newest row; returns how many.

        A clock that has jumped ahead would otherwise make all of them old.
        """
        now_s, kept_s = self._now(), keep_days * _DAY_S
        return self._store.call(
            lambda db: (
                db.execute(
                    "DELETE FROM usage WHERE started_s < min(?, (SELECT max(started_s) FROM usage)) - ?",
                    (now_s, kept_s),
                ).rowcount
            )
        )

    def usage(self, days: int, by: Span = "day") -> UsageReport:
        """The last ``days`` days (today is one of them, in local time) by the day or hour, newest first.

        Requests still running are counted without tokens. An unusable disk gives an empty report.
        """
        now_s = self._now()
        try:
            return self._store.call(lambda db: _report(db, now_s, days, _SPANS[by]))
        except StoreUnavailable as error:
            self._complain(error)
            return UsageReport()


def _insert(db: sqlite3.Connection, row: Reservation) -> None:
    db.execute(
        "INSERT INTO usage (request_id, started_s, model, node, route, state)"
        " VALUES (?, ?, ?, ?, ?, 'reserved') ON CONFLICT (request_id) DO NOTHING",
        (row.request_id, row.at_s, row.model, row.node, row.route),
    )


def _report(db: sqlite3.Connection, now_s: float, days: int, span: str) -> UsageReport:
    found = db.execute(
        "SELECT sum(answers), sum(answers AND state = 'refunded'), sum(answers * prompt_tokens),"
        " sum(cached_tokens), sum(completion_tokens), sum(answers * prefill_s), sum(decode_s),"
        " sum((NOT answers) * prompt_tokens), count(first_s), total(first_s), sum(saved_s),"
        " sum(drafts_s), sum(smart_s), sum(shared),"
        " strftime(?, started_s, 'unixepoch', 'localtime') AS day, model, node"
        " FROM (SELECT *, route <> ? AS answers FROM usage)"
        " WHERE date(started_s, 'unixepoch', 'localtime') > date(?, 'unixepoch', 'localtime', ?)"
        " GROUP BY day, model, node ORDER BY day DESC, model, node",
        (span, SCORE_ROUTE, now_s, f"-{days} days"),
    )
    rows = [UsageRow(*row) for row in found]
    times = db.execute(
        "SELECT strftime(?, started_s, 'unixepoch', 'localtime') AS day, first_s FROM usage"
        " WHERE first_s IS NOT NULL AND date(started_s, 'unixepoch', 'localtime')"
        " > date(?, 'unixepoch', 'localtime', ?) ORDER BY day DESC, first_s",
        (span, now_s, f"-{days} days"),
    )
    return UsageReport(
        rows, _total(rows), [_times(day, group) for day, group in groupby(times, itemgetter(0))]
    )


def _times(day: str, rows: Iterable[tuple[str, float]]) -> FirstTokenTimes:
    """The median and the 90th percentile of one span's rows, which begin with the shortest time."""
    seconds = [first_s for _, first_s in rows]
    return FirstTokenTimes(day, *(seconds[math.ceil(share * len(seconds)) - 1] for share in (0.5, 0.9)))


def _total(rows: list[UsageRow]) -> UsageTotals:
    names = [field.name for field in msgspec.structs.fields(UsageTotals)]
    return UsageTotals(**{name: sum(getattr(row, name) for row in rows) for name in names})
