"""The two tunnels of one rank: from the rank before to its port, and from its mouth to the next rank."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import Carried
from fleetd.engine.settings import RingPlace
from fleetd.errors import PeerLost
from fleetd.p2p.tunnel import LocalPort, Mouth, Tunnel
from fleetd.requests.ranks.fabrics import Offer, agreed, no_offer
from fleetd.sealed.chunks import Role


class RingLinks:
    """``offered``: what this machine offers on the link of a stream. ``daemon``: as ``Mouth`` has it."""

    def __init__(
        self,
        rank: int,
        size: int,
        offered: Callable[[socket.socket], Offer] = no_offer,
        daemon: int | None = None,
    ) -> None:
        self._port, self._mouth, self._offered = LocalPort(), Mouth(daemon), offered
        self._tunnels: list[Tunnel] = []
        # With the backend once ``agree`` has returned.
        self.place = RingPlace(rank, size, self._port.port, self._mouth.port, daemon=self._mouth.daemon)

    def comes_from(self, sock: socket.socket, key: bytes) -> None:
        """The stream that the machine of the rank before has opened."""
        self._open(sock, key, "acceptor", self._port)

    def goes_to(self, sock: socket.socket, key: bytes) -> None:
        """The stream that was opened to the machine of the next rank."""
        self._open(sock, key, "connector", self._mouth)

    def _open(self, sock: socket.socket, key: bytes, role: Role, local: LocalPort | Mouth) -> None:
        """Closes the stream if it broke already. Raises PeerLost."""
        try:
            sock.setblocking(True)
            offer = self._offered(sock)
        except OSError as error:
            sock.close()
            raise PeerLost(f"The stream of the ring broke ({error.strerror or error}).") from error
        # Of two ranks both take the two ends of one connection: that from rank 0 to rank 1. With two cables,
        # ends of different ones would wait for each other for ever.
        if (role == "connector") == (self.place.rank == 0):
            self.place = replace(self.place, interface=offer.interface)
        self._tunnels.append(Tunnel(sock, key, role, local, offer=offer.bits))

    async def agree(self) -> None:
        """Wait until the machines at the other ends of both tunnels have said what their links are. Raises
        PeerLost."""
        for tunnel in self._tunnels:
            if await asyncio.to_thread(tunnel.agreed, limits.TICKET_S) is None:
                raise PeerLost("The machine beside it did not say what their link is.")
        both = [tunnel.both or 0 for tunnel in self._tunnels]
        self.place = replace(self.place, backend=agreed(self.place.size, both))

    @property
    def carried(self) -> Carried:
        """How the ring's bytes leave and reach this machine; "" until that is agreed on."""
        match self.place.backend:
            case "jaccl":
                return "RDMA"
            case "nccl":
                return "NCCL"
        told = {tunnel.plain for tunnel in self._tunnels}
        if None in told or not told:
            return ""
        return "partly plain" if len(told) > 1 else "plain" if told.pop() else "sealed"

    def close(self) -> None:
        """Idempotent."""
        while self._tunnels:
            # Megabytes of buffers, which must not wait until the group that has had them is collected.
            self._tunnels.pop().close()
        self._port.close()
        self._mouth.close()
