"""Whether SQLite says that a file itself is broken, as opposed to a disk that is full or a file in use."""

from __future__ import annotations

import sqlite3

_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# What an error of our own begins with, as SQLite's does.
MALFORMED = "malformed"
_NO_TEXT = "Could not decode to UTF-8"


def is_damage(error: BaseException | None) -> bool:
    """True for an error that does not go away by waiting: the file has to be begun anew."""
    if isinstance(error, UnicodeDecodeError):
        return True  # SQLite names a part of the file in its message, and that is no text any more
    if not isinstance(error, sqlite3.DatabaseError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        # Extended codes carry the primary one in their low byte.
        return code & 0xFF in _CODES
    return str(error).startswith((MALFORMED, _NO_TEXT))
