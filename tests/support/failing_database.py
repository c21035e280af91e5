"""SQLite that fails: at one statement, or from one on until it is mended, in every way that it can say so.

A row that is read counts as a statement: a file may be found damaged in the middle of one.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

FAULTS = {
    "locked": (sqlite3.OperationalError, sqlite3.SQLITE_BUSY),
    "full": (sqlite3.OperationalError, sqlite3.SQLITE_FULL),
    "cannot be read or written": (sqlite3.OperationalError, sqlite3.SQLITE_IOERR),
    "read-only": (sqlite3.OperationalError, sqlite3.SQLITE_READONLY),
    "out of memory": (MemoryError, None),
    "damaged": (sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT),
}


class FailingDatabase:
    """Counts what is asked of databases, on any thread, and fails from the statement ``fails_at`` on, so many
    ``times``. ``only``: fail where the path ends so."""

    def __init__(self, fails_at: int, fault: str, times: int = 1, only: str = "") -> None:
        self.asked = 0
        self._fails_at = fails_at
        self._fault = FAULTS[fault]
        self._times = times
        self._only = only
        self._lock = threading.Lock()

    def mend(self) -> None:
        """Fail no more."""
        self._times = 0

    @property
    def failed(self) -> bool:
        """True if there was a statement to fail at."""
        return self.asked > self._fails_at

    def ask(self) -> None:
        with self._lock:
            self.asked += 1
            fails = self._fails_at < self.asked <= self._fails_at + self._times
        if fails:
            kind, code = self._fault
            error = kind("injected")
            if code is not None:
                error.sqlite_errorcode = code  # type: ignore[attr-defined]
            raise error

    def connecting(self) -> Callable[..., sqlite3.Connection]:
        """To be used for ``sqlite3.connect``."""
        database, connect = self, sqlite3.connect

        class Rows(sqlite3.Cursor):
            def _ask(self) -> None:
                try:
                    database.ask()
                except BaseException:
                    self.close()  # a statement that fails has ended
                    raise

            def fetchone(self) -> Any:
                self._ask()
                return super().fetchone()

            def fetchall(self) -> list[Any]:
                self._ask()
                return super().fetchall()

            def __next__(self) -> Any:
                self._ask()
                return super().__next__()

        class Failing(sqlite3.Connection):
            def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
                # SQLite forgets a transaction without asking the disk for anything.
                if statement != "ROLLBACK":
                    database.ask()
                return self.cursor(Rows).execute(statement, *arguments)

            def executemany(self, *arguments: Any) -> sqlite3.Cursor:
                database.ask()
                return super().executemany(*arguments)

            def executescript(self, *arguments: Any) -> sqlite3.Cursor:
                database.ask()
                return super().executescript(*arguments)

            def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
                try:
                    if kind is None and self.in_transaction:
                        database.ask()  # the commit
                except BaseException:
                    self.rollback()
                    raise
                return super().__exit__(kind, error, trace)

        def chosen(path: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
            factory = Failing if str(path).endswith(self._only) else sqlite3.Connection
            return connect(path, *arguments, factory=factory, **options)

        return chosen
