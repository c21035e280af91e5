"""The two tunnels of one rank: from the rank before to its port, and from its mouth to the next rank."""

from __future__ import annotations

import socket

from fleetd.engine.settings import RingPlace
from fleetd.p2p.tunnel import LocalPort, Mouth, Tunnel
from fleetd.sealed.chunks import Role


class RingLinks:
    def __init__(self, rank: int, size: int) -> None:
        self._port, self._mouth = LocalPort(), Mouth()
        self._tunnels: list[Tunnel] = []
        self.place = RingPlace(rank, size, self._port.port, self._mouth.port)

    def comes_from(self, sock: socket.socket, key: bytes) -> None:
        """The stream that the machine of the rank before has opened."""
        self._open(sock, key, "acceptor", self._port)

    def goes_to(self, sock: socket.socket, key: bytes) -> None:
        """The stream that was opened to the machine of the next rank."""
        self._open(sock, key, "connector", self._mouth)

    def _open(self, sock: socket.socket, key: bytes, role: Role, local: LocalPort | Mouth) -> None:
        sock.setblocking(True)
        self._tunnels.append(Tunnel(sock, key, role, local))

    def close(self) -> None:
        """Idempotent."""
        while self._tunnels:
            # Megabytes of buffers, which must not wait until the group that has had them is collected.
            self._tunnels.pop().close()
        self._port.close()
        self._mouth.close()
