"""How a model comes into the models folder: it is staged, checked, recorded and moved there in one step.

MODELS/.partial/FOLDER/          files that are being written; the next attempt resumes or deletes them
MODELS/.partial/FOLDER~old/      the model that the new one replaces; ~removed: one that is being deleted
MODELS/.partial/FOLDER~imported/ the result while a GGUF file from the hub is imported
MODELS/.locks/FOLDER             a lock that the process holds which installs FOLDER
MODELS/FOLDER/                   the complete model, with its manifest

A process may be killed between any two steps; ``sweep`` puts right what it left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fleetd import limits
from fleetd.errors import DiskFull, ModelCorrupt, ModelError
from fleetd.models import manifest, names
from fleetd.models.folder import Source
from fleetd.models.opening import read_regular
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.verify import verify
from fleetd.storage.durable import sync_file, sync_folder

_MARK, OLD = "~", "old"
# The names that earlier versions gave to folders that they moved aside.
_EARLIER = re.compile(r"(.+)\.(old|removed|imported)")
PARTIAL, LOCKS = ".partial", ".locks"
#: The end of the name of a file that has not arrived whole.
PART = ".part"
# The file that names the staged content: a commit of the hub, or a digest.
_CONTENT_FILE, _CONTENT_BYTES = ".revision", 256


def partial_folder(models_dir: Path, folder: str) -> Path:
    """The place in which ``folder`` is staged."""
    return models_dir / PARTIAL / folder


def beside(models_dir: Path, folder: str, what: str) -> Path:
    """The place for something of ``folder`` for a moment. No model's name has the mark in it."""
    return models_dir / PARTIAL / f"{folder}{_MARK}{what}"


def staged_content(staged: Path) -> str | None:
    """The ``content`` that an earlier attempt gave to ``resume``; None if there was none."""
    try:
        return read_regular(staged / _CONTENT_FILE, _CONTENT_BYTES).decode("ascii") or None
    except (OSError, UnicodeDecodeError):
        return None


def resume(staged: Path, content: str, files: Iterable[str]) -> None:
    """Make the staging folder. Only files of ``files`` stay of an earlier attempt at the same content."""
    if staged_content(staged) != content:
        shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True, exist_ok=True)
    (staged / _CONTENT_FILE).write_text(content, encoding="ascii")
    wanted = {_CONTENT_FILE, *files}
    for stray in staged.iterdir():
        if stray.name.removesuffix(PART) not in wanted:
            stray.unlink()


def staged_bytes(staged: Path) -> int:
    """Bytes that have arrived in a staging folder."""
    return sum(entry.stat().st_size for entry in staged.iterdir() if entry.name != _CONTENT_FILE)


@contextlib.contextmanager
def locked(models_dir: Path, folder: str, report: Report) -> Iterator[None]:
    """Hold the lock of ``folder``. Reports "waiting" while another process holds it."""
    with _lock_file(models_dir, folder) as handle:
        while not _taken(handle):
            report(PullProgress(file="", done_bytes=0, total_bytes=0, stage="waiting"))
            time.sleep(0.2)
        yield


@contextlib.contextmanager
def _lock_file(models_dir: Path, folder: str) -> Iterator[int]:
    locks = models_dir / LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    handle = os.open(locks / folder, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def free_to_change(models_dir: Path, folder: str) -> Iterator[bool]:
    """Hold the lock of ``folder`` if no other process has it; yields whether it is held."""
    with _lock_file(models_dir, folder) as handle:
        yield _taken(handle)


def _taken(handle: int) -> bool:
    """Take the lock, which is held as long as its file is open. Returns False if another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(models_dir: Path) -> list[str]:
    """Put right what killed processes left, and return the folders that were brought back.

    A model that was moved aside comes back if its successor did not arrive. Downloads that can be resumed and
    models that another process installs now stay. Everything else is deleted.
    """
    back = []
    for left in sorted((models_dir / PARTIAL).glob("*")):
        folder, what = _moved_aside(left)
        with contextlib.suppress(OSError), _lock_file(models_dir, folder) as handle:
            if not _taken(handle) or (not what and staged_content(left) is not None):
                continue
            if what == OLD and not os.path.lexists(models_dir / folder):
                left.rename(models_dir / folder)
                back.append(folder)
            else:
                shutil.rmtree(left, ignore_errors=True)
    return back


def _moved_aside(left: Path) -> tuple[str, str]:
    """The folder that an entry of ``PARTIAL`` belongs to, and why it is there; "" means a download."""
    folder, _, what = left.name.partition(_MARK)
    earlier = _EARLIER.fullmatch(left.name)
    if earlier is not None and staged_content(left) is None:
        try:
            known = manifest.load(left / manifest.FILE_NAME)
        except ModelCorrupt:
            known = None
        # It may as well be a download of a model whose name ends so.
        if known is None or names.folder_name(known.name) == earlier[1]:
            return earlier[1], earlier[2]
    return folder, what


def require_space(folder: Path, need_bytes: int) -> None:
    """Raises DiskFull, with the figures, if ``need_bytes`` do not fit. Nothing is written before."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need_bytes + limits.DISK_RESERVE_BYTES:
        raise DiskFull(
            f"{_mib(need_bytes)} are needed in {folder} and {_mib(free)} are free "
            f"(of which {_mib(limits.DISK_RESERVE_BYTES)} stay in reserve).",
            hint="Free some space, or choose another folder with models.dir.",
        )


def _remove_all(staged: Path) -> None:
    shutil.rmtree(staged, ignore_errors=True)


@contextlib.contextmanager
def clean_on_full_disk(
    models_dir: Path, staged: Path, remove: Callable[[Path], object] = _remove_all
) -> Iterator[None]:
    """If the disk fills up meanwhile, delete what is staged, by ``remove``, and raise DiskFull."""
    try:
        yield
    except DiskFull:
        remove(staged)
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remove(staged)
        free = shutil.disk_usage(models_dir).free
        raise DiskFull(
            f"The disk of {models_dir} is full ({_mib(free)} free); what is not complete has been removed.",
            hint="Free some space, or choose another folder with models.dir.",
        ) from error


@contextlib.contextmanager
def cleared_if_unsound(staged: Path) -> Iterator[None]:
    """Delete the staged model if a check refuses it meanwhile: the next attempt may have a better source."""
    try:
        yield
    except ModelError:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def publish(
    staged: Path,
    models_dir: Path,
    folder: str,
    *,
    name: str,
    source: Source,
    revision: str | None = None,
    origin: manifest.Origin | None = None,
    report: Report,
) -> Path:
    """Check the staged model, flush it to the disk, write its manifest and move it to its place.

    Without the flush a file may be empty after a power cut, and only small models are hashed at each load.

    Raises:
        ModelCorrupt, ModelRefused: a check failed; the model stays staged, and the caller removes it.
    """

    def advance(done: int, total: int) -> None:
        report(PullProgress(file="", done_bytes=done, total_bytes=total, stage="verifying"))

    verify(staged)
    files = manifest.record_files(manifest.part_files(staged), progress=advance)
    for file in manifest.part_files(staged):
        sync_file(file)
    manifest.save(
        manifest.Manifest(name=name, source=source, files=files, revision=revision, origin=origin),
        staged / manifest.FILE_NAME,
    )
    sync_folder(staged)
    target = models_dir / folder
    if target.exists():  # an older or damaged copy
        retired = beside(models_dir, folder, OLD)
        shutil.rmtree(retired, ignore_errors=True)
        target.rename(retired)
        staged.rename(target)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        staged.rename(target)
    # Until then an attempt after a crash goes on with what has arrived.
    (target / _CONTENT_FILE).unlink(missing_ok=True)
    sync_folder(models_dir)
    return target


def _mib(count: int) -> str:
    return f"{count / limits.MIB:,.0f} MiB"
