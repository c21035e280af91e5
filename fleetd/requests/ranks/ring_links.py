"""The two tunnels of one rank: from the rank before to its port, and from its mouth to the next rank."""

from __future__ import annotations

import socket
from collections.abc import Callable

from fleetd.control.daemon_status import Carried
from fleetd.engine.settings import RingPlace
from fleetd.p2p.tunnel import LocalPort, Mouth, Tunnel
from fleetd.sealed.chunks import Role


class RingLinks:
    """``private``: whether a stream runs over a link that this machine's owner has declared private."""

    def __init__(
        self, rank: int, size: int, private: Callable[[socket.socket], bool] = lambda sock: False
    ) -> None:
        self._private = private
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
        self._tunnels.append(Tunnel(sock, key, role, local, private=self._private(sock)))

    @property
    def carried(self) -> Carried:
        """How the ring's bytes leave and reach this machine; "" until that is agreed on."""
        told = {tunnel.plain for tunnel in self._tunnels}
        if None in told or not told:
            return ""
        return "partly plain" if len(told) > 1 else "plain" if told.pop() else "sealed"

    def close(self) -> None:
        """Idempotent."""
        for tunnel in self._tunnels:
            tunnel.close()
        self._port.close()
        self._mouth.close()
