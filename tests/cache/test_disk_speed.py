"""The disk and what the system has of its files in memory are measured and priced apart."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import kv_blocks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.cache import disk_speed
from fleetd.cache.block_store import BlockStore
from fleetd.cache.disk_speed import DiskSpeeds, cached_share, is_cached
from fleetd.cache.index import Index, RestoredPrompt

DRAW = random.Random(1)
DISK, CACHED = 200e6, 2e9


def system(monkeypatch: pytest.MonkeyPatch, has: Callable[[int], bool]) -> list[int]:
    """A system that has the bytes in memory of which ``has`` is true; the offsets that it was asked for."""
    asked: list[int] = []

    def preadv(fd: int, buffers: object, offset: int, flags: int) -> int:
        assert flags == 8
        asked.append(offset)
        if not has(offset):
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(os, "preadv", preadv, raising=False)
    return asked


def files(folder: Path, count: int, size: int = 1000) -> list[str]:
    found = [folder / f"{number}" for number in range(count)]
    for file in found:
        file.write_bytes(bytes(size))
    return [str(file) for file in found]


def test_what_the_system_has_in_memory_is_a_share_of_what_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = system(monkeypatch, lambda offset: offset < 500)
    share = cached_share(files(tmp_path, 16), DRAW)
    assert share == sum(offset < 500 for offset in asked) / len(asked)
    assert 0 < share < 1
    assert max(asked) < 1000
    system(monkeypatch, lambda offset: True)
    assert cached_share(files(tmp_path, 1), DRAW) == 1.0


@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 500])
def test_a_long_prompt_costs_no_more_questions_than_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    asked = system(monkeypatch, lambda offset: True)
    cached_share(files(tmp_path, count), DRAW)
    assert limits.CACHE_PROBES / 2 < len(asked) <= limits.CACHE_PROBES


def test_where_the_system_does_not_tell_all_counts_as_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = files(tmp_path, 2)
    assert cached_share([], DRAW) is None
    assert cached_share([*paths, str(tmp_path / "gone")], DRAW) is None
    monkeypatch.setattr(os, "preadv", lambda *args: (_ for _ in ()).throw(OSError(95, "no")), raising=False)
    assert cached_share(paths, DRAW) is None
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    assert cached_share(paths, DRAW) is None
    assert is_cached(None) is False
    assert DiskSpeeds(DISK, CACHED).of(None) == DISK


@given(st.floats(0, 1))
def test_a_mixed_prompt_takes_as_long_as_its_parts(share: float) -> None:
    found = DiskSpeeds(DISK, CACHED).of(share)
    assert 1 / found == pytest.approx(share / CACHED + (1 - share) / DISK)


def test_a_speed_that_is_not_measured_is_not_guessed_faster_than_the_disk() -> None:
    assert DiskSpeeds().of(1.0) == 0
    assert DiskSpeeds(disk=DISK).of(1.0) == DISK
    assert DiskSpeeds(cached=CACHED).of(1.0) == pytest.approx(CACHED)
    assert DiskSpeeds(cached=CACHED).of(0.0) == 0


def test_reads_teach_the_speed_of_where_the_files_were(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.db", 100)
    index.sent(100 * limits.MIB, 1.0, 0.0)
    index.sent(900 * limits.MIB, 1.0, 1.0)
    index.restored(RestoredPrompt("tiny", 256, 500 * limits.MIB, 1.0, 0.5, 0.5))
    assert index.speeds == DiskSpeeds(100 * limits.MIB, 900 * limits.MIB)
    index.sent(200 * limits.MIB, 1.0)
    assert 100 * limits.MIB < index.speeds.disk < 200 * limits.MIB
    index.close()


def test_what_is_found_is_priced_by_where_it_lies(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    names = kv_blocks.prompt(1, 3)
    kv_blocks.write(store, names)
    store.sent(limits.MIB, 1.0, 0.0)
    store.sent(10 * limits.MIB, 1.0, 1.0)
    for share, expected in ((0.0, limits.MIB), (1.0, 10 * limits.MIB), (None, limits.MIB)):
        monkeypatch.setattr(disk_speed, "cached_share", lambda paths, draw, share=share: share)
        found = store.find(names)
        assert (found.cached, found.bytes_per_s) == (share, expected)
    report = store.report()
    assert (report.read_bytes_per_s, report.cached_bytes_per_s) == (limits.MIB, 10 * limits.MIB)


def test_a_block_that_is_read_next_is_announced_to_the_system(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, what: told.append(what), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    (name,) = kv_blocks.prompt(1, 1)
    store.read_soon(name)
    assert told == [], "it is not there"
    kv_blocks.write(store, [name])
    store.read_soon(name)
    assert told == [3]
