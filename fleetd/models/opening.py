"""How the files of a model are opened. Other people made them and may have put something else there.

Reading a pipe would wait until another program writes to it; a terminal or a device may do anything.
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
    """The regular file at ``path``, open for reading. Never waits.

    Args:
        follow: True if the last part of the path may be a link.

    Raises:
        OSError: there is no file that may be read, or it is no regular file.
    """
    fd = os.open(path, _FLAGS if follow else _FLAGS | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return FileIO(fd)


def read_regular(path: Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a regular file, and one more if the file is longer. Raises OSError."""
    found = bytearray()
    with open_regular(path) as file:
        # Some of Linux's own files only look regular; reading one gives None if nothing is there yet.
        while piece := file.read(min(limit + 1 - len(found), MIB)):
            found += piece
    return bytes(found)
