"""A machine in the middle of a stream of blocks: whatever it does, no wrong block arrives.

The sender's and the receiver's own code, and between them the bytes of the wire, of which every single one is
changed, and at every single one the stream is cut.
"""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import kv_blocks
import pytest
from wire_changes import KEY, OTHER, Change, changes, chunks_of, ended, numbered

from fleetd.cache import block_stream
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings
from fleetd.errors import PeerLost, PeerWrong, SealBroken
from fleetd.sealed.stream import SealedReceiver, SealedSender

NAMES, OTHERS = kv_blocks.prompt(1, 3), kv_blocks.prompt(2, 3)
THIRD = OTHER[::-1]
SIZE = 120
CHANGES = changes("acceptor", "connector")


class RecordedWire:
    """A socket whose other end has sent these bytes, or that keeps what is sent."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self._read = 0

    def settimeout(self, seconds: float) -> None:
        pass

    def send(self, data: memoryview) -> int:
        self.data += data
        return len(data)

    def recv_into(self, buffer: memoryview) -> int:
        piece = self.data[self._read : self._read + len(buffer)]
        buffer[: len(piece)] = piece
        self._read += len(piece)
        return len(piece)


@dataclass(frozen=True)
class Arrived:
    """The blocks that were told of, by their numbers, and what the stream ended with."""

    blocks: dict[int, bytes]
    error: Exception | None


def received(wire: bytes, numbers: Sequence[int], key: bytes = KEY) -> Arrived:
    came: dict[int, bytes] = {}
    buffers: dict[int, bytearray] = {}

    def targets(number: int, header: BlockHeader) -> list[memoryview]:
        if header != kv_blocks.header(number, SIZE):
            raise BlockDamaged("a block of another place")
        buffers[number] = bytearray(SIZE)
        whole = memoryview(buffers[number])
        return [whole[: header.sizes[0]], whole[header.sizes[0] :]]

    def tell(number: int) -> bool:
        came[number] = bytes(buffers[number])
        return True

    receiver = SealedReceiver(cast("socket.socket", RecordedWire(wire)), key, "connector")
    try:
        block_stream.receive(receiver, numbers, targets, tell)
    except (SealBroken, PeerLost, PeerWrong) as error:
        return Arrived(came, error)
    # What came is what was sent, even where it is kept by reference.
    assert came == {number: bytes(buffers[number]) for number in came}
    return Arrived(came, None)


@pytest.fixture
def sent(store: BlockStore, settings: DiskCacheSettings) -> list[list[bytes]]:
    """The chunks of two streams, of two prompts, and of the first one from its end; each under its own key,
    as every connection has one."""

    def stream(names: list[bytes], key: bytes) -> list[bytes]:
        wire = RecordedWire()
        sender = SealedSender(cast("socket.socket", wire), key, "acceptor")
        assert block_stream.send(sender, names, store.read) == SIZE * len(names)
        chunks = chunks_of(bytes(wire.data))
        assert ended(chunks)
        return chunks

    for names in (NAMES, OTHERS):
        kv_blocks.write(store, names, SIZE)
    return [stream(NAMES, KEY), stream(OTHERS, OTHER), stream(NAMES[::-1], THIRD)]


def honest(names: Iterable[bytes]) -> dict[int, bytes]:
    return {number: kv_blocks.payload(name, SIZE) for number, name in enumerate(names)}


def harmless(found: Arrived, wire: bytes, whole: bytes) -> None:
    """Each block that came is the one that was sent, and the change was noticed. Behind the end nothing is
    read."""
    assert found.blocks.items() <= honest(NAMES).items()
    assert found.error is not None or wire.startswith(whole)


# Which stream, its key, and the order in which blocks are expected.
ORDERS = {"first to last": (0, KEY, [0, 1, 2]), "last to first": (2, THIRD, [2, 1, 0])}


@pytest.mark.parametrize(("stream", "key", "numbers"), ORDERS.values(), ids=ORDERS)
def test_what_nobody_touched_arrives(
    sent: list[list[bytes]], stream: int, key: bytes, numbers: list[int]
) -> None:
    assert received(b"".join(sent[stream]), numbers, key) == Arrived(honest(NAMES), None)


@pytest.mark.parametrize(("stream", "key", "numbers"), ORDERS.values(), ids=ORDERS)
def test_attack_every_byte_is_changed_and_at_every_byte_it_is_cut(
    sent: list[list[bytes]], stream: int, key: bytes, numbers: list[int]
) -> None:
    whole, draw = b"".join(sent[stream]), random.Random(1)
    for at in range(len(whole)):
        bad = bytearray(whole)
        bad[at] ^= 1 << draw.randrange(8)
        harmless(received(bytes(bad), numbers, key), bad, whole)
        cut = received(whole[:at], numbers, key)
        harmless(cut, whole[:at], whole)
        assert isinstance(cut.error, PeerLost)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("stream", "key", "numbers"), ORDERS.values(), ids=ORDERS)
def test_attack_on_each_chunk(
    sent: list[list[bytes]], stream: int, key: bytes, numbers: list[int], change: Change
) -> None:
    chunks = sent[stream]
    for at in range(1, len(chunks) - 1):
        wire = b"".join(change(at, chunks))
        harmless(received(wire, numbers, key), wire, b"".join(chunks))


def test_attack_any_chunk_is_sent_again_or_takes_anothers_place(sent: list[list[bytes]]) -> None:
    chunks = sent[0]
    whole = b"".join(chunks)
    for one, other in itertools.permutations(range(len(chunks)), 2):
        again = [*chunks[:other], chunks[one], *chunks[other:]]
        instead = [*chunks[:other], chunks[one], *chunks[other + 1 :]]
        posing = [*chunks[:other], numbered(chunks[one], other), *chunks[other + 1 :]]
        exchanged = list(chunks)
        exchanged[one], exchanged[other] = chunks[other], chunks[one]
        for changed in (again, instead, posing, exchanged):
            wire = b"".join(changed)
            harmless(received(wire, range(3)), wire, whole)


def test_attack_two_sessions_are_swapped_as_wholes_from_a_chunk_on_or_by_single_chunks(
    sent: list[list[bytes]],
) -> None:
    mine, theirs, backwards = sent
    whole = b"".join(mine)
    assert received(b"".join(theirs), range(3)).blocks == {}
    assert received(whole, range(3), OTHER).blocks == {}
    for at in range(len(mine)):
        for other in (theirs, backwards):
            for changed in ([*mine[:at], *other[at:]], [*mine[:at], other[at], *mine[at + 1 :]]):
                wire = b"".join(changed)
                harmless(received(wire, range(3)), wire, whole)


def test_attack_any_sequence_of_chunks_of_all_streams(sent: list[list[bytes]]) -> None:
    draw, whole = random.Random(3), b"".join(sent[0])
    pool = [chunk for chunks in sent for chunk in chunks]
    for _ in range(2000):
        chosen = sent[0][: draw.randrange(len(sent[0]))] + draw.choices(pool, k=draw.randrange(6))
        wire = b"".join(chosen)
        harmless(received(wire, range(3)), wire, whole)
