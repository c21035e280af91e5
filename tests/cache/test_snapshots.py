"""Snapshots lie beside blocks: a beginning ends with the last that is here, and they count in the quota."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kv_blocks
import pytest
from kv_blocks import header, prompt
from waiting_store import SOON_S, WaitingStore

from fleetd import limits
from fleetd.cache.block_file import BlockDamaged, BlockHeader, sealed_bytes
from fleetd.cache.block_names import state_name
from fleetd.cache.block_store import BlockStore, NotKept
from fleetd.cache.restoring import BlockNames, BlockReader, Restore, RestoreState
from fleetd.cache.settings import DiskCacheSettings
from fleetd.cache.write_behind import BlocksToWrite, StateToWrite, WriteBehind

NAMES = prompt(1, 4)
STATES = [state_name(name) for name in NAMES]


def write(store: BlockStore, names: Sequence[bytes], states: Sequence[int], *, rows: bool = True) -> None:
    """Blocks of a prompt, and snapshots at the ends of some."""
    at = store.prompt(names, 1.0, {number: state_name(names[number]) for number in states})
    for number, name in enumerate(names):
        if rows:
            store.write(at, number, "tiny", header(number), partial(kv_blocks.buffers, name))
        if number in states:
            own = partial(kv_blocks.buffers, state_name(name))
            store.write(at, number, "tiny", BlockHeader("states", number + 1, [250, 250]), own, state=True)


def file_of(store: BlockStore, settings: DiskCacheSettings, name: bytes) -> Path:
    return Path(settings.folder) / "blocks" / store.prompt([name], 0.0).files[0]


def test_a_beginning_ends_with_the_last_snapshot_that_has_its_rows(store: BlockStore) -> None:
    write(store, NAMES[:3], [0, 1])
    found = store.find(NAMES, STATES)
    assert (found.blocks, [blocks for blocks, _ in found.states]) == (2, [1, 2])
    assert found.nbytes == 2 * sealed_bytes(header(0))
    assert found.state_bytes > 500
    assert store.find(NAMES).blocks == 3
    (model,) = store.report().models
    assert (model.blocks, model.block_tokens) == (5, 3 * limits.CACHE_BLOCK_TOKENS)


def test_a_snapshot_without_its_rows_is_of_no_use(store: BlockStore, settings: DiskCacheSettings) -> None:
    write(store, NAMES, [0, 3])
    store.read(NAMES[2], lambda header: (_ for _ in ()).throw(BlockDamaged("not it")))
    assert store.find(NAMES, STATES).blocks == 1
    store.read(STATES[0], lambda header: (_ for _ in ()).throw(BlockDamaged("not it")))
    assert store.find(NAMES, STATES).blocks == 0


def test_where_no_rows_are_kept_snapshots_are_found_alone(store: BlockStore) -> None:
    write(store, NAMES, [1, 2], rows=False)
    found = store.find([], STATES)
    assert (found.blocks, found.nbytes, len(found.states)) == (3, 0, 2)


def test_snapshots_and_blocks_share_the_quota(tmp_path: Path) -> None:
    quota = 9 * sealed_bytes(header(0))
    settings = DiskCacheSettings(str(tmp_path / "kv"), str(tmp_path / "kv.key"), quota)
    store = BlockStore(settings)
    for seed in range(1, 30):
        write(store, prompt(seed, 3), [1, 2])
        store.validate()
        held = sum(file.stat().st_size for file in (Path(settings.folder) / "blocks").iterdir())
        assert held <= quota
    assert store.find(prompt(29, 3), [state_name(name) for name in prompt(29, 3)]).blocks == 3
    # Of one prompt nothing goes for the rest of it.
    with pytest.raises(NotKept):
        write(store, prompt(30, 9), range(9))
    store.validate()
    store.close()


def test_a_prompt_that_goes_on_keeps_the_snapshots_of_its_beginning(settings: DiskCacheSettings) -> None:
    slow = WaitingStore(settings)

    def to_write(names: Sequence[bytes], states: Mapping[int, bytes]) -> BlocksToWrite:
        return BlocksToWrite(
            "tiny",
            names,
            1.0,
            1000,
            header,
            lambda number: kv_blocks.buffers(names[number]),
            {
                number: StateToWrite(BlockHeader("states", number + 1, [250, 250]), kv_blocks.buffers(name))
                for number, name in states.items()
            },
        )

    writer, store = WriteBehind(lambda: slow, 10_000), BlockStore(settings)
    assert writer.put(to_write(prompt(2, 1), {}))
    assert slow.begun.acquire(timeout=SOON_S)
    assert writer.put(to_write(NAMES[:2], {0: STATES[0], 1: STATES[1]}))
    assert writer.put(to_write(NAMES, {3: STATES[3]}))
    assert writer.figures.queued_bytes == 2 * 1000 + 3 * 500
    slow.let.release(100)
    assert writer.flush(SOON_S)
    assert writer.figures.written_blocks == 1 + 4 + 3
    assert [blocks for blocks, _ in store.find(NAMES, STATES).states] == [1, 2, 4]
    writer.close()
    store.close()


class Snapshots:
    """Where a snapshot is read to; ``refused``: those that are not what they should be."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.asked: list[int] = []

    def targets(self, number: int, found: BlockHeader) -> list[memoryview]:
        self.asked.append(number)
        return [memoryview(bytearray(size)) for size in found.sizes]

    def check(self) -> None:
        if self.asked[-1] in self.refused:
            raise BlockDamaged("not it")


def rows(number: int, found: BlockHeader) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in found.sizes]


@pytest.fixture
def woken() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def reader(settings: DiskCacheSettings, woken: threading.Semaphore) -> Iterator[BlockReader]:
    made = BlockReader(lambda: BlockStore(settings), woken.release)
    yield made
    made.close()


def found_by(reader: BlockReader, woken: threading.Semaphore) -> Restore:
    restore = reader.look("tiny", [BlockNames("dense", NAMES, STATES)])
    assert woken.acquire(timeout=SOON_S)
    assert restore.state is RestoreState.FOUND
    return restore


@pytest.mark.parametrize(
    ("refused", "asked", "ends"), [((), [3], 4), ((3,), [3, 1], 2), ((0, 1, 3), [3, 1, 0], 0)]
)
def test_of_snapshots_that_are_refused_the_one_before_is_read(
    store: BlockStore,
    reader: BlockReader,
    woken: threading.Semaphore,
    refused: tuple[int, ...],
    asked: list[int],
    ends: int,
) -> None:
    write(store, NAMES, [0, 1, 3])
    restore, snapshots = found_by(reader, woken), Snapshots(*refused)
    reader.read(restore, 0, 1.0, rows, snapshots)
    assert woken.acquire(timeout=SOON_S)
    assert (restore.state, restore.blocks, restore.state_blocks) == (RestoreState.DONE, 4, ends)
    assert snapshots.asked == asked
    assert len(store.find(NAMES, STATES).states) == 3 - len(refused)


def test_a_snapshot_that_comes_too_late_counts_for_nothing(
    store: BlockStore, reader: BlockReader, woken: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, NAMES, [0, 3])
    begun, hangs, real = threading.Event(), threading.Event(), BlockStore.read

    def hanging(self: BlockStore, name: bytes, *args: Any) -> BlockHeader | None:
        if name in STATES:
            begun.set()
            assert hangs.wait(SOON_S)
        return real(self, name, *args)

    monkeypatch.setattr(BlockStore, "read", hanging)
    restore = found_by(reader, woken)
    reader.read(restore, 0, 1.0, rows, Snapshots())
    assert begun.wait(SOON_S)
    reader.give_up(restore)
    hangs.set()
    assert woken.acquire(timeout=SOON_S)
    assert (restore.state, restore.state_blocks) == (RestoreState.DONE, 0)
