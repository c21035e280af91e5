"""The database file: damaged, newer, full, unreachable, or just busy."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleetd import limits
from fleetd.errors import ConfigError
from fleetd.storage import store
from fleetd.storage.store import Store, StoreUnavailable


def tables(opened: Store) -> set[str]:
    return opened.call(
        lambda db: {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    )


def count(opened: Store) -> int:
    return int(opened.call(lambda db: db.execute("SELECT count(*) FROM usage").fetchone()[0]))


def put(opened: Store, name: str) -> None:
    opened.call(
        lambda db: db.execute(
            "INSERT INTO usage (request_id, started_s, model, node, route, state)"
            " VALUES (?, 0, 'm', 'this', 'chat', 'reserved')",
            (name,),
        )
    )


def test_a_new_file_is_migrated_and_sound(store: Store) -> None:
    assert tables(store) == {"usage", "trace"}
    assert store.call(lambda db: db.execute("PRAGMA journal_mode").fetchone()[0]) == "wal"
    assert store.check() == []


@pytest.mark.parametrize("pragma", ["fullfsync", "checkpoint_fullfsync"])
def test_macos_is_asked_to_flush_the_drives_cache_too(store: Store, pragma: str) -> None:
    assert store.call(lambda db: db.execute(f"PRAGMA {pragma}").fetchone()[0]) == 1


def test_rows_survive_reopening(tmp_path: Path) -> None:
    for name in ("a", "b"):
        opened = Store(tmp_path / "db")
        put(opened, name)
        opened.close()
    opened = Store(tmp_path / "db")
    assert count(opened) == 2
    opened.close()


def test_migrations_run_once_each_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store(tmp_path / "db")
    put(opened, "old")
    opened.close()
    monkeypatch.setattr(
        store, "MIGRATIONS", [*store.MIGRATIONS, "CREATE TABLE later (x)", "ALTER TABLE later ADD COLUMN y"]
    )
    opened = Store(tmp_path / "db")
    assert tables(opened) == {"usage", "trace", "later"}
    assert opened.call(lambda db: db.execute("PRAGMA user_version").fetchone()[0]) == len(store.MIGRATIONS)
    assert count(opened) == 1
    opened.close()


def test_a_failed_migration_leaves_the_old_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store(tmp_path / "db")
    put(opened, "old")
    opened.close()
    with monkeypatch.context() as patch:
        patch.setattr(
            store, "MIGRATIONS", [*store.MIGRATIONS, "CREATE TABLE later (x); CREATE TABLE later (x)"]
        )
        broken = Store(tmp_path / "db")
        with pytest.raises(StoreUnavailable):
            count(broken)
        broken.close()
    opened = Store(tmp_path / "db")
    assert tables(opened) == {"usage", "trace"}
    assert count(opened) == 1
    opened.close()


def test_a_file_of_a_newer_version_is_refused_not_destroyed(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    opened = Store(tmp_path / "db")
    with pytest.raises(ConfigError, match="newer fleetd"):
        count(opened)
    opened.close()
    assert [path.name for path in tmp_path.iterdir() if "damaged" in path.name] == []


@pytest.mark.parametrize("damage", ["garbage", "header", "middle"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "db"
    opened = Store(path)
    for number in range(300):
        put(opened, f"row {number}")
    opened.close()
    content = bytearray(path.read_bytes())
    match damage:
        case "garbage":
            content = bytearray(b"not a database at all\n" * 100)
        case "header":
            content[:16] = bytes(16)
        case _:
            content[4096:12288] = b"\xff" * 8192
    path.write_bytes(content)
    opened = Store(path)
    with capture_logs() as logs:
        put(opened, "fresh")
        assert count(opened) == 1
    assert [line["event"] for line in logs] == ["store.damaged"]
    assert opened.check() == []
    opened.close()
    aside = [found for found in tmp_path.iterdir() if ".damaged-" in found.name]
    assert [found.read_bytes() for found in aside if found.suffix.startswith(".damaged")] == [bytes(content)]


def test_a_full_disk_is_told_and_passes(store: Store) -> None:
    put(store, "before")

    def fill(db: sqlite3.Connection) -> None:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
        db.executemany(
            "INSERT INTO usage (request_id, started_s, model, node, route, state)"
            " VALUES (?, 0, 'm', 'this', 'chat', 'reserved')",
            ((f"{number} " + "x" * 1000,) for number in range(100)),
        )

    with pytest.raises(StoreUnavailable, match="full"):
        store.call(fill)
    assert count(store) == 1  # rolled back whole
    put(store, "after")
    assert count(store) == 2


def test_an_unreachable_folder_recovers(tmp_path: Path) -> None:
    opened = Store(tmp_path / "later" / "db")
    with pytest.raises(StoreUnavailable):
        count(opened)
    (tmp_path / "later").mkdir()
    put(opened, "a")
    assert count(opened) == 1
    opened.close()


def test_writes_waiting_for_a_hung_disk_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORE_QUEUED", 3)
    hung = threading.Event()
    waiting = [store.submit(lambda db: hung.wait()) for _ in range(3)]
    with pytest.raises(StoreUnavailable, match="3 writes"):
        store.submit(lambda db: None)
    hung.set()
    for future in waiting:
        future.result(60)
    assert count(store) == 0


def test_no_work_reaches_the_thread_after_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would open the file again, which nobody closed."""
    opened, held = Store(tmp_path / "db"), list[bool]()
    submit = opened._thread.submit

    def submitted(*work: Any) -> Any:
        held.append(opened._pending_lock.locked())
        return submit(*work)

    monkeypatch.setattr(opened._thread, "submit", submitted)
    assert count(opened) == 0
    assert held == [True], "the store can be closed just now"
    opened.close()


def test_a_closed_store_says_so_and_has_finished_its_work(tmp_path: Path) -> None:
    opened = Store(tmp_path / "db")
    future = opened.submit(lambda db: "done")
    opened.close()
    opened.close()
    assert future.result(0) == "done"
    with pytest.raises(StoreUnavailable, match="closed"):
        count(opened)
