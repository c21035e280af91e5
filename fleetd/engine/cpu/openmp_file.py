"""The file by which Intel's OpenMP library, on which MKL runs, knows in a process that it is loaded already.

The library removes it at a normal exit. A process that is killed leaves it: a kilobyte that stays taken, as
/dev/shm is in memory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")  # noqa: S108  (the library chooses it)


def sweep() -> None:
    """Remove the files of this user's processes that ended before ``remove`` was called."""
    user = os.getuid()
    for path in FOLDER.glob(f"__KMP_REGISTERED_LIB_*_{user}"):
        pid = path.name.split("_")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            remove(int(pid))


def remove(pid: int) -> None:
    """Remove the file of a process that has ended, if there is one. Only its owner can."""
    with contextlib.suppress(OSError):
        (FOLDER / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}").unlink()
