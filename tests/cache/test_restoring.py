"""A prompt's beginning is looked for and read aside; a disk that hangs or lies costs a bounded wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kv_blocks import files, header, payload, prompt, write

from fleetd import limits
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.cache.restoring import BlockNames, BlockReader, Restore, RestoreState
from fleetd.cache.settings import DiskCacheSettings

SOON_S = 30.0
NAMES = prompt(1, 4)


class Reading:
    """A reader whose clock the test moves, and which tells when it has moved on itself."""

    def __init__(self, settings: DiskCacheSettings) -> None:
        self.now = 0.0
        self.store = BlockStore(settings)
        self.woken = threading.Semaphore(0)
        self.reader = BlockReader(lambda: self.store, self.woken.release, lambda: self.now)
        self.rows: dict[int, bytearray] = {}

    def look(self, *candidates: tuple[str, Sequence[bytes]]) -> Restore:
        found = self.reader.look("tiny", [BlockNames(*each) for each in candidates])
        if found.state is RestoreState.LOOKING:
            self.wait()
        return found

    def wait(self) -> None:
        assert self.woken.acquire(timeout=SOON_S)

    def targets(self, number: int, found: BlockHeader) -> list[memoryview]:
        if found != header(number):
            raise BlockDamaged("another one")
        row = self.rows[number] = bytearray(found.nbytes)
        return [memoryview(row)[: found.sizes[0]], memoryview(row)[found.sizes[0] :]]

    def read(self, restore: Restore, first: int = 0) -> int:
        self.reader.read(restore, first, 1.0, self.targets)
        self.wait()
        return restore.blocks


@pytest.fixture
def reading(settings: DiskCacheSettings) -> Iterator[Reading]:
    made = Reading(settings)
    yield made
    made.reader.close()


def test_the_longest_beginning_of_all_namespaces_is_found_and_read(
    reading: Reading, store: BlockStore
) -> None:
    write(store, prompt(1, 2))
    longer = prompt(1, 4, namespace="equivalent")
    write(store, longer[:3])
    restore = reading.look(("dense", NAMES), ("equivalent", longer))
    assert (restore.state, restore.chosen.namespace, restore.found.blocks) == (
        RestoreState.FOUND,
        "equivalent",
        3,
    )
    assert reading.read(restore) == 3
    assert [bytes(reading.rows[n]) for n in range(3)] == [payload(name) for name in longer[:3]]


def test_of_two_as_long_the_first_counts(reading: Reading, store: BlockStore) -> None:
    plan = prompt(1, 4, namespace="equivalent")
    write(store, NAMES)
    write(store, plan)
    assert reading.look(("dense", NAMES), ("equivalent", plan)).chosen.namespace == "dense"


def test_what_memory_has_is_not_read(reading: Reading, store: BlockStore) -> None:
    write(store, NAMES)
    assert reading.read(reading.look(("dense", NAMES)), first=3) == 4
    assert list(reading.rows) == [3]


def test_nothing_there_is_known_at_once(reading: Reading) -> None:
    assert reading.look(("dense", NAMES)).state is RestoreState.DONE
    assert reading.look(("dense", [])).state is RestoreState.DONE


def test_a_bad_block_ends_the_beginning_before_it(
    reading: Reading, store: BlockStore, settings: DiskCacheSettings
) -> None:
    write(store, NAMES)
    bad = store.prompt(NAMES, 1.0).files[2]
    next(file for file in files(settings) if file.name == bad).write_bytes(b"bad")
    restore = reading.look(("dense", NAMES))
    assert restore.found.blocks == 4
    assert reading.read(restore) == 2
    assert restore.state is RestoreState.DONE
    assert store.find(NAMES).blocks == 2


def test_a_disk_that_hangs_is_waited_for_no_longer_than_said_and_not_asked_meanwhile(
    reading: Reading, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, NAMES)
    hangs, real = threading.Event(), BlockStore.read

    def hanging(self: BlockStore, name: bytes, *args: Any) -> BlockHeader | None:
        if name == NAMES[2]:
            reading.woken.release()
            assert hangs.wait(SOON_S)
        return real(self, name, *args)

    monkeypatch.setattr(BlockStore, "read", hanging)
    restore = reading.look(("dense", NAMES))
    reading.reader.read(restore, 0, 1.0, reading.targets)
    reading.wait()
    assert restore.due_s == pytest.approx(reading.now + limits.CACHE_BLOCK_S)
    reading.now = restore.due_s + 0.1
    reading.reader.give_up(restore)
    assert (restore.state, restore.blocks) == (RestoreState.DONE, 2)
    assert reading.reader.look("tiny", [BlockNames("dense", NAMES)]).state is RestoreState.DONE
    hangs.set()
    reading.wait()
    # What came later counts for nothing, and the disk is asked again.
    assert restore.blocks == 2
    assert reading.look(("dense", NAMES)).state is RestoreState.FOUND


def test_whatever_goes_wrong_while_a_prompt_is_read_the_next_one_is_looked_for(
    reading: Reading, store: BlockStore
) -> None:
    write(store, NAMES)

    def failing(number: int, found: BlockHeader) -> list[memoryview]:
        if number == 2:
            raise ValueError("no memory has this form")
        return reading.targets(number, found)

    restore = reading.look(("dense", NAMES))
    reading.reader.read(restore, 0, 1.0, failing)
    reading.wait()
    assert (restore.state, restore.blocks) == (RestoreState.DONE, 2)
    assert reading.read(reading.look(("dense", NAMES))) == 4


def test_a_prompt_that_is_given_up_is_read_no_further(
    reading: Reading, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, NAMES)
    real = BlockStore.read

    def leaving(self: BlockStore, name: bytes, *args: Any) -> BlockHeader | None:
        found = real(self, name, *args)
        reading.reader.give_up(restore)
        return found

    restore = reading.look(("dense", NAMES))
    monkeypatch.setattr(BlockStore, "read", leaving)
    reading.reader.read(restore, 0, 1.0, reading.targets)
    reading.wait()
    assert list(reading.rows) == [0]
    monkeypatch.undo()
    assert reading.look(("dense", NAMES)).state is RestoreState.FOUND
