"""Blocks on the disk: whatever is wrong with them or their index is a miss, and clearing is for good."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import sqlite3
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import kv_blocks
import pytest
from kv_blocks import files, payload, prompt, read, write

from fleetd import limits
from fleetd.cache import block_file, block_store
from fleetd.cache.block_file import sealed_bytes
from fleetd.cache.block_store import BlockStore, CacheUnavailable, NotKept
from fleetd.cache.index import RestoredPrompt
from fleetd.cache.settings import DiskCacheSettings, default_quota

NAMES = prompt(1, 3)


def restarted(settings: DiskCacheSettings) -> BlockStore:
    """What the next daemon finds."""
    store = BlockStore(settings)
    store.recover()
    store.validate()
    return store


def all_read(store: BlockStore) -> list[bytes | None]:
    return [read(store, name, number) for number, name in enumerate(NAMES)]


def test_what_was_written_is_found_and_read_also_by_another_process(
    store: BlockStore, settings: DiskCacheSettings
) -> None:
    assert store.find(NAMES).blocks == 0
    written = write(store, NAMES)
    assert written == 3 * sealed_bytes(kv_blocks.header(0))
    assert write(store, NAMES) == 0
    other = BlockStore(settings)
    found = other.find([*NAMES, *prompt(2, 1)])
    assert (found.blocks, found.nbytes) == (3, written)
    assert all_read(other) == [payload(name) for name in NAMES]
    other.close()
    store.close()
    again = restarted(settings)
    assert all_read(again) == [payload(name) for name in NAMES]
    again.close()


def test_files_are_this_user_s_alone_and_show_no_name(store: BlockStore, settings: DiskCacheSettings) -> None:
    write(store, NAMES)
    key = Path(settings.key_file)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(settings)} == {0o600}
    assert stat.S_IMODE(Path(settings.folder).stat().st_mode) == 0o700
    shown = "".join(file.name for file in files(settings))
    assert all(name.hex() not in shown for name in NAMES)


@pytest.mark.parametrize("harm", ["flipped", "short", "long", "empty", "gone", "another block's"])
def test_a_file_that_is_not_right_is_a_miss_and_is_written_again(
    store: BlockStore, settings: DiskCacheSettings, harm: str
) -> None:
    write(store, NAMES)
    by_name = {read_name(settings, name): name for name in NAMES}
    victim, other = files(settings)[:2]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.unlink()
    match harm:
        case "flipped":
            victim.write_bytes(data)
        case "short":
            victim.write_bytes(data[:-1])
        case "long":
            victim.write_bytes(data + b"0")
        case "empty":
            victim.write_bytes(b"")
        case "another block's":
            shutil.copy(other, victim)
    name = by_name[victim.name]
    seen = dict(zip(NAMES, all_read(store), strict=True))
    assert seen == {n: None if n == name else payload(n) for n in NAMES}
    write(store, NAMES)
    assert all_read(store) == [payload(n) for n in NAMES]
    store.validate()


def read_name(settings: DiskCacheSettings, name: bytes) -> str:
    return block_store.MachineKey.load_or_create(Path(settings.key_file)).file_name(name)


def test_an_index_that_lies_gives_misses(store: BlockStore, settings: DiskCacheSettings) -> None:
    write(store, NAMES)
    store.close()
    invented = [read_name(settings, name) for name in prompt(9, 2)]
    with sqlite3.connect(Path(settings.folder) / "index.db") as db:
        for depth, name in enumerate(invented):
            db.execute(
                "INSERT INTO blocks VALUES (?, 'tiny', ?, 256, 7, 1.0, 1, 0, 0, '')",
                (name, depth),
            )
        db.execute("UPDATE blocks SET bytes = 1 WHERE name = ?", (read_name(settings, NAMES[0]),))
        db.execute("UPDATE totals SET read_bytes_per_s = -5")
    db.close()
    assert store.find(prompt(9, 2)).blocks == 2
    assert [read(store, name, n) for n, name in enumerate(prompt(9, 2))] == [None, None]
    assert all_read(store) == [payload(name) for name in NAMES]
    store.close()
    with sqlite3.connect(Path(settings.folder) / "index.db") as db:
        db.execute("UPDATE totals SET bytes = 0")
    db.close()
    again = BlockStore(settings)
    again.recover()
    again.validate()
    assert again.find(NAMES).blocks == 0  # the file of the first one is not as long as the index says
    again.close()


def test_two_daemons_files_mixed_give_misses(tmp_path: Path) -> None:
    mine, theirs = (kv_blocks.settings(tmp_path / name) for name in ("mine", "theirs"))
    for settings in (mine, theirs):
        store = BlockStore(settings)
        write(store, NAMES)
        store.close()
    # Their files under our names, and beside them.
    for ours, other in zip(files(mine), files(theirs), strict=True):
        shutil.copy(other, ours)
        shutil.copy(other, ours.with_name(other.name))
    store = restarted(mine)
    assert all_read(store) == [None] * 3
    store.close()
    # Their whole folder with our key.
    shutil.rmtree(mine.folder)
    shutil.copytree(theirs.folder, mine.folder)
    store = restarted(mine)
    assert all_read(store) == [None] * 3
    assert files(mine) == []
    write(store, NAMES)
    assert all_read(store) == [payload(name) for name in NAMES]
    store.close()


def test_another_version_s_files_are_misses(
    settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlockStore(settings)
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "VERSION", 7)
        write(store, NAMES)
    assert all_read(store) == [None] * 3
    store.close()
    with sqlite3.connect(Path(settings.folder) / "index.db") as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(CacheUnavailable, match="schema 7"):
        store.find(NAMES)
    store = restarted(settings)
    assert all_read(store) == [None] * 3
    store.close()


def test_a_damaged_index_is_begun_anew_at_the_next_start(
    store: BlockStore, settings: DiskCacheSettings
) -> None:
    write(store, NAMES)
    store.close()
    (Path(settings.folder) / "index.db").write_bytes(os.urandom(20_000))
    with pytest.raises(CacheUnavailable):
        store.find(NAMES)
    again = restarted(settings)
    assert files(settings) == []
    write(again, NAMES)
    assert all_read(again) == [payload(name) for name in NAMES]
    again.close()


def test_what_a_killed_writer_left_is_swept_at_the_next_start(
    store: BlockStore, settings: DiskCacheSettings
) -> None:
    write(store, NAMES)
    store.close()
    with sqlite3.connect(Path(settings.folder) / "index.db") as db:
        db.execute("UPDATE blocks SET ready = 0 WHERE depth = 1")
    db.close()
    files(settings)[0].with_name("f" * 64).write_bytes(b"nobody's")
    again = restarted(settings)
    assert len(files(settings)) == 2
    assert again.find(NAMES).blocks == 1
    again.close()


def test_a_smaller_quota_holds_from_the_next_start_on(store: BlockStore, settings: DiskCacheSettings) -> None:
    write(store, NAMES)
    store.close()
    room = 2 * sealed_bytes(kv_blocks.header(0))
    again = restarted(DiskCacheSettings(settings.folder, settings.key_file, room))
    assert again.find(NAMES).blocks == 2
    assert sum(file.stat().st_size for file in files(settings)) <= room
    again.close()


def test_clearing_leaves_nothing_that_anybody_can_read(
    store: BlockStore, settings: DiskCacheSettings, tmp_path: Path
) -> None:
    write(store, NAMES)
    before = shutil.copytree(settings.folder, tmp_path / "stolen")
    worker = BlockStore(settings)
    assert all_read(worker) == [payload(name) for name in NAMES]
    under_way = worker.prompt(prompt(2, 1), 1.0)
    store.clear()
    assert not Path(settings.key_file).exists()
    assert files(settings) == []
    # A worker that has the old key in its memory takes the new one, and begins anew.
    with pytest.raises(NotKept):
        worker.write(under_way, 0, "tiny", kv_blocks.header(0), list)
    assert worker.find(NAMES).blocks == 0
    write(worker, NAMES)
    assert all_read(worker) == all_read(store) == [payload(name) for name in NAMES]
    worker.close()
    store.close()
    # The old files are noise under the new key.
    shutil.rmtree(settings.folder)
    shutil.copytree(before, settings.folder)
    again = restarted(settings)
    assert all_read(again) == [None] * 3
    again.close()


def test_clearing_while_a_block_is_written_leaves_nothing_of_it(settings: DiskCacheSettings) -> None:
    clearer = BlockStore(settings)

    def at(place: str) -> None:
        if place == "on the disk":
            clearer.clear()

    worker = BlockStore(settings, at=at)
    blocks = worker.prompt(NAMES[:1], 1.0)
    worker.write(blocks, 0, "tiny", kv_blocks.header(0), lambda: kv_blocks.buffers(NAMES[0]))
    assert files(settings) == []
    assert worker.find(NAMES).blocks == 0
    worker.close()
    clearer.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_leaves_no_part_of_a_block(
    store: BlockStore, settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write(store, NAMES[:1])
    real, asked = os.write, []

    def refuse(fd: int, data: Any) -> int:
        asked.append(fd)
        if len(asked) == 2:
            raise OSError(code, os.strerror(code))
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(block_store.os, "write", refuse)
        with pytest.raises(CacheUnavailable):
            write(store, NAMES)
    store.validate()
    assert len(files(settings)) == 1
    write(store, NAMES)
    assert all_read(store) == [payload(name) for name in NAMES]


def test_room_for_the_rest_of_the_machine_is_left(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(CacheUnavailable, match="the disk is full"):
        write(store, NAMES)


def test_a_folder_that_cannot_be_made_is_unavailable_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    store = BlockStore(kv_blocks.settings(tmp_path))
    for use in (lambda: store.find(NAMES), lambda: write(store, NAMES), store.recover, store.report):
        with pytest.raises(CacheUnavailable):
            use()
    store.clear()


def test_the_quota_is_a_tenth_of_the_disk_that_is_free_or_held_and_bounded() -> None:
    assert default_quota(900, 100) == 100
    assert default_quota(1 << 60, 0) == limits.CACHE_QUOTA_BYTES


def test_the_report_tells_sizes_by_model_and_wear(store: BlockStore) -> None:
    written = write(store, NAMES, model="one") + write(store, prompt(2, 1), model="two")
    store.restored(RestoredPrompt("one", 512, 100, 0.1, 3.0))
    report = store.report()
    one, two = report.models
    assert report.on
    assert report.n_bytes == written == one.written_bytes + two.written_bytes
    assert (one.blocks, one.block_tokens, one.hits, one.restored_tokens, one.saved_s) == (
        3,
        3 * limits.CACHE_BLOCK_TOKENS,
        1,
        512,
        3.0,
    )
    assert (two.blocks, two.hits) == (1, 0)


def many(settings: DiskCacheSettings, prompts: int) -> None:
    """Many prompts through a quota of some blocks: files match the index, which stays small."""
    store = BlockStore(settings)
    for seed in range(prompts):
        write(store, prompt(seed, 2 + seed % 3), worth=1.0 + seed % 5)
        if seed % 100 == 0:
            store.validate()
    store.validate()
    assert len(files(settings)) <= 20
    index = Path(settings.folder) / "index.db"
    assert index.stat().st_size < limits.MIB
    store.close()
    assert Path(f"{index}-wal").exists() is False or Path(f"{index}-wal").stat().st_size < 8 * limits.MIB


SMALL = 20 * sealed_bytes(kv_blocks.header(0)) + 100


def test_prompts_through_a_small_quota(tmp_path: Path) -> None:
    many(kv_blocks.settings(tmp_path, SMALL), 150)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_prompts_through_a_small_quota(tmp_path: Path) -> None:
    settings = kv_blocks.settings(tmp_path, SMALL)
    many(settings, 500)
    tracemalloc.start()
    many(settings, 1000)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    many(settings, 10_000)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000
