"""How the files of a model are opened: strangers made them, and may have put something else in their place.

A pipe would be waited for until another program writes to it, and a terminal or a device does what it likes.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from fleetd.limits import MIB

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: Path, *, follow: bool = True) -> FileIO:
    """A regular file, to be read; waits for nothing.

    Args:
        follow: whether the last part of the path may be a link.

    Raises:
        OSError: there is none that may be read, or it is no regular file.
    """
    fd = os.open(path, _FLAGS if follow else _FLAGS | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return FileIO(fd)


def read_regular(path: Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a regular file and one more if there are more. Raises OSError."""
    found = bytearray()
    with open_regular(path) as file:
        # Of what only looks like a regular file, as some of Linux's own do, nothing may be there yet: None.
        while piece := file.read(min(limit + 1 - len(found), MIB)):
            found += piece
    return bytes(found)
