"""The log under launchd, which opens a file for the daemon's output and lets it grow for ever.

The daemon itself begins a new file, and leaves the old one beside it. It does so only where its standard
error is the file of that name: a terminal, a pipe or somebody else's file stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from fleetd import limits

_OUTPUT_FDS = (1, 2)


class RotatingOutput(logging.StreamHandler[TextIO]):
    """Writes to standard error, and begins ``file`` anew whenever it has ``limits.LOG_FILE_BYTES``."""

    def __init__(self, file: Path) -> None:
        super().__init__(sys.stderr)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        # The disk may be full, or the folder another user's: the log then grows as it would without.
        with contextlib.suppress(OSError):
            self._rotate()

    def _rotate(self) -> None:
        written = os.fstat(2)
        if written.st_size < limits.LOG_FILE_BYTES or not os.path.samestat(written, self._file.lstat()):
            return
        fresh = self._file.with_name(f".{self._file.name}.new")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            self._file.rename(self._file.with_name(f"{self._file.name}.1"))
            fresh.rename(self._file)
            # Whatever writes to them, a crash's traceback too, writes to the new file from here on.
            for number in _OUTPUT_FDS:
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.fstat(number), written):
                        os.dup2(fd, number, inheritable=True)
        finally:
            os.close(fd)
