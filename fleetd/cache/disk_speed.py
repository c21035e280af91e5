"""How fast blocks are read: from the disk, or from what the system still has of their files in memory.

The two differ tenfold, so they are measured and priced apart. The system is asked for single bytes that it
must not fetch (RWF_NOWAIT); if it cannot, every file counts as one on the disk.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import msgspec

from fleetd import limits

# A measurement counts for one of the two speeds if so much of the files lay there.
_CLEARLY = 0.9


class DiskSpeeds(msgspec.Struct, frozen=True):
    """Bytes per second of what lies on the disk only, and of what the system has in memory; 0 is
    unmeasured."""

    disk: float = 0.0
    cached: float = 0.0

    def of(self, share: float | None) -> float:
        """The speed at which files are read of which this share is in memory, None unknown; 0 is
        unmeasured."""
        cached = self.cached or self.disk
        if not share or not cached:
            return self.disk
        disk = self.disk or limits.CACHE_READ_BYTES_PER_S
        return 1 / (share / cached + (1 - share) / disk)


def is_cached(share: float | None) -> bool | None:
    """Which of the two speeds reading such files measures; None for neither."""
    if share is None or share <= 1 - _CLEARLY:
        return False
    return True if share >= _CLEARLY else None


def cached_share(paths: Sequence[str], draw: random.Random) -> float | None:
    """How much of these files, about, the system has in memory; None if it does not tell.

    At most ``limits.CACHE_PROBES`` bytes are looked at, spread over the files. What is looked at may be
    fetched afterwards, so the places are others each time.
    """
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None or not paths:
        return None
    step = max(1, -(-len(paths) // limits.CACHE_PROBES))
    chosen = paths[::step]
    each = max(1, limits.CACHE_PROBES // len(chosen))
    asked = there = 0
    try:
        for path in chosen:
            found = _probe(path, each, nowait, draw)
            asked, there = asked + each, there + found
    except OSError:
        return None  # a file that has gone, or a file system without such reads
    return there / asked


def _probe(path: str, count: int, nowait: int, draw: random.Random) -> int:
    """How many of so many bytes of a file are in memory."""
    there, byte = 0, bytearray(1)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        for _ in range(count):
            try:
                there += os.preadv(fd, [byte], draw.randrange(max(1, size)), nowait)
            except BlockingIOError:
                pass
    finally:
        os.close(fd)
    return there


def read_soon(path: str) -> None:
    """Ask the system to fetch a file that is read next. Does nothing if it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return  # reading it says what is wrong
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass
    finally:
        os.close(fd)
