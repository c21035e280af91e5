"""Which machines blocks came from, in the tables of the index. For use inside the index's transactions.

What has come of one machine while it was believed has a label. A label that is forgotten takes its blocks
with it, and no block is entered or read under it any more: also one that a worker has still held in memory,
or that comes back with an older copy of the files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

SCHEMA = """
CREATE TABLE origins (
    label   TEXT PRIMARY KEY,
    machine TEXT NOT NULL
) WITHOUT ROWID;
"""


def text(origins: Iterable[str]) -> str:
    """Labels as the column of blocks has them; "" for a block that was computed here."""
    return " ".join(sorted(origins))


class BlockOrigins:
    """Every method may raise sqlite3.Error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def add(self, label: str, machine: str) -> None:
        """Blocks that come from this machine from now on have this label."""
        self._db.execute("INSERT OR IGNORE INTO origins (label, machine) VALUES (?, ?)", (label, machine))

    def believed(self, origins: Iterable[str]) -> bool:
        """True if none of these labels was forgotten."""
        query = "SELECT 1 FROM origins WHERE label = ?"
        return all(self._db.execute(query, (label,)).fetchone() for label in origins)

    def machines(self) -> set[str]:
        """The machines that blocks may have come from."""
        return {str(row[0]) for row in self._db.execute("SELECT DISTINCT machine FROM origins")}

    def forget(self, machine: str) -> tuple[list[str], list[str]]:
        """Forget all that came from a machine, or rests on that. Returns its labels, and the files."""
        labels = self._labels("machine = ?", (machine,))
        self._db.execute("DELETE FROM origins WHERE machine = ?", (machine,))
        return labels, self._forget_labelled(labels)

    def agree(self) -> list[str]:
        """Forget blocks with labels that are not known, and labels that no block has. Returns the files."""
        rows = self._db.execute("SELECT DISTINCT origins FROM blocks")
        held = {label for row in rows for label in str(row[0]).split()}
        known = set(self._labels("TRUE", ()))
        self._db.executemany("DELETE FROM origins WHERE label = ?", [(label,) for label in known - held])
        return self._forget_labelled(held - known)

    def _labels(self, condition: str, values: Sequence[str]) -> list[str]:
        rows = self._db.execute(f"SELECT label FROM origins WHERE {condition}", values)  # noqa: S608  (ours)
        return [str(row[0]) for row in rows]

    def _forget_labelled(self, labels: Iterable[str]) -> list[str]:
        return [name for label in labels for name in forget_rows(self._db, "instr(origins, ?)", (label,))]


def forget_rows(db: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[str]:
    """Forget the blocks of which this is true; returns their files. ``condition``: a text of ours."""
    rows = db.execute(f"SELECT name FROM blocks WHERE {condition}", values)  # noqa: S608
    names = [str(row[0]) for row in rows]
    db.execute(f"DELETE FROM blocks WHERE {condition}", values)  # noqa: S608
    return names
