"""A wire between two sockets of one machine that takes a given time, for what workers say to each other.

    wire = Delayed(0.005)           each byte written to wire.near is read from wire.far 5 ms later

The delay is added to each direction's bytes without holding up those behind them, as a long cable does.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

from bench.harness.samples import Closing


class Delayed(Closing):
    """Carries bytes between ``near`` and ``far``, ``seconds`` late in each direction. Close it at the end.

    ``came``: bytes that were sent from ``far``.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.came = 0
        self.near, here = socket.socketpair()
        self.far, there = socket.socketpair()
        self._inner = (here, there)
        self._threads: list[threading.Thread] = []
        for source, sink in ((here, there), (there, here)):
            waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            for work in (self._read, self._write):
                thread = threading.Thread(target=work, args=(source, sink, waiting), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Cut it. ``near`` and ``far`` are their users' to close."""
        for sock in self._inner:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._inner:
            sock.close()

    def _read(
        self, source: socket.socket, _sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        data = b"begin"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            if source is self._inner[1]:
                self.came += len(data)
            waiting.put((time.monotonic() + self.seconds, data))

    @staticmethod
    def _write(
        _source: socket.socket, sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        data = b"begin"
        while data:
            due_s, data = waiting.get()
            if (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
            with contextlib.suppress(OSError):
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
