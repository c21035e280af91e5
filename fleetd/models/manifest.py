"""A record of a model's files as they arrived: sizes, BLAKE3 hashes, and stat signatures that save hashing.

For a model that fleetd installed the manifest lies in its folder and is the truth: a file that differs is
damaged. For a model that fleetd does not own (in the hub cache, or a folder of the user) the same record lies
in fleetd's models folder and is a cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import blake3
import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.folder import Source
from fleetd.models.json_files import PULL_AGAIN
from fleetd.models.opening import open_regular, read_regular
from fleetd.text.decoding import from_json

FILE_NAME = "fleetd-manifest.json"
_CHUNK_BYTES = 4 * limits.MIB
Progress = Callable[[int, int], None]


class FileRecord(msgspec.Struct, frozen=True):
    """One file when it was hashed."""

    size_bytes: int
    # When it was written, in nanoseconds since the epoch.
    mtime_ns: int
    inode: int
    # The hash of its content, in hex.
    blake3: str

    def matches(self, stat: os.stat_result) -> bool:
        """True if size, time and inode are still the same: the file is taken for unchanged."""
        return (self.size_bytes, self.mtime_ns, self.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Origin(msgspec.Struct, frozen=True):
    """The GGUF file that a model was imported from, as it was then."""

    # Its absolute path.
    path: str
    size_bytes: int
    # When it was written, in nanoseconds since the epoch.
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one model folder."""

    # The model's canonical name.
    name: str
    # How it came to this machine.
    source: Source
    # The files that decide what it computes, by name.
    files: dict[str, FileRecord]
    # The commit of the hub; None if it is not from there.
    revision: str | None = None
    # The file that it was imported from; None if it was not imported.
    origin: Origin | None = None
    # The version of this format.
    version: int = 1


def is_part(name: str) -> bool:
    """True if a file of this name decides what the model computes.

    The manifest does not, in any spelling: some file systems take all of them for one name.
    """
    return name.lower() != FILE_NAME and name.endswith(
        (".safetensors", ".json", ".jinja", ".tiktoken", "tokenizer.model", "merges.txt", "vocab.txt")
    )


def part_files(path: Path) -> list[Path]:
    """The files of a model folder that decide what it computes, by name."""
    return sorted(file for file in path.iterdir() if is_part(file.name) and file.is_file())


def part_stats(path: Path) -> dict[str, tuple[int, int, int]]:
    """Size, mtime and inode of those files: equal as long as no file is changed or replaced."""
    stats = ((file.name, file.stat()) for file in part_files(path))
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats}


def hash_file(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """BLAKE3 of a file's content, in hex. Raises ModelCorrupt if the file cannot be read.

    The file is read and not mapped: one that shrinks meanwhile must give a wrong hash, and no SIGBUS.

    Args:
        progress: called with the bytes of each piece.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hash_into(hasher, path, progress)
    return str(hasher.hexdigest())


def hash_into(hasher: blake3.blake3, path: Path, progress: Callable[[int], None]) -> None:
    """Add a file's content to ``hasher``. Arguments and errors as in ``hash_file``."""
    buffer = bytearray(_CHUNK_BYTES)
    try:
        with open_regular(path) as stream:
            while count := stream.readinto(buffer):
                hasher.update(memoryview(buffer)[:count])
                progress(count)
    except OSError as error:
        raise ModelCorrupt(f"{path} cannot be read: {error.strerror}.", hint=PULL_AGAIN) from None


def record_files(
    files: Iterable[Path], known: Manifest | None = None, progress: Progress = lambda done, total: None
) -> dict[str, FileRecord]:
    """Records of these files, by name. A file whose record in ``known`` matches is not hashed again."""
    found: dict[str, FileRecord] = {}
    pending: list[tuple[Path, os.stat_result]] = []
    for file in files:
        stat = file.stat()
        record = known.files.get(file.name) if known else None
        if record is not None and record.matches(stat):
            found[file.name] = record
        else:
            pending.append((file, stat))
    total = sum(stat.st_size for _, stat in pending)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    for file, stat in pending:
        digest = hash_file(file, advance)
        found[file.name] = FileRecord(stat.st_size, stat.st_mtime_ns, stat.st_ino, digest)
    return found


def save(manifest: Manifest, file: Path) -> None:
    """Write the manifest beside ``file``, flush it and rename it: a reader sees the old or the new one.

    If two threads or processes save at once, the later one's stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_native_id()}")
    try:
        with beside.open("wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1))
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def load(file: Path) -> Manifest | None:
    """The manifest in ``file``, or None if there is no file. Raises ModelCorrupt if it cannot be read."""
    try:
        raw = read_regular(file, limits.MODEL_JSON_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelCorrupt(f"{file} cannot be read: {error.strerror}.", hint=PULL_AGAIN) from None
    try:
        return from_json(raw, Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelCorrupt(f"{file} is damaged: {error}.", hint=PULL_AGAIN) from None
