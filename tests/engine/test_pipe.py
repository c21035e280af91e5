"""Frames over a real sealed socket: they land where they belong, and every way to break is told."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from fleetd import limits
from fleetd.engine.streams import pipe
from fleetd.engine.streams.frames import HEAD_BYTES, Frame, FrameHeader, Kind
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import EngineError, FleetError, PeerLost, ProtocolError, SealBroken
from fleetd.sealed.stream import SealedSender

KEY = bytes(range(32))
WAIT_S = 60.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def rows(*sizes: int, layer: int = 0) -> FrameHeader:
    first, *rest = sizes
    return FrameHeader(Kind.ROWS, layer, 0, 1, (first, sum(rest)), 0, b"prefix--")


class PipeEnd:
    """A pipe, with somewhere to put what comes, and an event to wait on."""

    def __init__(self, sock: socket.socket, role: str) -> None:
        self.woken = threading.Event()
        self.placed: list[FrameHeader] = []
        self.sock = sock
        self.pipe = SocketPipe(sock, KEY, role, place=self.place, wake=self.woken.set)  # type: ignore[arg-type]

    def place(self, head: FrameHeader) -> list[memoryview]:
        self.placed.append(head)
        return [memoryview(bytearray(size)) for size in head.sizes]

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, "nothing came"
            self.woken.wait(0.05)
            self.woken.clear()

    def frame(self) -> Frame:
        found: list[Frame] = []

        def came() -> bool:
            if (frame := self.pipe.receive()) is not None:
                found.append(frame)
            return bool(found)

        self.until(came)
        return found[0]

    def broken(self) -> FleetError:
        errors: list[FleetError] = []

        def broke() -> bool:
            try:
                assert self.pipe.receive() is None
            except FleetError as error:
                errors.append(error)
            return bool(errors)

        self.until(broke)
        return errors[0]


@pytest.fixture
def ends() -> Iterator[tuple[PipeEnd, PipeEnd]]:
    near, far = tcp_pair()
    here, there = PipeEnd(near, "connector"), PipeEnd(far, "acceptor")
    yield here, there
    here.pipe.close()
    there.pipe.close()


def pipe_threads() -> int:
    return sum(thread.name.startswith("pipe-") for thread in threading.enumerate())


def test_frames_of_all_sizes_arrive_whole_and_in_order(ends: tuple[PipeEnd, PipeEnd]) -> None:
    here, there = ends
    chunk, whole = limits.SEALED_CHUNK_BYTES, pipe.WHOLE_BYTES
    sizes = [(0, 0), (1, 0), (10, whole), (whole - 1, whole - 1), (whole, 3), (chunk, chunk + 1), (3, chunk)]
    for number, pair in enumerate(sizes):
        here.pipe.send(rows(*pair, layer=number), *(memoryview(os.urandom(size)) for size in pair))
    frames = [there.frame() for _ in sizes]
    assert [frame.head.layer for frame in frames] == list(range(len(sizes)))
    assert [tuple(len(b) for b in frame.buffers) for frame in frames] == sizes
    here.until(lambda: here.pipe.backlog == 0)


def test_many_short_buffers_are_one_payload(ends: tuple[PipeEnd, PipeEnd]) -> None:
    """One key head's rows lie apart from the next one's; what arrives is their bytes one after the other."""
    here, there = ends
    parts = [os.urandom(size) for size in (1000, 140_000, 5, 64_000, 64_000) * 12]
    data = b"".join(parts)
    here.pipe.send(FrameHeader(Kind.ROWS, 1, 0, 1, (len(data), 0)), *map(memoryview, parts))
    frame = there.frame()
    assert bytes(frame.buffers[0]) == data


def test_both_directions_at_once(ends: tuple[PipeEnd, PipeEnd]) -> None:
    here, there = ends
    payload = memoryview(bytes(3 << 20))
    for end in ends:
        for layer in range(8):
            end.pipe.send(rows(len(payload), layer=layer), payload)
    for end in ends:
        assert [end.frame().head.layer for _ in range(8)] == list(range(8))
    assert here.pipe.receive() is there.pipe.receive() is None


def test_send_does_not_wait_for_a_side_that_reads_nothing() -> None:
    threads = pipe_threads()
    near, far = tcp_pair()
    with far:
        end = PipeEnd(near, "connector")
        payload = memoryview(bytes(8 << 20))
        for _ in range(8):
            end.pipe.send(rows(len(payload)), payload)
        assert end.pipe.backlog > 48 << 20
        assert end.pipe.receive() is None
        end.pipe.close()  # at once, with all that queued
    assert pipe_threads() <= threads


def test_a_finished_stream_is_no_broken_one(ends: tuple[PipeEnd, PipeEnd]) -> None:
    here, there = ends
    here.pipe.send(rows(10), memoryview(bytes(10)))
    here.pipe.finish()
    here.until(lambda: here.pipe.backlog == 0)
    here.pipe.close()
    assert there.frame().head.sizes == (10, 0)
    for thread in there.pipe._threads[1:]:
        thread.join(WAIT_S)
    assert there.pipe.receive() is None


def test_a_side_that_goes_is_lost_after_its_last_frame(ends: tuple[PipeEnd, PipeEnd]) -> None:
    here, there = ends
    here.pipe.send(rows(10), memoryview(bytes(10)))
    here.until(lambda: here.pipe.backlog == 0)
    here.pipe.close()
    assert there.frame().head.sizes == (10, 0)
    assert isinstance(there.broken(), PeerLost)
    # It stays broken, and what is sent into it does no harm.
    there.pipe.send(rows(10), memoryview(bytes(10)))
    assert isinstance(there.broken(), PeerLost)


def test_a_frame_that_is_not_due_is_refused_before_its_payload(ends: tuple[PipeEnd, PipeEnd]) -> None:
    here, there = ends

    def refuse(head: FrameHeader) -> list[memoryview]:
        raise ProtocolError("not due")

    there.pipe._place = refuse
    payload = memoryview(bytes(64 << 20))
    here.pipe.send(rows(len(payload)), payload)
    assert there.broken().message == "not due"
    # The other side hears of it at once instead of sending the rest.
    assert isinstance(here.broken(), PeerLost)


def test_a_bug_in_sending_is_an_error_and_no_silence(
    ends: tuple[PipeEnd, PipeEnd], capsys: pytest.CaptureFixture[str]
) -> None:
    here, _ = ends
    here.pipe.finish()
    here.pipe.send(rows(10), memoryview(bytes(10)))
    assert type(here.broken()) is EngineError
    assert here.pipe.backlog == 0
    assert "ValueError" in capsys.readouterr().err


def test_buffers_of_another_size_are_never_filled(ends: tuple[PipeEnd, PipeEnd]) -> None:
    here, there = ends
    there.pipe._place = lambda head: [memoryview(bytearray(11))]
    here.pipe.send(rows(10), memoryview(bytes(10)))
    assert isinstance(there.broken(), ProtocolError)


def test_a_bug_in_placing_is_an_error_and_no_silence(
    ends: tuple[PipeEnd, PipeEnd], capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = ends
    there.pipe._place = lambda head: [][0]
    here.pipe.send(rows(10), memoryview(bytes(10)))
    assert type(there.broken()) is EngineError
    assert "IndexError" in capsys.readouterr().err


def test_garbage_instead_of_a_sealed_stream() -> None:
    near, far = tcp_pair()
    end = PipeEnd(near, "connector")
    with far:
        far.sendall(os.urandom(4096))
        assert isinstance(end.broken(), SealBroken | PeerLost)
    end.pipe.close()


@pytest.mark.parametrize(
    "sent", [HEAD_BYTES - 1, HEAD_BYTES + 5], ids=["within the head", "within the payload"]
)
def test_a_stream_that_ends_within_a_frame(sent: int) -> None:
    near, far = tcp_pair()
    end = PipeEnd(near, "connector")
    sender = SealedSender(far, KEY, "acceptor")
    sender.send((rows(10).pack() + bytes(10))[:sent])
    sender.finish()
    assert isinstance(end.broken(), ProtocolError)
    assert end.placed == ([rows(10)] if sent > HEAD_BYTES else [])
    end.pipe.close()
    far.close()


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    # What is left of other tests would be closed in between.
    gc.collect()
    before, threads = psutil.Process().num_fds(), pipe_threads()
    for _ in range(3):
        here, there = (PipeEnd(s, r) for s, r in zip(tcp_pair(), ("connector", "acceptor"), strict=True))
        here.pipe.send(rows(5), memoryview(bytes(5)))
        for end in (here, there):
            end.pipe.close()
            end.pipe.close()
    assert psutil.Process().num_fds() <= before
    assert pipe_threads() <= threads


def test_silence_between_frames_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side may compute for longer than a connection may be quiet within a frame."""
    monkeypatch.setattr(limits, "SEALED_STALL_S", 0.5)
    near, far = tcp_pair()
    here, there = PipeEnd(near, "connector"), PipeEnd(far, "acceptor")
    assert not there.woken.wait(1.0)
    here.pipe.send(rows(5), memoryview(bytes(5)))
    assert there.frame().head.sizes == (5, 0)
    here.pipe.close()
    there.pipe.close()


def test_an_eager_pipe_writes_short_frames_itself_and_keeps_their_order() -> None:
    near, far = tcp_pair()
    here = SocketPipe(near, KEY, "connector", place=lambda head: [], wake=lambda: None, eager=True)
    there = PipeEnd(far, "acceptor")
    sizes = [5, 5, 1 << 20, 5, pipe.EAGER_BYTES, 5, 0, 5]
    for number, size in enumerate(sizes):
        here.send(rows(size, layer=number), memoryview(bytes(size)))
        if number == 1:
            assert here.backlog == 0  # nothing of it was ever queued
    assert [there.frame().head.layer for _ in sizes] == list(range(len(sizes)))
    here.close()
    assert isinstance(there.broken(), PeerLost)
    there.pipe.close()


@pytest.mark.parametrize("size", [500, pipe.EAGER_BYTES - HEAD_BYTES])
def test_an_eager_pipe_does_not_wait_for_a_side_that_reads_nothing(size: int) -> None:
    threads = pipe_threads()
    near, far = tcp_pair()
    with far:
        here = SocketPipe(near, KEY, "connector", place=lambda head: [], wake=lambda: None, eager=True)
        for _ in range(20_000):
            here.send(rows(size), memoryview(bytes(size)))
            if here.backlog > 10 * pipe.EAGER_BYTES:
                break
        assert here.backlog > 0
        here.close()
    assert pipe_threads() <= threads


class OneThreadPoll:
    """As ``select.poll``, which refuses a second thread, and takes so long that one comes."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self.asked = 0

    def poll(self, _timeout: float) -> list[tuple[int, int]]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("concurrent poll() invocation")
        try:
            self.asked += 1
            time.sleep(0.0005)
        finally:
            self._busy.release()
        return [(0, 0)]


def test_beats_and_short_frames_do_not_disturb_each_other() -> None:
    near, far = tcp_pair()
    there = PipeEnd(far, "acceptor")
    here = SocketPipe(
        near, KEY, "connector", place=lambda head: [], wake=there.woken.set, eager=True, beat_s=0.0001
    )
    writable = OneThreadPoll()
    here._writable = writable  # type: ignore[assignment]
    for number in range(300):
        here.send(rows(5, layer=number % 7), memoryview(bytes(5)))
        assert here.receive() is None
    assert [there.frame().head.layer for _ in range(300)] == [number % 7 for number in range(300)]
    assert writable.asked
    here.close()
    there.pipe.close()
