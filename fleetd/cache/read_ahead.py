"""Blocks in order, the next one read while the one before it is used: by a thread, into two buffers in
turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec

from fleetd.cache.block_file import BlockHeader

ReadBlock = Callable[[bytes, Callable[[BlockHeader], Sequence[memoryview]]], BlockHeader | None]


class BlockRead(msgspec.Struct, frozen=True):
    """A block's header and payload."""

    header: BlockHeader
    payload: memoryview


@dataclass(slots=True)
class _Buffer:
    """Memory for one block after another: a fresh one of megabytes costs more than sealing what it holds."""

    whole: bytearray = field(default_factory=bytearray)

    def read(self, name: bytes, read: ReadBlock) -> BlockRead | None:
        payload = memoryview(b"")

        def targets(header: BlockHeader) -> list[memoryview]:
            nonlocal payload
            if header.nbytes > len(self.whole):
                self.whole = bytearray(header.nbytes)
            payload = memoryview(self.whole)[: header.nbytes]
            return _split(payload, header.sizes)

        header = read(name, targets)
        return None if header is None else BlockRead(header, payload)


def blocks_in_order(names: Sequence[bytes], read: ReadBlock) -> Generator[BlockRead, None, None]:
    """The blocks of these names up to the first that is not there whole. Each payload is valid until the next
    block is asked for. ``read``: ``BlockStore.read``, called on a thread that has ended when this has.

    Raises what ``read`` raises, in its place.
    """
    spare: SimpleQueue[_Buffer | None] = SimpleQueue()
    came: SimpleQueue[tuple[_Buffer, BlockRead] | Exception | None] = SimpleQueue()
    left = threading.Event()

    def run() -> None:
        try:
            for name in names:
                buffer = spare.get()
                if buffer is None or left.is_set() or (found := buffer.read(name, read)) is None:
                    break
                came.put((buffer, found))
            came.put(None)
        except Exception as error:
            came.put(error)

    for _ in range(2):
        spare.put(_Buffer())
    thread = threading.Thread(target=run, name="block-read-ahead", daemon=True)
    thread.start()
    try:
        while (found := came.get()) is not None:
            if isinstance(found, Exception):
                raise found
            buffer, block = found
            yield block
            spare.put(buffer)
    finally:
        left.set()
        spare.put(None)
        thread.join()


def _split(whole: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    found, at = [], 0
    for size in sizes:
        found.append(whole[at : at + size])
        at += size
    return found
