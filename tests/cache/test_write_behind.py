"""The writer writes after the fact, keeps to its bounds, and gives way to what is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kv_blocks
import pytest
from kv_blocks import header, payload, prompt, read
from waiting_store import SOON_S, WaitingStore

from fleetd import limits
from fleetd.cache.block_store import BlockStore, CacheUnavailable, PromptBlocks
from fleetd.cache.settings import DiskCacheSettings
from fleetd.cache.write_behind import BlocksToWrite, WriteBehind


def to_write(names: Sequence[bytes], nbytes: int = 1000) -> BlocksToWrite:
    return BlocksToWrite("tiny", names, 1.0, nbytes, header, lambda number: kv_blocks.buffers(names[number]))


@pytest.fixture
def slow(settings: DiskCacheSettings) -> WaitingStore:
    return WaitingStore(settings)


@pytest.fixture
def writer(slow: WaitingStore) -> Iterator[WriteBehind]:
    made = WriteBehind(lambda: slow, most_bytes=3000)
    yield made
    slow.let.release(1000)
    made.close()


def test_what_is_put_is_written_in_order(writer: WriteBehind, slow: WaitingStore, store: BlockStore) -> None:
    one, two = prompt(1, 2), prompt(2, 1)
    assert writer.put(to_write(one))
    assert writer.put(to_write(two))
    slow.let.release(10)
    assert writer.flush(SOON_S)
    for names in (one, two):
        assert [read(store, name, n) for n, name in enumerate(names)] == [payload(name) for name in names]
    figures = writer.figures
    assert (figures.queued_bytes, figures.written_blocks, figures.dropped, figures.note) == (0, 3, 0, "")


def test_the_queue_is_bounded_in_bytes_and_says_what_it_dropped(
    writer: WriteBehind, slow: WaitingStore
) -> None:
    for seed in range(1, 4):
        assert writer.put(to_write(prompt(seed, 1)))
    assert slow.begun.acquire(timeout=SOON_S)
    assert not writer.put(to_write(prompt(4, 1)))
    assert not writer.put(to_write(prompt(5, 1), 5000))
    assert (writer.figures.queued_bytes, writer.figures.dropped) == (3000, 2)


def test_a_prompt_that_goes_on_takes_the_place_of_its_beginning(
    writer: WriteBehind, slow: WaitingStore, store: BlockStore
) -> None:
    assert writer.put(to_write(prompt(1, 1)))
    assert slow.begun.acquire(timeout=SOON_S)  # under way, so not replaced
    for blocks in range(1, 9):
        assert writer.put(to_write(prompt(2, blocks)))
    slow.let.release(100)
    assert writer.flush(SOON_S)
    assert store.find(prompt(2, 8)).blocks == 8
    assert writer.figures.written_blocks == 9


def test_a_prompt_too_long_for_the_queue_leaves_its_beginning_in_it(
    writer: WriteBehind, slow: WaitingStore, store: BlockStore
) -> None:
    assert writer.put(to_write(prompt(1, 1)))
    assert slow.begun.acquire(timeout=SOON_S)
    assert writer.put(to_write(prompt(2, 3)))
    assert not writer.put(to_write(prompt(2, 8), 5000))
    assert (writer.figures.queued_bytes, writer.figures.dropped) == (2000, 1)
    slow.let.release(100)
    assert writer.flush(SOON_S)
    assert store.find(prompt(2, 8)).blocks == 3


def test_memory_that_is_needed_elsewhere_is_let_go(writer: WriteBehind, slow: WaitingStore) -> None:
    assert writer.put(to_write(prompt(1, 1)))
    assert slow.begun.acquire(timeout=SOON_S)
    assert writer.put(to_write(prompt(2, 1)))
    writer.drop()
    assert writer.figures.queued_bytes == 1000
    slow.let.release(10)
    assert writer.flush(SOON_S)
    assert writer.figures.written_blocks == 1


def test_closing_writes_what_is_queued(writer: WriteBehind, slow: WaitingStore, store: BlockStore) -> None:
    writer.paced = True
    slow.let.release(100)
    assert writer.put(to_write(prompt(1, 5)))
    writer.close(SOON_S)
    assert store.find(prompt(1, 5)).blocks == 5
    assert not writer.put(to_write(prompt(2, 1)))


def test_what_another_machine_asks_for_is_written_without_pauses_until_nothing_waits(
    writer: WriteBehind, slow: WaitingStore, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause would take longer than the test.
    monkeypatch.setattr(limits, "CACHE_WRITE_SHARE", 1e-12)
    writer.paced = True
    slow.let.release(100)
    writer.write_now()
    assert not writer._hurry.is_set(), "nothing waits"
    assert writer.put(to_write(prompt(1, 2)))
    assert slow.begun.acquire(timeout=SOON_S)
    writer.write_now()
    with writer._changed:
        assert writer._changed.wait_for(lambda: not writer._waiting and not writer._writing, SOON_S)
    assert store.find(prompt(1, 2)).blocks == 2


def test_closing_does_not_wait_for_a_disk_that_hangs(writer: WriteBehind, slow: WaitingStore) -> None:
    assert writer.put(to_write(prompt(1, 1)))
    assert slow.begun.acquire(timeout=SOON_S)
    begun = time.monotonic()
    writer.close(0.05)
    assert time.monotonic() - begun < SOON_S


def test_a_prompt_that_cannot_be_read_from_memory_costs_that_one_alone(
    writer: WriteBehind, slow: WaitingStore, store: BlockStore, capfd: pytest.CaptureFixture[str]
) -> None:
    """The thread ended, and nothing was written any more, nor told."""
    lost = list[memoryview]()
    broken = BlocksToWrite("tiny", prompt(1, 1), 1.0, 1000, header, lambda number: lost[: 1 // 0])
    slow.let.release(10)
    assert writer.put(broken)
    assert writer.flush(SOON_S)
    assert writer.put(to_write(prompt(2, 1)))
    assert writer.flush(SOON_S)
    assert store.find(prompt(2, 1)).blocks == 1
    assert (writer.figures.dropped, writer.figures.queued_bytes) == (1, 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_full_disk_is_told_once_left_alone_for_a_while_and_used_again(settings: DiskCacheSettings) -> None:
    now, asked, full = 0.0, 0, True

    class FullStore(BlockStore):
        def write(self, prompt: PromptBlocks, *args: Any, **kwargs: Any) -> int:
            nonlocal asked
            asked += 1
            if full:
                raise CacheUnavailable("the disk is full")
            return super().write(prompt, *args, **kwargs)

    writer = WriteBehind(lambda: FullStore(settings), 10_000, monotonic=lambda: now)
    for seed in range(3):
        assert writer.put(to_write(prompt(seed, 2)))
        assert writer.flush(SOON_S)
    assert asked == 1
    assert writer.figures.note == "the disk is full"
    assert writer.figures.dropped == 3
    now, full = limits.CACHE_AGAIN_S + 1, False
    assert writer.put(to_write(prompt(4, 2)))
    assert writer.flush(SOON_S)
    assert (writer.figures.note, writer.figures.written_blocks) == ("", 2)
    writer.close()


def test_it_works_a_small_part_of_the_time_while_the_worker_computes(
    settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def pausing(worked: Callable[[], float]) -> type[BlockStore]:
        class Timed(BlockStore):
            def write(self, *args: Any, **kwargs: Any) -> int:
                *rest, pause = args
                pause(worked())
                return super().write(*rest, **kwargs)

        return Timed

    writer = WriteBehind(lambda: pausing(lambda: 0.01)(settings), 10_000)
    monkeypatch.setattr(writer._hurry, "wait", waited.append)
    writer.put(to_write(prompt(1, 1)))
    assert writer.flush(SOON_S)
    assert waited == []
    writer.paced = True
    writer.put(to_write(prompt(2, 1)))
    with writer._changed:
        assert writer._changed.wait_for(lambda: not writer._waiting and not writer._writing, SOON_S)
    assert waited == [pytest.approx(0.01 * (1 / limits.CACHE_WRITE_SHARE - 1))]
    writer.close()


def test_nothing_of_a_written_prompt_stays_in_memory(writer: WriteBehind, slow: WaitingStore) -> None:
    class Held:
        pass

    import weakref

    held = Held()
    seen = weakref.ref(held)
    names = prompt(1, 1)

    def buffers(number: int, _held: Held = held) -> list[memoryview]:
        return kv_blocks.buffers(names[number])

    writer.put(BlocksToWrite("tiny", names, 1.0, 1000, header, buffers))
    del held, buffers
    slow.let.release(10)
    assert writer.flush(SOON_S)
    assert seen() is None
