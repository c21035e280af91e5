"""What a model's files were when they arrived: sizes, BLAKE3 hashes, and stat signatures that save hashing.

For a model that fleetd installed the manifest lies in its folder and is the truth: a file that differs is
damaged. For a model that belongs to somebody else (the hub cache, a folder of the user's) the same record
lies in fleetd's own models folder and is a cache.
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

FILE_NAME = "fleetd-manifest.json"
_CHUNK_BYTES = 4 * limits.MIB
Progress = Callable[[int, int], None]


class FileRecord(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    inode: int
    blake3: str

    def matches(self, stat: os.stat_result) -> bool:
        return (self.size_bytes, self.mtime_ns, self.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Origin(msgspec.Struct, frozen=True):
    """The file an import was made from."""

    path: str
    size_bytes: int
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    source: Source
    files: dict[str, FileRecord]
    revision: str | None = None
    origin: Origin | None = None
    version: int = 1


def is_part(name: str) -> bool:
    """Whether a file of this name decides what the model computes.

    A manifest by any spelling is none: some file systems take it for this one.
    """
    return name.lower() != FILE_NAME and name.endswith(
        (".safetensors", ".json", ".jinja", ".tiktoken", "tokenizer.model", "merges.txt", "vocab.txt")
    )


def part_files(path: Path) -> list[Path]:
    """The files of a model folder that decide what it computes, by name."""
    return sorted(file for file in path.iterdir() if is_part(file.name) and file.is_file())


def part_stats(path: Path) -> dict[str, tuple[int, int, int]]:
    """Equal while no file that decides what a model computes was changed or replaced."""
    stats = ((file.name, file.stat()) for file in part_files(path))
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats}


def hash_file(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """BLAKE3 of a file's content; ``progress`` is told of every piece. Read, not mapped: a file that shrinks
    while it is read must end in a wrong hash, not in SIGBUS. Raises ModelCorrupt if it cannot be read."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hash_into(hasher, path, progress)
    return str(hasher.hexdigest())


def hash_into(hasher: blake3.blake3, path: Path, progress: Callable[[int], None]) -> None:
    """The same into a hash that goes on."""
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
    """Records of these files; hashes of ``known`` are kept where the stat signature is the same."""
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
    """Write beside, flush, rename: a reader sees the old one or the new one. Of two that save at once, on
    threads or in processes, one is last."""
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
    """The manifest, or None where there is none. Raises ModelCorrupt for one that cannot be read."""
    try:
        raw = read_regular(file, limits.MODEL_JSON_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelCorrupt(f"{file} cannot be read: {error.strerror}.", hint=PULL_AGAIN) from None
    try:
        return msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelCorrupt(f"{file} is damaged: {error}.", hint=PULL_AGAIN) from None
