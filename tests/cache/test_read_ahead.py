"""A block is read while the one before it is used, into memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest

from fleetd.cache.block_file import BlockHeader
from fleetd.cache.read_ahead import ReadBlock, blocks_in_order

Targets = Callable[[BlockHeader], Sequence[memoryview]]


def content(name: bytes) -> bytes:
    return name * (10 + name[0])


def reader(there: Sequence[bytes], begun: Callable[[bytes], object] = lambda name: None) -> ReadBlock:
    def read(name: bytes, targets: Targets) -> BlockHeader | None:
        begun(name)
        if name not in there:
            return None
        whole = content(name)
        header = BlockHeader("test", name[0], [4, len(whole) - 4])
        first, second = targets(header)
        first[:], second[:] = whole[:4], whole[4:]
        return header

    return read


NAMES = [bytes([number]) for number in (5, 3, 9, 1, 7)]


def test_blocks_come_in_order_up_to_the_first_that_is_not_there() -> None:
    def came(there: Sequence[bytes]) -> list[bytes]:
        return [bytes(block.payload) for block in blocks_in_order(NAMES, reader(there))]

    assert came(NAMES) == [content(name) for name in NAMES]
    assert came([*NAMES[:2], *NAMES[3:]]) == [content(name) for name in NAMES[:2]]
    assert came([]) == []


def test_the_next_block_is_read_while_one_is_used_and_not_the_one_after_it() -> None:
    read: list[bytes] = []
    second = threading.Event()

    def begun(name: bytes) -> None:
        read.append(name)
        if name == NAMES[1]:
            second.set()

    with closing(blocks_in_order(NAMES, reader(NAMES, begun))) as blocks:
        first = next(blocks)
        assert second.wait(60)
        assert bytes(first.payload) == content(NAMES[0])
    assert len(read) <= 3


def test_memory_is_used_again() -> None:
    held = [block.payload.obj for block in blocks_in_order([NAMES[2]] * 20, reader(NAMES))]
    assert len({id(each) for each in held}) == 2


def test_what_reading_raises_comes_in_its_place() -> None:
    def begun(name: bytes) -> None:
        if name == NAMES[2]:
            raise ValueError("a disk")

    with closing(blocks_in_order(NAMES, reader(NAMES, begun))) as blocks:
        assert [bytes(next(blocks).payload) for _ in range(2)] == [content(name) for name in NAMES[:2]]
        with pytest.raises(ValueError, match="a disk"):
            next(blocks)


def test_the_thread_has_ended_when_it_is_left() -> None:
    threads: list[threading.Thread] = []
    blocks = blocks_in_order(NAMES, reader(NAMES, lambda name: threads.append(threading.current_thread())))
    next(blocks)
    blocks.close()
    assert not threads[0].is_alive()
