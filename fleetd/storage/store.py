"""Durable state in one SQLite file, touched by one thread.

Every statement runs on the store's own thread, in the order it was submitted, so the event loop never waits
on a disk and no lock is needed. The file is opened at first use and again after a failure: a disk that was
full is used again once it has room. A file that is damaged is moved aside, with one log line, and a new one
is begun: what it holds (usage counts) is worth less than a daemon that starts.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fleetd import limits
from fleetd.errors import ConfigError
from fleetd.process.observe import get_logger
from fleetd.storage.database_damage import MALFORMED, is_damage

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

log = get_logger("fleetd.storage.store")

# Numbered by position, never edited once released: PRAGMA user_version says how many a file has seen.
MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE usage (
        request_id        TEXT PRIMARY KEY,
        started_s         REAL NOT NULL,
        ended_s           REAL,
        model             TEXT NOT NULL,
        node              TEXT NOT NULL,
        route             TEXT NOT NULL,
        state             TEXT NOT NULL CHECK (state IN ('reserved', 'settled', 'refunded')),
        reason            TEXT NOT NULL DEFAULT '',
        prompt_tokens     INTEGER NOT NULL DEFAULT 0 CHECK (prompt_tokens >= 0),
        cached_tokens     INTEGER NOT NULL DEFAULT 0 CHECK (cached_tokens >= 0),
        completion_tokens INTEGER NOT NULL DEFAULT 0 CHECK (completion_tokens >= 0),
        queue_s           REAL NOT NULL DEFAULT 0,
        prefill_s         REAL NOT NULL DEFAULT 0,
        decode_s          REAL NOT NULL DEFAULT 0
    ) WITHOUT ROWID;
    CREATE INDEX usage_by_start ON usage (started_s);
    CREATE INDEX usage_open ON usage (state) WHERE state = 'reserved';
    """,
    """
    CREATE TABLE trace (
        number     INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL,
        at_s       REAL NOT NULL,
        body       BLOB NOT NULL
    );
    CREATE INDEX trace_by_request ON trace (request_id);
    """,
    """
    ALTER TABLE usage ADD COLUMN first_s REAL;
    ALTER TABLE usage ADD COLUMN saved_s REAL NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE usage ADD COLUMN drafts_s REAL NOT NULL DEFAULT 0;
    ALTER TABLE usage ADD COLUMN smart_s REAL NOT NULL DEFAULT 0;
    ALTER TABLE usage ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
    """,
)

# A whole-file check at start costs about a second per gigabyte; a bigger file is checked on request only.
_CHECK_AT_START_BYTES = 32 * limits.MIB
_BUSY_S = 2.0
_SIDE_FILES = ("", "-wal", "-shm")


class StoreUnavailable(Exception):
    """The file cannot be used now (full disk, no permission, closed); it may be later."""


class Store:
    """The database of one home."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        # The executor starts its thread at the first submission, and joins it in close().
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleetd-store")
        self._pending = 0
        self._pending_lock = threading.Lock()
        self._closed = False

    @property
    def path(self) -> Path:
        return self._path

    def submit(self, work: Work[T]) -> Future[T]:
        """Run ``work`` in a transaction of its own, after everything submitted before it.

        Raises (here or from the future):
            StoreUnavailable: nothing was written.
        """
        with self._pending_lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            if self._pending >= limits.STORE_QUEUED:
                raise StoreUnavailable(f"{self._pending} writes are already waiting for the disk")
            # Not after ``close``, which would not close the file again that this opens.
            future = self._thread.submit(self._run, work)
            self._pending += 1
        future.add_done_callback(self._done)
        return future

    def call(self, work: Work[T]) -> T:
        """``submit`` and wait; blocks, so not for the event loop."""
        return self.submit(work).result()

    def check(self) -> list[str]:
        """SQLite's own full check: what is wrong with the file, empty if nothing is."""
        rows = self.call(lambda db: [str(row[0]) for row in db.execute("PRAGMA integrity_check")])
        return [row for row in rows if row != "ok"]

    def close(self) -> None:
        """Finish what was submitted and close the file; blocks."""
        with self._pending_lock:
            if self._closed:
                return
            self._closed = True
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=True)

    def _done(self, _future: Future[T]) -> None:
        with self._pending_lock:
            self._pending -= 1

    # ---- on the store's thread ---------------------------------------------------------------------------

    def _run(self, work: Work[T]) -> T:
        try:
            try:
                return self._attempt(work)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not is_damage(error):
                    raise
            self._set_aside()
            return self._attempt(work)
        # SQLite without memory raises MemoryError; a folder that does not let the file be moved, OSError.
        except (sqlite3.Error, MemoryError, OSError) as error:
            self._disconnect()
            raise StoreUnavailable(str(error) or type(error).__name__) from error

    def _attempt(self, work: Work[T]) -> T:
        if self._connection is None:
            self._connection = self._open()
        with self._connection as db:  # commits, or rolls back
            return work(db)

    def _open(self) -> sqlite3.Connection:
        # timeout: a backup tool or a curious user may hold the file for a moment.
        db = sqlite3.connect(self._path, timeout=_BUSY_S)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            # NORMAL may lose the last rows on power loss, never the file; these rows are statistics.
            db.execute("PRAGMA synchronous = NORMAL")
            # What is brought to the disk is brought past the drive's cache, where macOS leaves it.
            db.execute("PRAGMA fullfsync = ON")
            db.execute("PRAGMA checkpoint_fullfsync = ON")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                raise ConfigError(
                    f"{self._path} was written by a newer fleetd (schema {version}, this one knows "
                    f"{len(MIGRATIONS)}).",
                    hint="Update fleetd, or move the file away.",
                )
            if version and self._path.stat().st_size <= _CHECK_AT_START_BYTES:
                (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(f"{MALFORMED}: {verdict}")
            for number, script in enumerate(MIGRATIONS[version:], version + 1):
                db.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self) -> None:
        self._disconnect()
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
        for suffix in _SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").rename(f"{aside}{suffix}")
        log.error("store.damaged", file=str(self._path), moved_to=str(aside), note="a new one was begun")

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
