"""Sealed streams between daemons: agreed on over a session, opened at the peer port, passed on as sockets.

    here    expect() → ticket and key, sent to the other side over the session
    there   connect(address, ticket) → a socket
    here    the port passes the connection with that ticket to its expectation → a socket

``sealed`` defines the bytes on the sockets; often another process reads and writes them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from fleetd import limits
from fleetd.errors import PeerLost, PeerUnreachable
from fleetd.p2p import tickets
from fleetd.p2p.session import transport
from fleetd.p2p.tickets import Tickets


class Expected:
    """A connection that was agreed on. ``key`` seals both directions of its stream."""

    def __init__(self, ticket: bytes, key: bytes, arrival: asyncio.Future[socket.socket]) -> None:
        self.ticket = ticket
        self.key = key
        self.taken = False
        self._arrival = arrival

    async def socket(self) -> socket.socket:
        """The socket of the connection, non-blocking. Raises PeerLost if it does not arrive in time."""
        try:
            async with asyncio.timeout(limits.TICKET_S):
                sock = await self._arrival
        except TimeoutError:
            raise PeerLost(f"No stream was opened within {limits.TICKET_S:.0f} s.") from None
        self.taken = True
        return sock


class Bulk:
    """The connections that one daemon expects."""

    def __init__(self) -> None:
        self._tickets = Tickets[asyncio.Future[socket.socket]]()

    @contextmanager
    def expect(self) -> Iterator[Expected]:
        """Expect one connection while the context lasts. Raises Overloaded."""
        loop = asyncio.get_running_loop()
        arrival: asyncio.Future[socket.socket] = loop.create_future()
        expected = Expected(*self._tickets.issue(arrival, loop.time(), os.urandom), arrival)
        try:
            yield expected
        finally:
            self._tickets.take(expected.ticket, loop.time())
            if not arrival.done():
                arrival.cancel()
            elif not expected.taken and not arrival.cancelled():
                arrival.result().close()

    async def on_connection(self, ticket: bytes, sock: socket.socket) -> None:
        """Give a connection that showed a ticket at the peer port to the expectation; close it if none."""
        arrival = self._tickets.take(ticket, asyncio.get_running_loop().time())
        if arrival is None or arrival.done():
            sock.close()
        else:
            arrival.set_result(sock)


async def connect(address: tuple[str, int], ticket: bytes) -> socket.socket:
    """Open a connection that the other side expects; a non-blocking socket. Raises PeerUnreachable."""
    sock = await transport.open_socket(address)
    try:
        await asyncio.get_running_loop().sock_sendall(sock, tickets.preface(ticket))
    except OSError as error:
        sock.close()
        raise PeerUnreachable(f"The connection was closed at once ({error.strerror or error}).") from error
    except BaseException:
        sock.close()
        raise
    return sock
