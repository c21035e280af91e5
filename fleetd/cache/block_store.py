"""Sealed blocks in a folder, under an index with a quota. Every method blocks; one thread at a time.

    FOLDER/index.db     the index; any number of processes have it open
    FOLDER/blocks/      a file for each block, named by the machine's key
    KEY FILE            in the identity folder; without it the rest is noise

A block is entered, written, then declared ready; nothing is brought to the disk at once, because a file that
a power cut took back does not open, and is a miss like any other. Whatever is wrong with the index or a file,
the answer is a miss.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.cache import block_file, disk_speed, machine_key
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.index import (
    Distrusted,
    FoundBlocks,
    FoundText,
    Index,
    KeyReplaced,
    NewBlock,
    NoRoom,
    RestoredPrompt,
)
from fleetd.cache.machine_key import MachineKey
from fleetd.cache.settings import DiskCacheSettings, default_quota
from fleetd.control.cache_report import CacheReport
from fleetd.errors import FleetError
from fleetd.storage import durable
from fleetd.storage.database_damage import is_damage

_INDEX = "index.db"
_SIDE_FILES = ("", "-wal", "-shm", "-journal")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheUnavailable(Exception):
    """The disk cannot be used now; the sentence says why. It may be later."""


class NotKept(Exception):
    """A prompt's blocks are not kept, for no fault of the disk."""


class PromptBlocks(msgspec.Struct, frozen=True):
    """A prompt whose blocks are written: their names, their files, what they are worth now, and how many of
    them, from the first on, are ``here`` already. ``states``: name and file of the snapshot at the end of the
    block of that number."""

    names: tuple[bytes, ...]
    files: tuple[str, ...]
    priority: float
    here: int
    states: Mapping[int, tuple[bytes, str]] = msgspec.field(default_factory=dict)


def _no_fault(_place: str) -> None:
    """Where tests end the process."""


class BlockStore:
    """See the module. ``at`` is called at every step between which a process may die."""

    def __init__(
        self,
        settings: DiskCacheSettings,
        *,
        most_blocks: int = limits.CACHE_BLOCKS,
        clock: Callable[[], float] = time.time,
        at: Callable[[str], None] = _no_fault,
    ) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._blocks = self._folder / "blocks"
        self._key_file = Path(settings.key_file)
        self._most_blocks = most_blocks
        self._clock = clock
        self._at = at
        self._index: Index | None = None
        self._key: MachineKey | None = None
        # At which bytes of files the system is asked; nothing depends on it being guessed.
        self._draw = random.Random()  # noqa: S311

    def close(self) -> None:
        """Close the index; the next call opens it again."""
        if self._index is not None:
            self._index.close()
        self._index = self._key = None

    # ---- reading -----------------------------------------------------------------------------------------

    def find(self, names: Sequence[bytes], states: Sequence[bytes] = (), *, own: bool = False) -> FoundBlocks:
        """How many of these blocks, from the first on, are here; see ``Index.find``. Raises
        CacheUnavailable."""
        with self._open() as (index, key):
            # Most prompts have nothing here: one name tells.
            if names and not index.find(key.id, [key.file_name(names[0])], own=own).blocks:
                return FoundBlocks(0, 0, 0.0)
            files = [key.file_name(name) for name in names]
            found = index.find(key.id, files, [key.file_name(name) for name in states], own=own)
            if not found.blocks:
                return found
            cached = self._cached_share(files[: found.blocks])
            return replace(found, bytes_per_s=index.speeds.of(cached), cached=cached)

    def cached_share(self, names: Sequence[bytes]) -> float | None:
        """How much of these blocks, about, the system has in memory; None unknown. Raises
        CacheUnavailable."""
        with self._open() as (_, key):
            return self._cached_share([key.file_name(name) for name in names])

    def _cached_share(self, files: Sequence[str]) -> float | None:
        return disk_speed.cached_share([self._path(file) for file in files], self._draw)

    def read_soon(self, name: bytes) -> None:
        """Let the system fetch a block that is read next. Raises CacheUnavailable."""
        with self._open() as (_, key):
            disk_speed.read_soon(self._path(key.file_name(name)))

    def read(
        self,
        name: bytes,
        targets: Callable[[BlockHeader], Sequence[memoryview]],
        check: Callable[[], None] = lambda: None,
        *,
        own: bool = False,
    ) -> BlockHeader | None:
        """Put a block's payload into ``targets``, as ``block_file.unseal``. None if it is not here, or not
        what it should be: then it is forgotten, and the targets hold rubbish. ``own``: None, too, if it was
        not computed here.

        ``check`` is called once the payload is there, and raises BlockDamaged for one that it did not expect.

        Raises CacheUnavailable.
        """
        with self._open() as (index, key):

            def believed(header: BlockHeader) -> Sequence[memoryview]:
                if header.origins and not index.believed(header.origins):
                    raise BlockDamaged("a machine that it came from is not believed any more")
                return targets(replace(header, origins=()))

            file_name = key.file_name(name)
            try:
                with open(self._path(file_name), "rb", buffering=0) as file:
                    header = block_file.unseal(key, name, _filler(file), believed)
                check()
            except (OSError, BlockDamaged):
                self._delete_file(file_name)
                index.forget(file_name)
                return None
            return None if own and header.origins else header

    # ---- beginnings of texts -----------------------------------------------------------------------------

    def begin_with(self, beginnings: Sequence[tuple[bytes, bytes]]) -> None:
        """Remember which block the beginnings of a text fill: (link, name). Raises CacheUnavailable."""
        with self._open() as (index, key):
            index.begin_with(
                key.id, [(key.file_name(link), key.file_name(name)) for link, name in beginnings]
            )

    def longest(self, links: Sequence[bytes], *, own: bool = False) -> FoundText:
        """What is here of a text with these beginnings; see ``Index.longest``. Raises CacheUnavailable,
        NotKept."""
        with self._open() as (index, key):
            found = index.longest(key.id, [key.file_name(link) for link in links], own=own)
            cached = self._cached_share(found.files)
            return replace(found, bytes_per_s=index.speeds.of(cached), cached=cached)

    # ---- writing -----------------------------------------------------------------------------------------

    def price(self, names: Sequence[bytes], worth: float) -> None:
        """A prompt's blocks were used or written; see ``Index.price``. Raises CacheUnavailable."""
        with self._open() as (index, key):
            index.price([key.file_name(name) for name in names], worth)

    def prompt(
        self, names: Sequence[bytes], worth: float, states: Mapping[int, bytes] | None = None
    ) -> PromptBlocks:
        """Begin to write a prompt's blocks, and snapshots of these names at the ends of some. Raises
        CacheUnavailable."""
        with self._open() as (index, key):
            files = tuple(key.file_name(name) for name in names)
            snapshots = {number: (name, key.file_name(name)) for number, name in (states or {}).items()}
            here = index.find(key.id, files).blocks
            priority = index.price([*files, *(file for _, file in snapshots.values())], worth)
            return PromptBlocks(tuple(names), files, priority, here, snapshots)

    def write(
        self,
        prompt: PromptBlocks,
        number: int,
        model: str,
        header: BlockHeader,
        buffers: Callable[[], Sequence[memoryview]],
        pause: Callable[[float], None] = lambda seconds: None,
        *,
        state: bool = False,
    ) -> int:
        """Keep the block of this number, or the snapshot at its end; returns the bytes written, 0 if it is
        here already.

        Args:
            buffers: gives the payload, only if it is needed.
            pause: called after each piece with the seconds that it took.

        Raises:
            NotKept: the quota is too small for the prompt, the key was replaced meanwhile, or a machine that
                the block came from is not believed any more.
            CacheUnavailable: a full disk, or any other failure of it; nothing of the block is left.
        """
        n_bytes, tokens = block_file.sealed_bytes(header), 0 if state else limits.CACHE_BLOCK_TOKENS
        name, file_name = prompt.states[number] if state else (prompt.names[number], prompt.files[number])
        with self._open() as (index, key):
            if key.file_name(name) != file_name:
                raise KeyReplaced
            self._check_room(n_bytes)
            writer, priority = os.getpid(), prompt.priority
            block = NewBlock(file_name, model, number, n_bytes, priority, tokens, header.origins, writer)
            own = {*prompt.files, *(file for _, file in prompt.states.values())}
            if not index.reserve(key.id, block, own, self._delete_file):
                return 0
            self._at("reserved")
            try:
                self._write_file(file_name, block_file.seal(key, name, header, buffers()), pause)
                self._at("on the disk")
                kept = index.written(key.id, file_name, writer)
            except BaseException:
                self._drop(index, file_name, writer)
                raise
            if not kept:
                index.drop(file_name, writer, self._delete_file)
            self._at("ready")
            return n_bytes

    def _drop(self, index: Index, file_name: str, writer: int) -> None:
        """If the index fails, too, its row stays, which is a miss."""
        try:
            index.drop(file_name, writer, self._delete_file)
        except sqlite3.Error:
            self._delete_file(file_name)
            self.close()

    def _write_file(
        self, file_name: str, pieces: Iterator[memoryview], pause: Callable[[float], None]
    ) -> None:
        fd = os.open(
            self._path(file_name),
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW,
            durable.PRIVATE_FILE,
        )
        try:
            begun = time.monotonic()
            for piece in pieces:
                self._at("writing")
                while piece:
                    piece = piece[os.write(fd, piece) :]
                pause(time.monotonic() - begun)
                begun = time.monotonic()
        finally:
            os.close(fd)

    def _check_room(self, n_bytes: int) -> None:
        if self._free_bytes() < n_bytes + limits.DISK_RESERVE_BYTES:
            raise CacheUnavailable("the disk is full")

    def _delete_file(self, file_name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(file_name))
        self._at("deleted")

    def _path(self, file_name: str) -> str:
        # No Path: it keeps the table in which it interns every name that it has seen.
        return f"{self._blocks}/{file_name}"

    # ---- whom to believe, and who writes ------------------------------------------------------------------

    def add_origin(self, label: str, machine: str) -> None:
        """Blocks with this label come from this machine. Raises CacheUnavailable."""
        with self._open() as (index, _):
            index.add_origin(label, machine)

    def machines(self) -> set[str]:
        """The machines that blocks may have come from. Raises CacheUnavailable."""
        with self._open() as (index, _):
            return index.machines()

    def forget_machine(self, machine: str) -> list[str]:
        """Throw away all that came from a machine, or rests on that; returns its labels. Raises
        CacheUnavailable."""
        with self._open() as (index, _):
            labels, files = index.forget_machine(machine)
            for name in files:
                self._delete_file(name)
            return labels

    def writer_ended(self, writer: int) -> None:
        """Throw away what a process that has ended did not finish. Raises CacheUnavailable."""
        with self._open() as (index, _):
            for name in index.forget_unready(writer):
                self._delete_file(name)

    # ---- figures -----------------------------------------------------------------------------------------

    def restored(self, read: RestoredPrompt) -> None:
        """Count a prompt whose beginning was read. Raises CacheUnavailable."""
        with self._open() as (index, _):
            index.restored(read)

    def sent(self, n_bytes: int, seconds: float, cached: float | None = None) -> None:
        """Count what was read for another machine; see ``Index.sent``."""
        with self._open() as (index, _):
            index.sent(n_bytes, seconds, cached)

    def report(self) -> CacheReport:
        with self._open() as (index, _):
            return CacheReport(
                on=True,
                folder=str(self._folder),
                n_bytes=index.nbytes,
                quota_bytes=index.quota_bytes,
                read_bytes_per_s=index.speeds.disk,
                cached_bytes_per_s=index.speeds.cached,
                models=index.models(),
            )

    # ---- the whole ---------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Throw the key away, then everything else. What could not be deleted cannot be read by anybody.

        Raises CacheUnavailable: the key could not be deleted; then nothing is.
        """
        try:
            machine_key.discard(self._key_file)
        except OSError as error:
            raise CacheUnavailable(f"{self._key_file} cannot be deleted: {_reason(error)}") from error
        self._at("key gone")
        self._key = None
        if not self._folder.exists():
            return
        try:
            index = self._index = self._index or self._opened_index()
            index.forget_all()
        except (sqlite3.Error, MemoryError, OSError, FleetError):
            # Damaged: it is begun anew at the next start, and until then nothing is written.
            self.close()
        self._at("index empty")
        for file in self._files():
            with suppress(OSError):  # it is noise
                self._delete_file(file)

    def recover(self) -> None:
        """Make files, index, key and quota agree. Runs at the daemon's start, before any worker.

        Raises CacheUnavailable.
        """
        try:
            with self._open() as (index, _):
                self._agree(index)
        except CacheUnavailable as error:
            # One that is locked, or on a full disk, is as good as before once that is over.
            if not is_damage(error.__cause__):
                raise
            # Its blocks can be computed again; what a damaged index says of them cannot be believed.
            try:
                self._start_anew()
            except OSError as refused:
                raise CacheUnavailable(_reason(refused)) from refused
            with self._open() as (index, _):
                self._agree(index)

    def validate(self) -> None:
        """Check that files, index and quota agree. For tests; raises AssertionError."""
        with self._open() as (index, _):
            index.validate()
            if (files := self._files()) != (rows := index.names()):
                raise AssertionError(f"files {files}, rows {rows}")

    def _agree(self, index: Index) -> None:
        index.check()
        for name in (*index.forget_unready(), *index.agree_on_origins()):
            self._delete_file(name)
        self._at("unready forgotten")
        # Files first: a file that appears after this has its row.
        files, rows = self._files(), index.names()
        for name in files.keys() - rows.keys():
            self._delete_file(name)
        for name, n_bytes in rows.items():
            if files.get(name) != n_bytes:
                self._delete_file(name)
                index.forget(name)
        index.recount()
        index.evict_to_quota(self._delete_file)

    def _files(self) -> dict[str, int]:
        found = {}
        with suppress(FileNotFoundError), os.scandir(self._blocks) as entries:
            for entry in entries:
                with suppress(OSError):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def _start_anew(self) -> None:
        self.close()
        for suffix in _SIDE_FILES:
            Path(f"{self._folder / _INDEX}{suffix}").unlink(missing_ok=True)
        self._at("index deleted")

    @contextmanager
    def _open(self) -> Iterator[tuple[Index, MachineKey]]:
        """The index and the key that it goes with. Whatever the disk does becomes CacheUnavailable."""
        try:
            index = self._index = self._index or self._opened_index()
            if self._key is None or index.key_id != self._key.id:
                # The first time, or after a ``clear`` by any process.
                self._key = MachineKey.load_or_create(self._key_file)
                self._at("key there")
                index.take_key(self._key.id)
            yield index, self._key
        except (KeyReplaced, NoRoom, Distrusted) as error:
            raise NotKept from error
        except (sqlite3.Error, MemoryError) as error:
            self.close()
            raise CacheUnavailable(f"its index cannot be used: {error}") from error
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise CacheUnavailable("the disk is full") from error
            raise CacheUnavailable(_reason(error)) from error
        except FleetError as error:
            raise CacheUnavailable(error.message) from error

    def _opened_index(self) -> Index:
        durable.private_folder(self._folder)
        durable.private_folder(self._blocks)
        index = Index(self._folder / _INDEX, most_blocks=self._most_blocks, clock=self._clock)
        try:
            index.quota_bytes = self._settings.quota_bytes or default_quota(self._free_bytes(), index.nbytes)
        except BaseException:
            index.close()
            raise
        return index

    def _free_bytes(self) -> int:
        found = os.statvfs(self._blocks)
        return found.f_bavail * found.f_frsize


def _filler(file: object) -> Callable[[memoryview], int]:
    """Reads until the buffer is full or the file ends."""
    readinto: Callable[[memoryview], int] = file.readinto  # type: ignore[attr-defined]

    def fill(buffer: memoryview) -> int:
        done = 0
        while done < len(buffer) and (n := readinto(buffer[done:])):
            done += n
        return done

    return fill


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
