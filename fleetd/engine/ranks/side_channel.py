"""What ranks tell each other before a library connects them: a few bytes from each to all, round the ring of
tunnels that fleetd has closed."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

from fleetd import limits
from fleetd.engine.settings import RingPlace
from fleetd.process import local_peers

_HERE = "127.0.0.1"
_AGAIN_S = 0.02
# So many strangers may wait to be sent away.
_COMING = 16
# Sent before as much is received, so that no rank waits for one that waits for it. Sockets hold more.
_STEP_BYTES = 16 << 10


class SideChannel:
    """``after``: the connection to the next rank; ``before``: from the one before."""

    def __init__(self, place: RingPlace, after: socket.socket, before: socket.socket) -> None:
        self._rank, self._size = place.rank, place.size
        self._after, self._before = after, before

    @classmethod
    def open(cls, place: RingPlace) -> SideChannel:
        """Wait for both neighbours. Raises OSError if one does not come in time."""
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket())
            # The port is held by the daemon, so that no other process gets it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((_HERE, place.port))
            listener.listen(_COMING)
            after = opened.enter_context(_connected(place.next_port))
            before = local_peers.accept(listener, place.daemon or os.getppid(), limits.RING_FORM_S)
            before.settimeout(limits.RING_FORM_S)
            opened.pop_all()
            listener.close()
        return cls(place, after, before)

    def gather(self, source: bytes, count: int) -> bytes:
        """``count`` bytes of every rank, those of rank 0 first; every rank calls it with as many. Raises
        ValueError, OSError."""
        if len(source) != count or count > limits.SIDE_CHANNEL_BYTES:
            raise ValueError(f"{len(source)} bytes are no {count}, or too many to tell the other ranks")
        parts = [b""] * self._size
        parts[self._rank] = passed = bytes(source)
        for step in range(1, self._size):
            passed = self._turn(passed)
            parts[(self._rank - step) % self._size] = passed
        return b"".join(parts)

    def _turn(self, sent: bytes) -> bytes:
        """Send to the next rank, and receive as much from the one before."""
        received = b""
        for start in range(0, len(sent), _STEP_BYTES):
            piece = sent[start : start + _STEP_BYTES]
            self._after.sendall(piece)
            received += self._exactly(len(piece))
        return received

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self._before.recv(count - len(found))
            if not more:
                raise ConnectionError("the rank before has gone")
            found += more
        return found

    def close(self) -> None:
        self._after.close()
        self._before.close()


def _connected(port: int) -> socket.socket:
    """The connection to a port at which a process is about to listen. Raises OSError if it is late."""
    until_s = time.monotonic() + limits.RING_FORM_S
    while True:
        try:
            return socket.create_connection((_HERE, port), limits.RING_FORM_S)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_AGAIN_S)
