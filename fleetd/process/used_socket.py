"""A socket that one thread uses while another one may end it.

A thread that waits for a socket looks it up by its number again each time it wakes. If the socket was closed
meanwhile, the number may be that of another one, for whose bytes the thread then waits without end. So a
socket is shut down at once, which wakes the thread, and closed once no thread uses it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator


def shut_down(sock: socket.socket) -> None:
    """End both directions, so that a thread that waits for one of them goes on."""
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.shutdown(socket.SHUT_RDWR)


class UsedSocket:
    """``sock`` is closed by this alone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._users, self._ended = 0, False

    @property
    def ended(self) -> bool:
        """True from ``end`` on."""
        return self._ended

    @contextlib.contextmanager
    def used(self) -> Iterator[socket.socket]:
        """It stays open meanwhile. Raises OSError if it was ended."""
        with self._lock:
            if self._ended:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._users += 1
        try:
            yield self.sock
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def end(self) -> None:
        """Shut both directions down, so that whatever waits for one of them goes on. Idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                shut_down(self.sock)
                self._close_unused()

    def _close_unused(self) -> None:
        if self._ended and not self._users:
            self.sock.close()
