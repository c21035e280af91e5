"""Frames to and from a worker on another machine, beside the thread that computes.

    compute thread   send → queue → writer thread → sealed socket
                     receive ← queue ← reader thread ← sealed socket, payload straight into the buffers that
                                                       ``place`` names

Nothing here makes the compute thread wait. What goes wrong with the stream comes out of ``receive``, after
the frames that came before it.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from fleetd import limits
from fleetd.engine.streams.frames import HEAD_BYTES, Frame, FrameHeader, Kind, Place
from fleetd.errors import EngineError, FleetError, ProtocolError
from fleetd.process.used_socket import UsedSocket
from fleetd.sealed.chunks import Role
from fleetd.sealed.stream import SealedReceiver, SealedSender

# Shorter buffers are copied together into one sealed chunk; from here on a copy costs more than a chunk does.
WHOLE_BYTES = 128 * limits.KIB
# An ``eager`` pipe writes shorter frames in the sender's thread, such as hidden states of a token: a writable
# socket takes so many bytes. On Linux a third of its buffer is free then; Macs are told how much is to be.
EAGER_BYTES = 16 * limits.KIB
# For the headers of a sealed chunk.
_SEALED_BYTES = limits.KIB
# What the end of a stream counts for while it is queued: more than a last, empty frame does, so that a
# stream never looks written before its end is.
_END_BYTES = limits.KIB
# The threads only have to notice that their socket is shut down.
_JOIN_S = 5.0


class SocketPipe:
    """The ``frames.FramePipe`` on a connected socket, which is its own from now on.

    ``place`` is called on the reader thread; ``wake`` on both threads whenever something arrived, was sent,
    or broke. ``eager``: short frames do not wait for the writer thread if nothing is queued. ``beat_s``: an
    ALIVE is sent whenever nothing was for so long; 0 is never.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        role: Role,
        *,
        place: Place,
        wake: Callable[[], None],
        eager: bool = False,
        beat_s: float = 0.0,
    ) -> None:
        with contextlib.suppress(OSError):  # not TCP
            # A last, short frame must not wait for the one before it to be acknowledged.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if eager:
            with contextlib.suppress(OSError):  # Linux does not know it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDLOWAT, EAGER_BYTES + _SEALED_BYTES)
        self._socket = UsedSocket(sock)
        self._place = place
        self._wake = wake
        self._eager = eager
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._sender = SealedSender(sock, key, role)
        self._receiver = SealedReceiver(sock, key, role)
        self._out: queue.SimpleQueue[tuple[memoryview, ...] | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Held while something is written, a frame of the compute thread or a beat, and while it is looked
        # whether that would wait: a poll object serves one thread at a time.
        self._writing = threading.Lock()
        self._beat_s = beat_s
        # When the other side was heard last, by the monotonic clock.
        self.heard_s = time.monotonic()
        self._backlog = 0
        self._broken: FleetError | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._while_open, args=(self._write,), name="pipe-writer", daemon=True),
            threading.Thread(target=self._while_open, args=(self._read,), name="pipe-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the compute thread ------------------------------------------------------------------------

    def send(self, head: FrameHeader, *payload: memoryview) -> None:
        """Queue a frame; its buffers must not change until ``backlog`` says that they were written."""
        parts = (memoryview(head.pack()), *(part.cast("B") for part in payload))
        if not self._sent_at_once(parts):
            self._queue(parts)

    @property
    def backlog(self) -> int:
        """Bytes queued and not yet written, the end included; 0 once nothing will be written any more."""
        return self._backlog

    def receive(self) -> Frame | None:
        """The next frame, None if none has come. Raises what the stream broke with."""
        try:
            return self._in.get_nowait()
        except queue.Empty:
            pass
        if self._broken is None:
            return None
        try:
            # One may have come between the two questions.
            return self._in.get_nowait()
        except queue.Empty:
            raise self._broken from None

    def finish(self) -> None:
        """Nothing more will be sent."""
        self._queue(())

    def close(self) -> None:
        """End both threads and close the socket, whatever is still queued. Idempotent.

        No buffer is written to afterwards.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._out.put(None)
        self._socket.end()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _sent_at_once(self, parts: tuple[memoryview, ...]) -> bool:
        """Only if that cannot wait, and if the writer thread has nothing to do."""
        if not self._eager or self._backlog or self._broken is not None or self._closed:
            return False
        if _cost(parts) > EAGER_BYTES or not self._writing.acquire(blocking=False):
            return False
        try:
            with self._socket.used():
                if not self._writable.poll(0):
                    return False
                self._sender.send(b"".join(parts))
        except FleetError as error:
            self._break(error)
        except OSError:  # it was ended just now, as ``receive`` tells
            return False
        finally:
            self._writing.release()
        return True

    def _queue(self, parts: tuple[memoryview, ...]) -> None:
        with self._lock:
            if self._broken is not None:
                return  # receive tells
            self._backlog += _cost(parts)
        self._out.put(parts)

    # ---- threads ---------------------------------------------------------------------------------------

    def _while_open(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(OSError), self._socket.used():  # closed before this thread began
            work()

    def _write(self) -> None:
        scratch = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
        try:
            while (parts := self._next_out()) is not None:
                if parts:
                    for piece in _gathered(parts, scratch):
                        with self._writing:
                            self._sender.send(piece)
                else:
                    with self._writing:
                        self._sender.finish()
                with self._lock:
                    if self._broken is None:
                        self._backlog -= _cost(parts)
                del parts  # its buffers may be large, and the wait for the next frame long
                self._wake()
        except FleetError as error:
            self._break(error)
        except Exception as error:
            traceback.print_exc()
            self._break(EngineError(f"A frame could not be sent ({type(error).__name__})."))

    def _next_out(self) -> tuple[memoryview, ...] | None:
        """What is to be written next; None to end. Beats while there is nothing."""
        while self._beat_s:
            with contextlib.suppress(queue.Empty):
                return self._out.get(timeout=self._beat_s)
            if self._writing.acquire(blocking=False):
                try:
                    if self._writable.poll(0):
                        self._sender.send(FrameHeader(Kind.ALIVE).pack())
                finally:
                    self._writing.release()
        return self._out.get()

    def _read(self) -> None:
        head_bytes = memoryview(bytearray(HEAD_BYTES))
        try:
            while self._next(head_bytes):
                head = FrameHeader.unpack(head_bytes)
                self.heard_s = time.monotonic()
                if head.kind is Kind.ALIVE and not head.nbytes:
                    continue
                buffers = self._place(head)
                if (room := sum(buffer.nbytes for buffer in buffers)) != head.nbytes:
                    raise ProtocolError(f"A frame of {head.nbytes} bytes came where {room} were due.")
                for buffer in buffers:
                    self._fill(buffer)
                self._in.put(Frame(head, buffers))
                self._wake()
        except FleetError as error:
            self._break(error)
        except Exception as error:
            traceback.print_exc()
            self._break(EngineError(f"A frame could not be taken ({type(error).__name__})."))

    def _next(self, head: memoryview) -> bool:
        """Read the next head. False at the stream's proper end."""
        # Between frames the other side may compute for as long as its plan allows; that is not for here.
        self._receiver.wait()
        count = self._receiver.receive_into(head)
        if 0 < count < len(head):
            raise ProtocolError("A stream between engines ended within a frame.")
        return count > 0

    def _fill(self, buffer: memoryview) -> None:
        if self._receiver.receive_into(buffer) < buffer.nbytes:
            raise ProtocolError("A stream between engines ended within a frame.")

    def _break(self, error: FleetError) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = error
            self._backlog = 0
            closed = self._closed
        # The other thread must not wait for a side that is gone, nor the other side for this one.
        self._out.put(None)
        self._socket.end()
        if not closed:
            self._wake()


def _cost(parts: tuple[memoryview, ...]) -> int:
    return sum(part.nbytes for part in parts) or _END_BYTES


def _gathered(parts: tuple[memoryview, ...], scratch: memoryview) -> Iterator[memoryview]:
    """The same bytes in fewer pieces: short parts are copied together. A piece is good until the next."""
    filled = 0
    for part in parts:
        if filled and (part.nbytes >= WHOLE_BYTES or filled + part.nbytes > len(scratch)):
            yield scratch[:filled]
            filled = 0
        if part.nbytes >= WHOLE_BYTES:
            yield part
        else:
            scratch[filled : filled + part.nbytes] = part
            filled += part.nbytes
    if filled:
        yield scratch[:filled]
