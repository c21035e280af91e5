"""Which blocks are on the disk, what each is worth, and the quota: one SQLite file, shared by processes.

Room is made before a block is written: victims' files are deleted, their rows go and the new row comes in
one transaction. A process that is killed in between leaves rows without files, which are misses, never files
without rows; so the disk never holds more than the rows say. SQLite's lock is the only one there is.

Worth is GreedyDual: a block's priority is what the clock showed when it was used last plus the seconds per
GiB that it saves, and the clock goes on to the priority of whatever is evicted. So blocks age as others need
their room, whatever the system's clock does. All blocks of a prompt get the same priority, so a block has at
least that of those after it: what goes first is always the end of a prompt, which is of no use without its
beginning.

A block names the machines that it came from (``block_origins``).
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from fleetd import limits
from fleetd.cache import block_origins
from fleetd.cache.block_origins import BlockOrigins
from fleetd.cache.disk_speed import DiskSpeeds, is_cached
from fleetd.control.cache_report import ModelBlocks
from fleetd.storage.database_damage import MALFORMED

SCHEMA_VERSION = 4
_SCHEMA = """
CREATE TABLE blocks (
    name     TEXT PRIMARY KEY,
    model    TEXT NOT NULL,
    depth    INTEGER NOT NULL,
    tokens   INTEGER NOT NULL,
    bytes    INTEGER NOT NULL CHECK (bytes >= 0),
    priority REAL NOT NULL,
    ready    INTEGER NOT NULL DEFAULT 0,
    begun_s  REAL NOT NULL,
    writer   INTEGER NOT NULL,
    origins  TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX blocks_by_priority ON blocks (priority, depth DESC);
CREATE INDEX blocks_unready ON blocks (begun_s) WHERE ready = 0;
CREATE TABLE totals (
    bytes INTEGER NOT NULL, blocks INTEGER NOT NULL, clock REAL NOT NULL, key_id TEXT NOT NULL,
    read_bytes_per_s REAL NOT NULL, cached_bytes_per_s REAL NOT NULL
);
INSERT INTO totals VALUES (0, 0, 0, '', 0, 0);
CREATE TABLE models (
    model         TEXT PRIMARY KEY,
    hits          INTEGER NOT NULL DEFAULT 0,
    tokens        INTEGER NOT NULL DEFAULT 0,
    saved_s       REAL NOT NULL DEFAULT 0,
    read_bytes    INTEGER NOT NULL DEFAULT 0,
    written_bytes INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE beginnings (
    link  TEXT PRIMARY KEY,
    block TEXT NOT NULL
);
CREATE TRIGGER block_added AFTER INSERT ON blocks BEGIN
    UPDATE totals SET bytes = bytes + new.bytes, blocks = blocks + 1;
END;
CREATE TRIGGER block_removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET bytes = bytes - old.bytes, blocks = blocks - 1;
END;
"""
# Another process's transaction takes some milliseconds.
_BUSY_S = 2.0
# Values of one statement.
_AT_ONCE = 500
# How fast the measured speed follows new figures.
_SPEED_WEIGHT = 0.3


class KeyReplaced(Exception):
    """The key that names and seals blocks is another one now."""


class NoRoom(Exception):
    """The quota is too small for this prompt."""


class Distrusted(Exception):
    """A machine that some of it came from is not believed any more."""


class NewBlock(msgspec.Struct, frozen=True):
    """A block or a snapshot that is to be written. ``name``: of its file. ``depth``: blocks before it.
    ``priority``: from ``Index.price``. ``tokens``: whose rows it holds. ``origins``: labels of the machines
    that it came from; none if it was computed here. ``writer``: the id of the process."""

    name: str
    model: str
    depth: int
    nbytes: int
    priority: float
    tokens: int = limits.CACHE_BLOCK_TOKENS
    origins: Sequence[str] = ()
    writer: int = 0


class RestoredPrompt(msgspec.Struct, frozen=True):
    """A prompt of which so much was read, in so many seconds. ``saved_s``: computing it would have taken
    longer. ``cached``: as in FoundBlocks, before that."""

    model: str
    tokens: int
    nbytes: int
    seconds: float
    saved_s: float
    cached: float | None = None


class FoundBlocks(msgspec.Struct, frozen=True):
    """The beginning of a prompt that is on the disk: blocks, their bytes, the measured speed of reading.

    ``cached``: how much of their files the system has in memory, None unknown. ``states``: blocks at whose
    ends there are snapshots, ascending, with the bytes of each. If a model needs one, the beginning ends
    with the last of them.
    """

    blocks: int
    nbytes: int
    bytes_per_s: float
    states: tuple[tuple[int, int], ...] = ()
    cached: float | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the last snapshot; 0 if there is none."""
        return self.states[-1][1] if self.states else 0

    @property
    def stops(self) -> list[int]:
        """Numbers of blocks after which the beginning may end; none if it may after each."""
        return [blocks for blocks, _ in self.states]

    def cut(self, blocks: int) -> FoundBlocks:
        """The first ``blocks`` of it, fewer than all or all."""
        if blocks == self.blocks:
            return self
        states = tuple(state for state in self.states if state[0] <= blocks)
        n_bytes = self.nbytes * blocks // self.blocks
        return FoundBlocks(blocks, n_bytes, self.bytes_per_s, states, self.cached)


class FoundText(msgspec.Struct, frozen=True):
    """The beginning of a text that is on the disk: up to which link, its bytes, the speed of reading.
    ``files``: of the blocks that its links end in. ``cached``: as in FoundBlocks."""

    links: int = 0
    nbytes: int = 0
    bytes_per_s: float = 0.0
    files: tuple[str, ...] = ()
    cached: float | None = None


class Index:
    """One connection, for one thread at a time. Every method may raise sqlite3.Error."""

    def __init__(
        self,
        path: Path,
        quota_bytes: int = 0,
        *,
        most_blocks: int = limits.CACHE_BLOCKS,
        most_beginnings: int = limits.CACHE_BEGINNINGS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.quota_bytes = quota_bytes
        self._most_beginnings = most_beginnings
        self._most_blocks = most_blocks
        self._clock = clock
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self._origins = BlockOrigins(self._db)
        try:
            with _sound():
                self._db.execute("PRAGMA journal_mode = WAL")
                # A power cut may lose the last rows: their files are deleted at the next start.
                self._db.execute("PRAGMA synchronous = NORMAL")
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _statements(block_origins.SCHEMA + _SCHEMA):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                elif version != SCHEMA_VERSION:
                    raise sqlite3.DatabaseError(f"{MALFORMED}: schema {version} is not {SCHEMA_VERSION}")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    # ---- the key -----------------------------------------------------------------------------------------

    @property
    def key_id(self) -> str:
        """The id of the key that sealed the blocks; "" after ``forget_all``."""
        with _sound():
            return str(self._one("SELECT key_id FROM totals"))

    def take_key(self, key_id: str) -> None:
        """Go on under another key; blocks under the old one are forgotten."""
        with self._transaction():
            if self.key_id != key_id:
                self._forget_content()
                self._db.execute("UPDATE totals SET key_id = ?", (key_id,))

    def forget_all(self) -> None:
        """Forget every block."""
        with self._transaction():
            self._forget_content()
            self._db.execute("UPDATE totals SET key_id = ''")
        # The file gives its room back, unless another process reads it just now.
        with suppress(sqlite3.OperationalError), _sound():
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _forget_content(self) -> None:
        self._db.execute("DELETE FROM blocks")
        self._db.execute("DELETE FROM beginnings")

    # ---- looking -----------------------------------------------------------------------------------------

    def find(
        self, key_id: str, names: Sequence[str], states: Sequence[str] = (), *, own: bool = False
    ) -> FoundBlocks:
        """How many of these, from the first on, are on the disk.

        Args:
            names: of the blocks of rows; none if a model keeps no rows.
            states: of the snapshots at the ends of all blocks, if a model needs one.
            own: only such as were computed here.

        Raises KeyReplaced.
        """
        sizes: list[int] = []
        for name in names:
            if (size := self._ready_bytes(name, own=own)) is None:
                break
            sizes.append(size)
        here: list[tuple[int, int]] = []
        if states:
            for number in range(len(sizes) if names else len(states), 0, -1):
                if len(here) == limits.CHECKPOINTS_PER_PROMPT:
                    break
                if (size := self._ready_bytes(states[number - 1], own=own)) is not None:
                    here.append((number, size))
            here.reverse()
        blocks = (here[-1][0] if here else 0) if states else len(sizes)
        if not blocks:
            return FoundBlocks(0, 0, 0.0)
        if self.key_id != key_id:
            raise KeyReplaced
        return FoundBlocks(blocks, sum(sizes[:blocks]), self.speeds.disk, tuple(here))

    def _ready_bytes(self, name: str, *, own: bool) -> int | None:
        """The size of a block that is on the disk."""
        with _sound():
            row = self._db.execute(
                "SELECT bytes FROM blocks WHERE name = ? AND ready AND (origins = '' OR NOT ?)", (name, own)
            ).fetchone()
            return None if row is None else _size(row[0])

    def names(self) -> dict[str, int]:
        """Every block's file and its size."""
        with _sound():
            rows = self._db.execute("SELECT name, bytes FROM blocks")
            return {str(name): _size(size) for name, size in rows}

    # ---- beginnings of texts -----------------------------------------------------------------------------

    def begin_with(self, key_id: str, beginnings: Sequence[tuple[str, str]]) -> None:
        """Remember, for beginnings of a text, the last whole block that each fills: (link, block).

        The block need not be on the disk yet. The oldest go if there are too many. Raises KeyReplaced.
        """
        with self._transaction():
            if self.key_id != key_id:
                raise KeyReplaced
            # Replacing gives a row a new number, so the numbers tell which were used last.
            self._db.executemany("INSERT OR REPLACE INTO beginnings (link, block) VALUES (?, ?)", beginnings)
            over = int(self._one("SELECT count(*) FROM beginnings")) - self._most_beginnings
            self._db.execute(
                "DELETE FROM beginnings WHERE rowid IN (SELECT rowid FROM beginnings ORDER BY rowid LIMIT ?)",
                (max(0, over),),
            )

    def longest(self, key_id: str, links: Sequence[str], *, own: bool = False) -> FoundText:
        """What is on the disk of a text with these beginnings, by its last block; ``own``: as in ``find``.
        Raises KeyReplaced."""
        last, sizes, files = 0, dict[int, int](), dict[int, str]()
        for start in range(0, len(links), _AT_ONCE):
            asked = links[start : start + _AT_ONCE]
            places = {link: start + number for number, link in enumerate(asked, start=1)}
            with _sound():
                rows = self._db.execute(
                    "SELECT link, depth, bytes, name FROM beginnings JOIN blocks ON name = block"  # noqa: S608
                    f" WHERE ready AND (origins = '' OR NOT ?) AND link IN ({', '.join('?' * len(asked))})",
                    (own, *asked),
                )
                for link, depth, n_bytes, name in rows:
                    last, sizes[_size(depth)] = max(last, places[link]), _size(n_bytes)
                    files[_size(depth)] = str(name)
        if not last:
            return FoundText()
        if self.key_id != key_id:
            raise KeyReplaced
        # A link may fill more than one block; those between are taken to be like the others.
        n_bytes = sum(sizes.values()) * (max(sizes) + 1) // len(sizes)
        return FoundText(last, n_bytes, self.speeds.disk, tuple(files.values()))

    # ---- writing -----------------------------------------------------------------------------------------

    def price(self, names: Sequence[str], worth: float) -> float:
        """The priority of a prompt's blocks that are used or written now; those here get it at once."""
        with self._transaction():
            priority = float(self._one("SELECT clock FROM totals")) + worth
            self._db.executemany(
                "UPDATE blocks SET priority = ? WHERE name = ? AND priority < ?",
                [(priority, name, priority) for name in names],
            )
        return priority

    def reserve(
        self, key_id: str, block: NewBlock, prompt: Collection[str], delete_file: Callable[[str], None]
    ) -> bool:
        """Make room for a block and enter it, not ready yet. False if it is here, or being written; one that
        was being written for too long is written anew.

        Args:
            prompt: the names of its prompt's blocks, none of which goes for it.

        Raises:
            KeyReplaced, NoRoom, Distrusted: nothing was done.
        """
        with self._transaction():
            bytes_held, blocks, key = self._db.execute("SELECT bytes, blocks, key_id FROM totals").fetchone()
            if key != key_id:
                raise KeyReplaced
            if not self._origins.believed(block.origins):
                raise Distrusted
            here = self._db.execute(
                "SELECT ready, begun_s, bytes FROM blocks WHERE name = ?", (block.name,)
            ).fetchone()
            if here is not None and (here[0] or here[1] >= self._clock() - limits.CACHE_WRITING_S):
                return False
            # Its writer may still have the file open, so that one goes, and the new one is another.
            late, late_bytes = ([(block.name, 0.0)], here[2]) if here is not None else ([], 0)
            victims = self._victims(
                bytes_held - late_bytes + block.nbytes - self.quota_bytes,
                blocks - len(late) + 1 - self._most_blocks,
                {*prompt, block.name},
            )
            self._evict([*late, *victims], delete_file)
            self._db.execute(
                "INSERT INTO blocks (name, model, depth, tokens, bytes, priority, begun_s, writer, origins)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (block.name, block.model, block.depth, block.tokens, block.nbytes, block.priority,
                 self._clock(), block.writer, block_origins.text(block.origins)),
            )  # fmt: skip
        return True

    def _victims(
        self, over_bytes: int, over_blocks: int, besides: Collection[str] = ()
    ) -> list[tuple[str, float]]:
        """What must go, by name, with priorities: what no process writes any more, then the least worth.

        Raises NoRoom.
        """
        chosen: list[tuple[str, float]] = []
        if over_bytes <= 0 and over_blocks <= 0:
            return chosen
        for name, n_bytes, priority in chain(self._abandoned(), self._by_priority()):
            if name not in besides:
                chosen.append((name, priority))
                over_bytes, over_blocks = over_bytes - n_bytes, over_blocks - 1
                if over_bytes <= 0 and over_blocks <= 0:
                    return chosen
        raise NoRoom

    def _abandoned(self) -> Iterator[tuple[str, int, float]]:
        yield from self._db.execute(
            "SELECT name, bytes, 0.0 FROM blocks WHERE ready = 0 AND begun_s < ?",
            (self._clock() - limits.CACHE_WRITING_S,),
        )

    def _by_priority(self) -> Iterator[tuple[str, int, float]]:
        yield from self._db.execute(
            "SELECT name, bytes, priority FROM blocks WHERE ready = 1 ORDER BY priority, depth DESC"
        )

    def _evict(self, victims: list[tuple[str, float]], delete_file: Callable[[str], None]) -> None:
        for name, priority in victims:
            delete_file(name)
            self._db.execute("DELETE FROM blocks WHERE name = ?", (name,))
            self._db.execute("UPDATE totals SET clock = max(clock, ?)", (priority,))

    def written(self, key_id: str, name: str, writer: int = 0) -> bool:
        """A block that this process has reserved is on the disk. False if it was forgotten meanwhile: then
        ``drop`` it."""
        with self._transaction():
            row = self._db.execute(
                "SELECT model, bytes FROM blocks WHERE name = ? AND writer = ?", (name, writer)
            ).fetchone()
            if row is None or self.key_id != key_id:
                return False
            self._db.execute("UPDATE blocks SET ready = 1 WHERE name = ?", (name,))
            self._count(str(row[0]), written_bytes=int(row[1]))
        return True

    def drop(self, name: str, writer: int, delete_file: Callable[[str], None]) -> None:
        """A block that this process began to write is not kept. Where another process has begun to write it
        meanwhile, its file is that one's."""
        with self._transaction():
            row = self._db.execute("SELECT writer FROM blocks WHERE name = ?", (name,)).fetchone()
            if row is None or row[0] == writer:
                delete_file(name)
                self._db.execute("DELETE FROM blocks WHERE name = ?", (name,))

    def forget(self, name: str) -> None:
        """It is not on the disk, or not what it should be."""
        with self._transaction():
            self._db.execute("DELETE FROM blocks WHERE name = ?", (name,))

    def forget_unready(self, writer: int | None = None) -> list[str]:
        """Forget the blocks that a process that has ended did not finish; all unfinished ones if none is
        named, before anything is written. Returns their files."""
        with self._transaction():
            return block_origins.forget_rows(
                self._db, "NOT ready AND (writer = ? OR ? IS NULL)", (writer, writer)
            )

    # ---- where blocks come from --------------------------------------------------------------------------

    def add_origin(self, label: str, machine: str) -> None:
        """See ``BlockOrigins.add``."""
        with self._transaction():
            self._origins.add(label, machine)

    def believed(self, origins: Sequence[str]) -> bool:
        """See ``BlockOrigins.believed``."""
        with _sound():
            return self._origins.believed(origins)

    def machines(self) -> set[str]:
        """See ``BlockOrigins.machines``."""
        with _sound():
            return self._origins.machines()

    def forget_machine(self, machine: str) -> tuple[list[str], list[str]]:
        """See ``BlockOrigins.forget``."""
        with self._transaction():
            return self._origins.forget(machine)

    def agree_on_origins(self) -> list[str]:
        """See ``BlockOrigins.agree``. Called before anything is written."""
        with self._transaction():
            return self._origins.agree()

    # ---- the whole ---------------------------------------------------------------------------------------

    def recount(self) -> None:
        """Make the totals what the rows say."""
        with self._transaction():
            self._db.execute(
                "UPDATE totals SET bytes = (SELECT coalesce(sum(bytes), 0) FROM blocks),"
                " blocks = (SELECT count(*) FROM blocks)"
            )

    def evict_to_quota(self, delete_file: Callable[[str], None]) -> None:
        """The quota may have become smaller."""
        with self._transaction():
            held, blocks = self._db.execute("SELECT bytes, blocks FROM totals").fetchone()
            self._evict(self._victims(held - self.quota_bytes, blocks - self._most_blocks), delete_file)

    # ---- figures -----------------------------------------------------------------------------------------

    def restored(self, read: RestoredPrompt) -> None:
        """Count a prompt whose beginning was read from the disk."""
        saved_s = max(0.0, read.saved_s)
        with self._transaction():
            self._count(read.model, hits=1, tokens=read.tokens, saved_s=saved_s, read_bytes=read.nbytes)
            self._read_in(read.nbytes, read.seconds, read.cached)

    def sent(self, n_bytes: int, seconds: float, cached: float | None = None) -> None:
        """Count blocks that were read for another machine: how fast the disk is."""
        with self._transaction():
            self._read_in(n_bytes, seconds, cached)

    def _read_in(self, n_bytes: int, seconds: float, cached: float | None) -> None:
        if n_bytes < limits.CACHE_SPEED_BYTES or seconds <= 0 or (warm := is_cached(cached)) is None:
            return
        known, now = self.speeds, n_bytes / seconds
        before, column = (known.cached, "cached_bytes_per_s") if warm else (known.disk, "read_bytes_per_s")
        speed = now if not before else before + _SPEED_WEIGHT * (now - before)
        self._db.execute(f"UPDATE totals SET {column} = ?", (speed,))  # noqa: S608  (our own names)

    def _count(self, model: str, **more: float) -> None:
        self._db.execute("INSERT OR IGNORE INTO models (model) VALUES (?)", (model,))
        for column, amount in more.items():
            self._db.execute(
                f"UPDATE models SET {column} = {column} + ? WHERE model = ?",  # noqa: S608  (our own names)
                (amount, model),
            )

    @property
    def nbytes(self) -> int:
        with _sound():
            return _size(self._one("SELECT bytes FROM totals"))

    @property
    def speeds(self) -> DiskSpeeds:
        with _sound():
            read, cached = self._db.execute(
                "SELECT read_bytes_per_s, cached_bytes_per_s FROM totals"
            ).fetchone()
            return DiskSpeeds(_figure(read), _figure(cached))

    def models(self) -> list[ModelBlocks]:
        """What each model has on the disk, and what that was good for, by model."""
        with _sound():
            rows = self._db.execute(
                "SELECT m.model, coalesce(b.n, 0), coalesce(b.size, 0), coalesce(b.tokens, 0), hits,"
                " m.tokens, saved_s, read_bytes, written_bytes FROM (SELECT * FROM models) m LEFT JOIN"
                " (SELECT model, count(*) n, sum(bytes) size, sum(tokens) tokens FROM blocks"
                " GROUP BY model) b ON b.model = m.model ORDER BY m.model"
            )
            return [
                ModelBlocks(
                    str(model), _size(blocks), _size(size), _size(held), _size(hits), _size(tokens),
                    _figure(saved_s), _size(read), _size(written),
                )
                for model, blocks, size, held, hits, tokens, saved_s, read, written in rows
            ]  # fmt: skip

    def check(self) -> None:
        """Look through the whole file. Raises sqlite3.DatabaseError if it is damaged."""
        with _sound():
            if (verdict := self._one("PRAGMA quick_check(1)")) != "ok":
                raise ValueError(verdict)
            for table in ("blocks", "totals", "models", "beginnings", "origins"):
                self._check_types(table)
            if (count := self._one("SELECT count(*) FROM totals")) != 1:
                raise ValueError(f"{count} rows of totals")
        _ = self.speeds, self.models()

    def _check_types(self, table: str) -> None:
        """SQLite itself takes any value in any column."""
        columns = self._db.execute(f"PRAGMA table_info({table})").fetchall()
        other = " OR ".join(f"typeof({name}) <> '{kind.lower()}'" for _, name, kind, *_ in columns)
        if not other or self._one(f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {other})"):  # noqa: S608
            raise ValueError(f"the table {table} holds other values than it should")

    def validate(self) -> None:
        """Check the totals against the rows. For tests; raises AssertionError."""
        held = self._db.execute("SELECT bytes, blocks FROM totals").fetchone()
        real = self._db.execute("SELECT coalesce(sum(bytes), 0), count(*) FROM blocks").fetchone()
        if held != real or held[0] > self.quota_bytes or held[1] > self._most_blocks:
            raise AssertionError(f"the totals say {held}, the rows {real}, the quota {self.quota_bytes}")

    def _one(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _sound():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            with _sound():
                yield
                self._db.execute("COMMIT")
        except BaseException:
            # If it fails the connection keeps its lock, so the caller must hear of it, and close it.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


@contextmanager
def _sound() -> Iterator[None]:
    """Values that no statement of ours has written are damage, too, and so are messages that are no text."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise sqlite3.DatabaseError(f"{MALFORMED}: {error}") from error


def _size(value: Any) -> int:
    """Raises ValueError for what is no count."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _figure(value: Any) -> float:
    """The figure, at least 0. Raises ValueError for what is no finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no figure")
    return max(0.0, float(value))


def _statements(script: str) -> Iterator[str]:
    """Single statements: ``executescript`` would commit what is open."""
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
