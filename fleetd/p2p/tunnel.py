"""Tunnels of a ring: a TCP connection between two processes of different machines, sealed on its way.

A link that the owners of both ends have declared private carries the bytes as they are: each end says in the
first sealed chunk whether it may, so that nobody else can have them sent unsealed.

    rank ─► mouth, a port of its machine ─► sealed stream ─► port of the next rank's machine ─► next rank

The processes know ports of their own machine alone. Neither end holds more than a chunk: a rank that does
not read makes the one that writes wait. When one of the three connections ends, so do the others.

Both ports are on the loopback interface, to which every user of the machine may connect: the mouth lets in
processes of fleetd alone, and a rank looks who came in at its port (``engine.ranks.ring``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.process import local_peers
from fleetd.process.used_socket import UsedSocket
from fleetd.sealed.chunks import Role
from fleetd.sealed.stream import SealedReceiver, SealedSender

_HERE = "127.0.0.1"
#: Of what an end says of its link: it is private.
PLAIN = 1
_AGAIN_S = 0.02
# So many strangers may wait to be sent away.
_COMING = 16


class Mouth:
    """A port of this machine, behind which a process of another one is. ``daemon``: the id of the process
    which may come in with those that it started, if that is not this one."""

    def __init__(self, daemon: int | None = None) -> None:
        self.daemon = os.getpid() if daemon is None else daemon
        self._listener = UsedSocket(socket.create_server((_HERE, 0), backlog=_COMING))
        self.port: int = self._listener.sock.getsockname()[1]

    def open(self) -> socket.socket:
        """The connection of the first process of fleetd that comes. No other one is let in: its bytes would
        be the rank's. Raises OSError if none comes in time, or once it is closed."""
        try:
            with self._listener.used() as listener:
                return local_peers.accept(
                    listener, self.daemon, limits.RANKS_LOAD_S, lambda: self._listener.ended
                )
        finally:
            self._listener.end()

    def close(self) -> None:
        self._listener.end()


class LocalPort:
    """A port of this machine at which a process of its own is about to listen; no other process gets it."""

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind((_HERE, 0))
        self.port: int = self._held.getsockname()[1]
        self._closed = False

    def open(self) -> socket.socket:
        """Connect to the process, once it listens. Raises OSError if it does not in time, or once this is
        closed."""
        until_s = time.monotonic() + limits.RANKS_LOAD_S
        while True:
            try:
                return socket.create_connection((_HERE, self.port), timeout=limits.RING_FORM_S)
            except ConnectionRefusedError:
                if self._closed or time.monotonic() > until_s:
                    raise
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        self._closed = True
        self._held.close()


class Tunnel:
    """One end. ``remote``: the stream to the other machine, ``key`` and ``role`` of its seal; ``local``:
    where the process of this machine comes in, or is found. ``offer``: what this end says of the link, a bit
    each; ``PLAIN`` is that it is private, and what other bits mean is the caller's."""

    def __init__(
        self,
        remote: socket.socket,
        key: bytes,
        role: Role,
        local: Mouth | LocalPort,
        *,
        offer: int = 0,
    ) -> None:
        self._remote, self._local, self._offer = UsedSocket(remote), local, offer
        # The bits that both ends have said; None until they have.
        self.both: int | None = None
        self._said = threading.Event()
        self._process: UsedSocket | None = None
        self._sender = SealedSender(remote, key, role)
        self._receiver = SealedReceiver(remote, key, role)
        with contextlib.suppress(OSError):  # not TCP
            remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="tunnel", daemon=True)]
        self._threads[0].start()

    @property
    def plain(self) -> bool | None:
        """Whether its bytes are not sealed; None until both ends have said."""
        return None if self.both is None else bool(self.both & PLAIN)

    def agreed(self, within_s: float) -> int | None:
        """Wait for what both ends say; None if they do not."""
        self._said.wait(within_s)
        return self.both

    def close(self) -> None:
        """End it at once. Idempotent; does not wait for its threads."""
        self._closed.set()
        self._said.set()
        self._local.close()
        for used in (self._remote, self._process):
            if used is not None:
                used.end()

    def join(self, within_s: float) -> None:
        """Wait for its threads, which ``close`` has told to end."""
        for thread in list(self._threads):
            thread.join(within_s)

    def _run(self) -> None:
        try:
            self._join_ends()
        except (OSError, FleetError):
            pass  # whoever waits for it is told by its end
        finally:
            self.close()

    def _join_ends(self) -> None:
        """Until one of them ends. Raises PeerLost, SealBroken, and OSError, as if this was closed before."""
        with self._remote.used():
            self.both = self._exchanged()
            self._said.set()
            process = self._process = UsedSocket(self._local.open())
            if self._closed.is_set():
                process.end()
            with process.used() as sock:
                sock.settimeout(None)
                with contextlib.suppress(OSError):  # it was reset, as the first read will say
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                come = threading.Thread(
                    target=self._carry, args=(self._come, sock), name="tunnel", daemon=True
                )
                self._threads.append(come)
                come.start()
                self._carry(self._go, sock)
                come.join()

    def _exchanged(self) -> int:
        """The bits that both ends say. Raises PeerLost, SealBroken."""
        self._sender.send(bytes([self._offer]))
        theirs = bytearray(1)
        self._receiver.receive_into(theirs)
        return self._offer & theirs[0]

    def _carry(self, way: Callable[[socket.socket], None], process: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, FleetError):
                way(process)
        finally:
            self.close()

    def _go(self, process: socket.socket) -> None:
        buffer = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
        send = self._remote.sock.sendall if self.plain else self._sender.send
        while count := process.recv_into(buffer):
            send(buffer[:count])

    def _come(self, process: socket.socket) -> None:
        if self.plain:
            self._come_plain(process)
            return
        chunks = self._receiver.chunks()
        while True:
            # Ranks may have nothing to say for hours.
            self._receiver.wait()
            if (chunk := next(chunks, None)) is None:
                return
            process.sendall(chunk)

    def _come_plain(self, process: socket.socket) -> None:
        buffer = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
        while True:
            self._receiver.wait()
            if not (count := self._remote.sock.recv_into(buffer)):
                return
            process.sendall(buffer[:count])
