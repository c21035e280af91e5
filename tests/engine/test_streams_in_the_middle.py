"""A machine in the middle of a live stream between two workers: whatever it does, no wrong number arrives.

The real pipe at both ends, on TCP, and between them a relay that knows where each sealed chunk begins, which
anybody on the network can see.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from sharing import tcp_pair
from wire_changes import KEY, Change, changes, chunks_of, ended

from fleetd import limits
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import FleetError, PeerLost, SealBroken

FRAMES = 6
ROW = 40_000
CHANGES = changes("connector", "acceptor")


def payload(number: int) -> bytes:
    return bytes([number + 1]) * ROW


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
        # The end is a chunk of its own, which is marked.
        if ended(found := chunks_of(wire)):
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
