"""An index that fails at one statement, at each of them in turn, or holds what no statement has written."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import kv_blocks
import pytest
from failing_database import FAULTS, FailingDatabase
from kv_blocks import files, payload, prompt, read, write

from fleetd.cache import block_names, text_links
from fleetd.cache.block_file import sealed_bytes
from fleetd.cache.block_store import BlockStore, CacheUnavailable, NotKept
from fleetd.cache.index import RestoredPrompt
from fleetd.cache.service import DiskCache
from fleetd.cache.settings import DiskCacheSettings
from fleetd.control.cache_report import CacheReport

FIRST, SECOND, THIRD = (prompt(seed, 2) for seed in (1, 2, 3))
STATE = block_names.state_name(FIRST[1])
# Room for three blocks and a half, so that a second prompt makes some of the first one go.
QUOTA_BYTES = sealed_bytes(kv_blocks.header(0)) * 7 // 2
DIGEST = "d" * 64
LINKS = [bytes([number]) * 16 for number in range(4)]
# At one statement, and from one on until the disk is mended.
ONCE, FROM_THEN_ON = 1, 1 << 30


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a folder: hundreds of small files are no test of the disk."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else tmp_path))
    yield folder
    shutil.rmtree(folder)


def day(settings: DiskCacheSettings, *, whole: bool = True) -> int:
    """All that a worker and a daemon ask of the index; returns how often it was unusable.

    ``whole``: with a daemon's start, and a clearing of all.
    """
    failures = 0

    def allowed(work: Callable[[], object]) -> None:
        nonlocal failures
        try:
            work()
        except CacheUnavailable:
            failures += 1
        except NotKept:
            pass

    def right_or_missing(name: bytes, number: int) -> None:
        assert read(store, name, number) in (None, payload(name))

    def state() -> None:
        kept = store.prompt(FIRST, 1.0, {1: STATE})
        header = kv_blocks.header(1)
        store.write(kept, 1, "tiny", header, partial(kv_blocks.buffers, STATE), state=True)

    store = BlockStore(settings)
    if whole:
        allowed(store.recover)
    allowed(lambda: write(store, FIRST))
    allowed(state)
    allowed(lambda: store.find(FIRST, [STATE] * 2))
    allowed(lambda: store.begin_with(text_links.filled_blocks(DIGEST, LINKS, FIRST, 0.5)))
    allowed(lambda: store.longest([text_links.kept_as(DIGEST, link) for link in LINKS]))
    # The first prompt's end makes room.
    allowed(lambda: write(store, SECOND, worth=2.0))
    allowed(lambda: store.restored(RestoredPrompt("tiny", 512, 2 << 20, 0.1, 1.0)))
    allowed(lambda: store.sent(2 << 20, 0.1, 1.0))
    for names in (FIRST, SECOND):
        for number, name in enumerate(names):
            allowed(partial(right_or_missing, name, number))
    # A file that is no block is forgotten when it is read.
    for file in files(settings)[:1]:
        file.write_bytes(b"damaged")
    for number, name in enumerate(SECOND):
        allowed(partial(right_or_missing, name, number))
    allowed(store.report)
    if whole:
        store.clear()
    allowed(lambda: write(store, THIRD))
    store.close()
    return failures


def usual(settings: DiskCacheSettings) -> None:
    """The next day, on the same files: all is as it should be."""
    store = BlockStore(settings)
    with closing(store):
        for number, name in enumerate(THIRD):
            assert read(store, name, number) in (None, payload(name))
        store.recover()
        store.validate()
        assert sum(file.stat().st_size for file in files(settings)) <= QUOTA_BYTES
        write(store, SECOND, worth=100.0)
        assert [read(store, name, n) for n, name in enumerate(SECOND)] == [payload(n) for n in SECOND]
        store.validate()


WAYS = [(fault, times) for times in (ONCE, FROM_THEN_ON) for fault in FAULTS]


@pytest.mark.parametrize(("fault", "times"), WAYS)
def test_an_index_that_fails_at_any_statement_gives_misses(home: Path, fault: str, times: int) -> None:
    """Each statement fails in one of the ways."""
    fails_at_each(home, fault, times, WAYS.index((fault, times)), len(WAYS))


@pytest.mark.long
@pytest.mark.parametrize(("fault", "times"), WAYS)
def test_an_index_that_fails_at_any_statement_in_any_way_gives_misses(
    home: Path, fault: str, times: int
) -> None:
    fails_at_each(home, fault, times, 0, 1)


def fails_at_each(home: Path, fault: str, times: int, first: int, step: int) -> None:
    """Fail at every statement of a day from the ``first`` on, or at every ``step``th."""
    statement, database = first, FailingDatabase(-1, fault)
    while statement == first or database.failed:
        settings = kv_blocks.settings(home / str(statement), QUOTA_BYTES)
        database = FailingDatabase(statement, fault, times)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3, "connect", database.connecting())
            failures = day(settings)
        # What fails once is used again at once.
        assert failures <= 1 or times != ONCE, statement
        usual(settings)
        statement += step
    assert statement > 300


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "damaged"])
def test_an_index_that_cannot_be_used_at_the_start_is_kept_for_later(
    monkeypatch: pytest.MonkeyPatch, settings: DiskCacheSettings, fault: str
) -> None:
    with kv_blocks.opened(settings) as store:
        write(store, FIRST)
    cache = DiskCache(settings, on=True, note=lambda: "")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", FailingDatabase(0, fault, FROM_THEN_ON).connecting())
        cache.start()
        assert cache.find(FIRST).blocks == 0
        assert cache.report().note
    assert cache.find(FIRST).blocks == 2
    cache.close()


class SaidNotes:
    """What a daemon logs of its cache."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(event)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on", [True, False])
def test_a_daemon_starts_and_answers_whatever_its_index_does(
    monkeypatch: pytest.MonkeyPatch, home: Path, fault: str, on: bool
) -> None:
    first = statement = list(FAULTS).index(fault) // 2
    database = FailingDatabase(-1, fault)
    while statement == first or database.failed:
        settings = kv_blocks.settings(home / str(statement), QUOTA_BYTES)
        with kv_blocks.opened(settings) as store:
            write(store, FIRST)
        database, said = FailingDatabase(statement, fault, FROM_THEN_ON), SaidNotes()
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", database.connecting())
            patch.setattr("fleetd.cache.service.log", said)
            cache = DiskCache(settings, on=on, note=lambda: "")
            cache.start()
            assert len(said.lines) <= 1
            assert cache.find(FIRST).blocks in (0, 2)
            assert cache.longest(DIGEST, LINKS).links == 0
            cache.begin_with(DIGEST, LINKS, FIRST, 0.5)
            assert isinstance(cache.report(), CacheReport)
            cache.clear()
            cache.close()
        # Each statement fails in some ways.
        statement += 3
    assert statement > (20 if on else 5)


#: What a bit that turns, or another program, makes of rows.
DAMAGE = {
    "no totals": "DELETE FROM totals",
    "a size that is a text": "UPDATE blocks SET bytes = 'many'",
    "a size that is bytes": "UPDATE blocks SET bytes = x'00ff'",
    "a sum that is a text": "UPDATE totals SET bytes = 'many'",
    "a count that is a text": "UPDATE totals SET blocks = 'many'",
    "a clock that is a text": "UPDATE totals SET clock = 'noon'",
    "a priority that is a text": "UPDATE blocks SET priority = 'high'",
    "a speed that is a text": "UPDATE totals SET read_bytes_per_s = 'fast'",
    "a speed without end": "UPDATE totals SET cached_bytes_per_s = 9e999",
    "a key that is bytes": "UPDATE totals SET key_id = x'00ff'",
    "a depth that is a text": "UPDATE blocks SET depth = 'deep'",
    "hits that are a text": "UPDATE models SET hits = 'some'",
    "bytes that are none": "UPDATE models SET read_bytes = x'80'",
    "a name that is bytes": "UPDATE blocks SET name = x'80' WHERE depth = 1",
    "a text that is none": "UPDATE blocks SET model = CAST(x'80' AS TEXT)",
    "a link to bytes": "UPDATE beginnings SET block = x'80'",
    "a schema that is no text": (
        "UPDATE sqlite_master SET name = CAST(x'c4c4' AS TEXT), sql = 'rubbish' WHERE name = 'models'"
    ),
    "no table of models": "DROP TABLE models",
    "no table of beginnings": "DROP TABLE beginnings",
}


def kept(settings: DiskCacheSettings) -> None:
    with kv_blocks.opened(settings) as store:
        write(store, FIRST)
        store.begin_with(text_links.filled_blocks(DIGEST, LINKS, FIRST, 0.5))
        store.restored(RestoredPrompt("tiny", 512, 2 << 20, 0.1, 1.0))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_rows_that_no_statement_has_written_are_damage(tmp_path: Path, damage: str) -> None:
    settings = kv_blocks.settings(tmp_path, QUOTA_BYTES)
    kept(settings)
    with closing(sqlite3.connect(Path(settings.folder) / "index.db")) as db, db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("PRAGMA writable_schema = ON")
        db.execute(damage)
    # While workers run nothing is repaired, and nothing but misses comes of it.
    day(settings, whole=False)
    cache = DiskCache(settings, on=True, note=lambda: "")
    cache.start()
    assert cache.report().note == ""
    cache.close()
    usual(settings)


# ---- A disk that refuses to delete -----------------------------------------------------------------------


def test_a_damaged_index_that_cannot_be_deleted_keeps_no_daemon_from_starting(
    monkeypatch: pytest.MonkeyPatch, settings: DiskCacheSettings
) -> None:
    kept(settings)
    (Path(settings.folder) / "index.db").write_bytes(b"no database at all\n" * 100)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    said = SaidNotes()
    cache = DiskCache(settings, on=True, note=lambda: "")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        patch.setattr("fleetd.cache.service.log", said)
        cache.start()
    assert said.lines == ["cache.unavailable"]
    assert cache.report().note
    cache.start()
    assert cache.report().note == ""
    cache.close()


def test_blocks_that_cannot_be_deleted_are_noise_once_the_key_is(
    monkeypatch: pytest.MonkeyPatch, settings: DiskCacheSettings
) -> None:
    kept(settings)

    unlink = os.unlink

    def refuse(path: str | Path) -> None:
        if "blocks" in Path(path).parts:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        DiskCache(settings, on=False, note=lambda: "").start()
    assert not Path(settings.key_file).exists()
    assert len(files(settings)) == 2
    cache = DiskCache(settings, on=True, note=lambda: "")
    cache.start()
    assert cache.find(FIRST).blocks == 0
    assert files(settings) == []
    cache.close()
