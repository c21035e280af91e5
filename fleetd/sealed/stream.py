"""A sealed stream on a TCP socket, blocking. Neither end holds more than a chunk.

The thread that reads or writes also decrypts or encrypts. A second thread to overlap this with the socket was
slower at every chunk size on two cores, where the other end's process has the other core.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

from fleetd import limits
from fleetd.errors import PeerLost
from fleetd.sealed.chunks import HEADER_BYTES, TAG_BYTES, Opener, Role, Sealer

_AGAIN = "Try again; another machine or this one alone may do it meanwhile."


class SealedSender:
    """The sending half of a connection. The caller closes the socket.

    Every method raises PeerLost when the other side is gone, or has taken nothing for ``SEALED_STALL_S``.

    Args:
        steady: the other side has nothing to do but to take it: PeerLost also if it takes less than
            ``SEALED_LEAST_BYTES_PER_S``.
    """

    def __init__(self, sock: socket.socket, key: bytes, role: Role, *, steady: bool = False) -> None:
        self._least_bytes_per_s = limits.SEALED_LEAST_BYTES_PER_S if steady else 0
        self._waited_s, self._taken = 0.0, 0
        sock.settimeout(limits.SEALED_STALL_S)
        self._sock = sock
        self._sealer = Sealer(key, role)
        self._wire = memoryview(bytearray(HEADER_BYTES + limits.SEALED_CHUNK_BYTES + TAG_BYTES))

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``, in as few chunks as possible."""
        plain = memoryview(data).cast("B")
        for start in range(0, len(plain), limits.SEALED_CHUNK_BYTES):
            self._put(plain[start : start + limits.SEALED_CHUNK_BYTES])

    def finish(self) -> None:
        """Send the last chunk; without it the other side takes the stream for cut short."""
        self._put(memoryview(b""), last=True)

    def _put(self, plain: memoryview, *, last: bool = False) -> None:
        left = self._wire[: self._sealer.seal_into(plain, self._wire, last=last)]
        try:
            while left:
                # Not sendall: its timeout is for all of it, this one for any of it.
                begun_s = time.monotonic()
                count = self._sock.send(left)
                left = left[count:]
                self._took(count, time.monotonic() - begun_s)
        except TimeoutError:
            raise PeerLost(
                f"The other side has taken nothing for {limits.SEALED_STALL_S:.0f} s.", hint=_AGAIN
            ) from None
        except OSError as error:
            raise PeerLost(f"The stream broke ({error.strerror or error}).", hint=_AGAIN) from None

    def _took(self, count: int, seconds: float) -> None:
        self._taken += count
        self._waited_s += seconds
        if self._taken < (self._waited_s - limits.SEALED_GRACE_S) * self._least_bytes_per_s:
            raise PeerLost(
                f"The other side has taken {self._taken} bytes in {self._waited_s:.0f} s.", hint=_AGAIN
            )


class SealedReceiver:
    """The receiving half of a connection. The caller closes the socket.

    Every method raises SealBroken for bytes that the other side did not seal, and PeerLost when it is gone
    before its last chunk, or has sent nothing for ``SEALED_STALL_S``.
    """

    def __init__(self, sock: socket.socket, key: bytes, role: Role) -> None:
        sock.settimeout(limits.SEALED_STALL_S)
        self._sock = sock
        self._opener = Opener(key, role)
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._wire = memoryview(bytearray(limits.SEALED_CHUNK_BYTES + TAG_BYTES))
        self._plain = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
        self._rest = self._plain[:0]
        self._received = 0

    def wait(self) -> None:
        """Wait without a limit until there are bytes to receive, or the stream is broken."""
        if self._rest or self._opener.finished:
            return
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll()

    def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Fill ``buffer``, across chunks; returns its length, or less if the stream ends.

        A chunk that fits is decrypted in place. After an error the content of the buffer is undefined.
        """
        left = memoryview(buffer).cast("B")
        wanted = len(left)
        while left:
            if self._rest:
                count = min(len(self._rest), len(left))
                left[:count] = self._rest[:count]
                self._rest = self._rest[count:]
            elif (size := self._next()) is None:
                break
            elif size <= len(left):
                count = size
                self._open(left[:count])
            else:
                count = 0
                self._rest = self._plain[:size]
                self._open(self._rest)
            left = left[count:]
        return wanted - len(left)

    def chunks(self) -> Iterator[memoryview]:
        """The chunks, to the end. Each view is valid until the next one is requested."""
        if self._rest:
            rest, self._rest = self._rest, self._plain[:0]
            yield rest
        while (size := self._next()) is not None:
            plain = self._plain[:size]
            self._open(plain)
            if plain:
                yield plain

    def _next(self) -> int | None:
        """Read a chunk's header; returns the length of its text, or None after the last chunk."""
        if self._opener.finished:
            return None
        self._fill(self._header)
        return self._opener.body_bytes(self._header) - TAG_BYTES

    def _open(self, plain: memoryview) -> None:
        body = self._wire[: len(plain) + TAG_BYTES]
        self._fill(body)
        self._opener.open_into(self._header, body, plain)

    def _fill(self, left: memoryview) -> None:
        try:
            while left:
                count = self._sock.recv_into(left)
                if count == 0:
                    raise PeerLost(
                        f"The stream was closed before its end, after {self._received} bytes.", hint=_AGAIN
                    )
                self._received += count
                left = left[count:]
        except TimeoutError:
            raise PeerLost(
                f"The other side has sent nothing for {limits.SEALED_STALL_S:.0f} s.", hint=_AGAIN
            ) from None
        except OSError as error:
            raise PeerLost(f"The stream broke ({error.strerror or error}).", hint=_AGAIN) from None
