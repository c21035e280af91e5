"""A machine in the middle of a live stream between two workers: whatever it does, no wrong number arrives.

The real pipe at both ends, on TCP, and between them a relay that knows where each sealed chunk begins, which
anybody on the network can see.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sharing import tcp_pair

from fleetd import limits
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import FleetError, PeerLost, SealBroken
from fleetd.sealed.chunks import HEADER_BYTES, KEY_BYTES, Sealer

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(range(1, KEY_BYTES + 1))
FRAMES = 6
ROW = 40_000
# Changes the list of the chunks that were sent; the first argument says at which one.
Change = Callable[[int, list[bytes]], list[bytes]]


def payload(number: int) -> bytes:
    return bytes([number + 1]) * ROW


def sealed(key: bytes, role: Any, count: int) -> list[bytes]:
    """Chunks of another stream, with the numbers and lengths that are due in this one."""
    sealer, found = Sealer(key, role), []
    for _ in range(count):
        plain = bytes(ROW)
        out = memoryview(bytearray(ROW + 64))
        found.append(bytes(out[: sealer.seal_into(memoryview(plain), out)]))
    return found


def flip(offset: int) -> Change:
    def change(at: int, chunks: list[bytes]) -> list[bytes]:
        bad = bytearray(chunks[at])
        bad[offset] ^= 1
        return [*chunks[:at], bytes(bad), *chunks[at + 1 :]]

    return change


def spliced(key: bytes, role: str) -> Change:
    return lambda at, chunks: [*chunks[:at], sealed(key, role, at + 1)[at], *chunks[at + 1 :]]


def renumbered(at: int, chunks: list[bytes]) -> list[bytes]:
    """The chunk before, with the number that is due."""
    before = chunks[at - 1]
    counter = struct.pack(">Q", at)
    return [*chunks[:at], before[:4] + counter + before[HEADER_BYTES:], *chunks[at + 1 :]]


def called_last(at: int, chunks: list[bytes]) -> list[bytes]:
    bad = bytearray(chunks[at])
    bad[4] |= 0x80
    return [*chunks[:at], bytes(bad)]


CHANGES: dict[str, Change] = {
    "a length is flipped": flip(3),
    "a number is flipped": flip(HEADER_BYTES - 1),
    "a bit of the text is flipped": flip(HEADER_BYTES + 7),
    "a bit of the tag is flipped": flip(-1),
    "a chunk is dropped": lambda at, chunks: [*chunks[:at], *chunks[at + 1 :]],
    "a chunk is repeated": lambda at, chunks: [*chunks[: at + 1], *chunks[at:]],
    "two chunks are swapped": lambda at, chunks: [
        *chunks[:at],
        chunks[at + 1],
        chunks[at],
        *chunks[at + 2 :],
    ],
    "an older chunk takes its number": renumbered,
    "a chunk of another session": spliced(OTHER, "connector"),
    "a chunk of the other direction": spliced(KEY, "acceptor"),
    "a chunk is cut": lambda at, chunks: [*chunks[:at], chunks[at][:-9]],
    "a header is cut": lambda at, chunks: [*chunks[:at], chunks[at][:5]],
    "it ends between two chunks": lambda at, chunks: chunks[:at],
    "it is said to end": called_last,
    "chunks are joined": lambda at, chunks: [*chunks[:at], chunks[at] + chunks[at], *chunks[at + 1 :]],
    "bytes of nobody": lambda at, chunks: [*chunks[:at], bytes(1000), *chunks[at:]],
}


class Receiving:
    """The receiving worker's end; ``until`` waits for frames, or for what the stream broke with."""

    def __init__(self, sock: socket.socket) -> None:
        self._came = threading.Semaphore(0)
        self.placed: list[bytearray] = []
        self.pipe = SocketPipe(sock, KEY, "acceptor", place=self._place, wake=self._came.release)
        self.frames: list[Frame] = []

    def _place(self, head: FrameHeader) -> list[memoryview]:
        self.placed.append(bytearray(head.nbytes))
        return [memoryview(self.placed[-1])] if head.nbytes else []

    def broken(self) -> FleetError:
        while True:
            try:
                while (frame := self.pipe.receive()) is not None:
                    self.frames.append(frame)
            except FleetError as error:
                return error
            assert self._came.acquire(timeout=30)


def chunks_of(wire: bytes) -> list[bytes]:
    found = []
    while wire:
        (size,) = struct.unpack_from(">I", wire)
        found.append(wire[: HEADER_BYTES + size])
        wire = wire[HEADER_BYTES + size :]
    return found


@pytest.fixture(scope="module")
def sent() -> list[bytes]:
    """The chunks of a stream of frames, as they come from the sending worker's own pipe."""
    near, tap = tcp_pair()
    pipe = SocketPipe(near, KEY, "connector", place=lambda head: [], wake=lambda: None)
    for number in range(FRAMES):
        head = FrameHeader(Kind.ROWS, number, 0, 1, (ROW, 0))
        pipe.send(head, memoryview(payload(number)))
    pipe.finish()
    wire, whole = b"", FRAMES
    while True:
        wire += tap.recv(1 << 20)
        with contextlib.suppress(struct.error):
            found = chunks_of(wire)
            # The end is a chunk of its own, which is marked.
            if found[-1][4] & 0x80 and len(found[-1]) == HEADER_BYTES + 16:
                break
    pipe.close()
    tap.close()
    assert len(found) > whole
    return found


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Receiving]]:
    near, far = tcp_pair()
    receiving = Receiving(far)
    try:
        yield near, receiving
    finally:
        near.close()
        receiving.pipe.close()


def relayed(near: socket.socket, chunks: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # it hangs up once it has seen the lie
        near.sendall(b"".join(chunks))
        near.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("at", [1, 3, FRAMES - 1])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attack_on_a_live_stream(
    sent: list[bytes], ends: tuple[socket.socket, Receiving], change: Change, at: int
) -> None:
    near, receiving = ends
    relayed(near, change(at, sent))
    assert isinstance(receiving.broken(), SealBroken | PeerLost)
    # What came is what was sent, as far as it goes, and nothing of the changed chunk.
    for number, frame in enumerate(receiving.frames):
        assert frame.head.layer == number
        assert bytes(frame.buffers[0]) == payload(number)
    assert len(receiving.frames) <= at + 1
    assert receiving.pipe.backlog == 0


def test_a_stream_that_nobody_touched_arrives(
    sent: list[bytes], ends: tuple[socket.socket, Receiving]
) -> None:
    near, receiving = ends
    relayed(near, sent)
    while len(receiving.frames) < FRAMES:
        assert receiving._came.acquire(timeout=30)
        while (frame := receiving.pipe.receive()) is not None:
            receiving.frames.append(frame)
    assert [bytes(frame.buffers[0]) for frame in receiving.frames] == [payload(n) for n in range(FRAMES)]


def test_attack_a_stream_that_stalls_within_a_chunk_is_lost(
    sent: list[bytes], ends: tuple[socket.socket, Receiving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEALED_STALL_S", 0.2)
    near, far = tcp_pair()
    receiving = Receiving(far)
    near.sendall(sent[0] + sent[1][:100])
    error = receiving.broken()
    assert isinstance(error, PeerLost)
    assert "sent nothing" in str(error)
    receiving.pipe.close()
    near.close()
