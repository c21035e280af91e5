"""Sealed streams to other machines: opening them, and how fast one will be."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractContextManager

from fleetd.errors import FleetError, NotFound
from fleetd.p2p import bulk_connections
from fleetd.p2p.bulk_connections import Expected
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.links import PeerPath
from fleetd.p2p.node import Node


class BulkDialer:
    def __init__(self, node: Node) -> None:
        self._node = node

    def expect(self) -> AbstractContextManager[Expected]:
        """Accept one connection with a ticket, while the context lasts. Raises Overloaded."""
        return self._node.bulk.expect()

    async def connect(self, node_id: str, invited: Invitation) -> socket.socket:
        """Connect to a member that expects this machine: over its best path for bulk data, else over others.

        Raises PeerUnreachable, or NotFound if no address is known.
        """
        error: FleetError | None = None
        for address in self._node.bulk_addresses(node_id):
            try:
                return await bulk_connections.connect(address, invited.ticket)
            except FleetError as failed:
                error = failed
        raise error or NotFound(f"No address of {self._node.name_of(node_id)} is known.")

    def best(self, node_id: str) -> PeerPath | None:
        """The path that a stream would take; None if none works."""
        peer = self._node.mesh.peers.get(node_id)
        address = peer.paths.best_for_bulk() if peer is not None else None
        return peer.paths.get(address) if peer is not None and address is not None else None

    def carried(self, node_id: str, count: int, seconds: float, *, late: bool = False) -> None:
        """Bytes that came over the best path. The time may hold waiting, so they show only the least speed.

        Args:
            late: by the path's figures they should have come clearly sooner: it is measured again.
        """
        if (path := self.best(node_id)) is not None:
            path.carried(count, seconds, asyncio.get_running_loop().time())
            if late:
                path.speeds.doubt()


def invitation(expected: Expected) -> Invitation:
    return Invitation(expected.ticket, expected.key)
