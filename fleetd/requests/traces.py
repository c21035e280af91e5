"""What was planned for a prompt and what came of it: the newest ``limits.TRACES``, in the daemon's database.

Written like the ledger: off the loop, in order, and never in the way. A disk that does not take a trace costs
that trace and a line per minute in the log.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from fleetd import limits
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.process.observe import get_logger
from fleetd.storage.store import Store, StoreUnavailable
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import msgpack_decoder

log = get_logger("fleetd.traces")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(Trace).decode


class Traces:
    def __init__(self, store: Store, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._told_s = float("-inf")
        # For listeners, which have no disk to wait for.
        self._ended: deque[Trace] = deque(maxlen=limits.EVENT_TRACES)
        self._number = 0

    def record(self, trace: Trace) -> None:
        """Keep it, in place of an earlier one with the same id and time. Does not wait and does not raise."""
        self._ended.append(trace)
        self._number += 1
        body = _encode(trace)

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM trace WHERE request_id = ? AND at_s = ?", (trace.id, trace.at_s))
            db.execute(
                "INSERT INTO trace (request_id, at_s, body) VALUES (?, ?, ?)", (trace.id, trace.at_s, body)
            )
            # By their count: the numbers of those that were replaced are missing.
            db.execute(
                "DELETE FROM trace WHERE number <= "
                "(SELECT number FROM trace ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (limits.TRACES,),
            )

        try:
            self._store.submit(write).add_done_callback(self._written)
        except StoreUnavailable as error:
            self._complain(error)

    def ended(self, number: int) -> tuple[int, list[Trace]]:
        """The traces recorded since ``number``, oldest first, and the number for the next time; -1: none yet.

        At most ``limits.EVENT_TRACES``.
        """
        new = 0 if number < 0 else min(self._number - number, len(self._ended))
        return self._number, list(self._ended)[len(self._ended) - new :]

    def newest(self, last: int, request_id: str = "") -> TracesView:
        """The newest traces, at most ``last``; of one request only, by its client's id, if named. Blocks.

        Each of its answers has an id of its own, which has more behind that. An unusable disk has none.
        """
        try:
            rows = self._store.call(
                lambda db: db.execute(
                    "SELECT body FROM trace WHERE :id IN ('', request_id) "
                    "OR substr(request_id, 1, length(:id) + 1) = :id || '-' ORDER BY number DESC LIMIT :last",
                    {"id": request_id, "last": last},
                ).fetchall()
            )
        except StoreUnavailable as error:
            self._complain(error)
            rows = []
        return TracesView([found for (body,) in rows if (found := _readable(body)) is not None])

    def _written(self, future: Future[None]) -> None:
        if (error := future.exception()) is not None:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        now_s = self._monotonic()
        if now_s - self._told_s >= limits.REPEAT_LOG_S:
            self._told_s = now_s
            log.warning("traces.degraded", error=str(error), note="answers are not affected")


def _readable(body: bytes) -> Trace | None:
    """The trace, or None for a record that another version wrote in another form."""
    try:
        trace = _decode(body)
    except UNREADABLE:
        return None
    # Every field has a default, so a record of another form may decode to a trace of nothing.
    return trace if trace.id else None
