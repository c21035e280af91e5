"""Small private files that survive a crash: whole before they get their name, on the disk before anybody
relies on them, and never read or written through a planted link.

Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from fleetd.errors import ConfigError, DiskFull, Forbidden

PRIVATE_DIR = 0o700
PRIVATE_FILE = 0o600


def private_folder(path: Path) -> None:
    """Make the folder, or make an existing one private.

    Raises:
        Forbidden: it is a link, or another user's, so another user could choose what lies in it.
        ConfigError, DiskFull: it cannot be made.
    """
    try:
        path.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise Forbidden(
                f"The folder {path} is a link or belongs to another user.", hint="Move it elsewhere."
            )
        if stat.S_IMODE(found.st_mode) != PRIVATE_DIR:
            path.chmod(PRIVATE_DIR)
    except OSError as error:
        raise _failed(path, error) from error


def read(path: Path, limit: int) -> bytes | None:
    """The first ``limit`` bytes of a file and one more if there are more; None if there is no such file.

    Raises:
        Forbidden: it is a link, or another user's.
        ConfigError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Forbidden(
                f"The file {path} is a symbolic link.", hint="Put the file itself there."
            ) from error
        raise ConfigError(f"The file {path} cannot be read: {_reason(error)}.") from error
    # Not a file object yet: there is none for a folder.
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise Forbidden(f"{path} is not a file of this user.", hint="Move it elsewhere.")
    with os.fdopen(fd, "rb") as file:
        if stat.S_IMODE(found.st_mode) != PRIVATE_FILE:
            os.fchmod(fd, PRIVATE_FILE)
        try:
            return file.read(limit + 1)
        except OSError as error:
            raise ConfigError(f"The file {path} cannot be read: {_reason(error)}.") from error


def replace(path: Path, data: bytes) -> None:
    """Put ``data`` in the file's place; on the disk when this returns.

    Raises:
        DiskFull, ConfigError: the old file is as it was.
    """
    try:
        draft = _draft(path, data)
        try:
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise _failed(path, error) from error


def create(path: Path, data: bytes) -> bool:
    """The same for a file that must not exist yet; False if another process was first.

    Raises:
        DiskFull, ConfigError: there is no such file.
    """
    try:
        draft = _draft(path, data)
        try:
            # A link fails if a rename would overwrite.
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise _failed(path, error) from error
    return True


def sweep(path: Path) -> None:
    """Remove what killed writers of this file left; only for a file that has one writer."""
    for left in path.parent.glob(f".{path.name}.*.new"):
        with contextlib.suppress(OSError):
            left.unlink()


def _draft(path: Path, data: bytes) -> Path:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        flush(fd)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return draft


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Raises OSError."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Bring what was written to a file to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flush(fd)
    finally:
        os.close(fd)


def flush(fd: int) -> None:
    """Bring a file, or a folder's names, to the disk itself: macOS's fsync stops at the drive's cache."""
    if (whole := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        # Network and some external drives cannot; there fsync must do, as in SQLite.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, whole)
            return
    os.fsync(fd)


def _failed(path: Path, error: OSError) -> DiskFull | ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            f"{path} cannot be written: {_reason(error)}. What was there is unchanged.",
            hint="Free some space.",
        )
    return ConfigError(f"{path} cannot be written: {_reason(error)}.", hint="Check who owns the folder.")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
