"""Whether the system has files in memory, decided by the benchmark: read before, or thrown out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

State = Literal["warm", "cold"]
#: What can be had on this system.
STATES: tuple[State, ...] = ("warm", "cold") if hasattr(os, "posix_fadvise") else ("warm",)
_PIECE = 1 << 20


def bring(folder: Path, state: State) -> None:
    """Have the system keep all files of a folder in memory, or none of them."""
    for fd in _files(folder):
        if state == "warm":
            while os.read(fd, _PIECE):
                pass
        else:
            os.fsync(fd)  # what is not on the disk yet cannot be thrown out
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: Path) -> Iterator[int]:
    for path in sorted(folder.iterdir()):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # the daemon needed its room
        try:
            yield fd
        finally:
            os.close(fd)
