"""The peer port: one listener for three kinds of connections, which their first bytes distinguish.

    0x16           a TLS hello: a session of a paired machine
    FLT1 + ticket  a sealed stream that a session agreed on
    FLP1           pairing, while a window is open
    anything else  closed unread

A connection that has not sent its first bytes costs a socket and one short deadline. The number of these is
bounded, in total and per address; above the bound the oldest one is closed, not the newest, so a stranger who
holds sockets open cannot keep members out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from fleetd import limits
from fleetd.errors import ConfigError, PortInUse
from fleetd.p2p import tickets
from fleetd.p2p.giving_way import gives_way
from fleetd.process.busy_port import port_in_use
from fleetd.process.observe import get_logger
from fleetd.text.host_port import host_port

log = get_logger("fleetd.p2p")

TLS_HELLO = b"\x16"
PAIRING = b"FLP1"
_MAGIC_BYTES = 4
_BACKLOG = 128
_EXHAUSTED_S = 0.5


class ConnectionHandlers(msgspec.Struct, frozen=True):
    """The handler of each kind. A handler owns its socket and closes it."""

    session: Callable[[socket.socket], Coroutine[Any, Any, None]]
    stream: Callable[[bytes, socket.socket], Coroutine[Any, Any, None]]
    pairing: Callable[[socket.socket], Coroutine[Any, Any, None]]


class PeerPort:
    """Listens on one address, or on every interface for the host ``*``.

    Args:
        most_unknown: connections at once that have not shown what they are.
    """

    def __init__(self, handlers: ConnectionHandlers, most_unknown: int) -> None:
        self._handlers = handlers
        self._most_unknown = most_unknown
        self._listeners: list[socket.socket] = []
        self._unknown: dict[asyncio.Task[None], str] = {}
        self.port = 0

    def open(self, host: str, port: int) -> int:
        """Bind; returns the port, which is a free one if ``port`` is 0. Raises PortInUse or ConfigError."""
        if host == "*":
            self._listeners = _everywhere(port)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            address = "127.0.0.1" if host == "localhost" else host
            self._listeners = [_bind(family, address, port)]
        self.port = int(self._listeners[0].getsockname()[1])
        return self.port

    async def serve(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            try:
                # Callbacks, not sock_accept: a task that is cancelled just then would lose what it accepted.
                for listener in self._listeners:
                    loop.add_reader(listener, self._accept, listener, group)
                await asyncio.Event().wait()
            finally:
                # Here: a group that waits for its last tasks takes no others.
                self.close()

    def close(self) -> None:
        """Stop listening and close the connections whose kind is still unknown."""
        for listener in self._listeners:
            with contextlib.suppress(RuntimeError, ValueError):  # the loop is gone
                asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners = []
        for task in list(self._unknown):
            task.cancel()

    def _accept(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors or buffers; the connection waits in the backlog.
            log.warning("peer_port.exhausted", error=str(error))
            loop.remove_reader(listener)
            loop.call_later(_EXHAUSTED_S, self._resume, listener, group)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._make_room(str(address[0]))
        task = group.create_task(self._sort(sock), name="peer connection")
        self._unknown[task] = str(address[0])
        task.add_done_callback(partial(self._sorted, sock))

    def _resume(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, group)

    def _sorted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._unknown.pop(task, None)
        if task.cancelled():  # possibly before its first step, so it has not closed the socket
            sock.close()

    def _make_room(self, address: str) -> None:
        """Above a bound, close the oldest unknown connection of this address, or of the most frequent."""
        per_address = limits.PEER_SOCKETS_PER_ADDRESS
        task = gives_way(self._unknown, address, per_address=per_address, most=self._most_unknown)
        if task is not None:
            del self._unknown[task]
            task.cancel()

    async def _sort(self, sock: socket.socket) -> None:
        """Read the kind of a connection and call its handler, which then owns the socket."""
        try:
            async with asyncio.timeout(limits.PEER_HANDSHAKE_S):
                handler = await self._handler(sock)
        except (TimeoutError, OSError):
            sock.close()
            return
        except Exception:  # such as no descriptor for the loop to watch it with
            sock.close()
            log.exception("peer_port.connection")
            return
        except BaseException:
            sock.close()
            raise
        try:
            await handler
        except Exception:  # the connection's boundary: no error may stop the port
            log.exception("peer_port.connection")

    async def _handler(self, sock: socket.socket) -> Coroutine[Any, Any, None]:
        if await _peek(sock) == TLS_HELLO:
            # Counts as unknown until the handler returns, at the end of the handshake.
            return self._handlers.session(sock)
        magic = await _exactly(sock, _MAGIC_BYTES)
        if magic == tickets.PREFACE:
            return self._handlers.stream(await _exactly(sock, tickets.TICKET_BYTES), sock)
        if magic == PAIRING:
            # Waits for people; the pairing window bounds it.
            if (task := asyncio.current_task()) is not None:
                self._unknown.pop(task, None)
            return self._handlers.pairing(sock)
        raise ConnectionError


async def _peek(sock: socket.socket) -> bytes:
    """The first byte, left in the socket: TLS reads it again."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def ready() -> None:
        loop.remove_reader(sock)
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, ready)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes: the handler reads those that follow."""
    loop = asyncio.get_running_loop()
    found = b""
    while len(found) < count:
        piece = await loop.sock_recv(sock, count - len(found))
        if not piece:
            raise ConnectionError
        found += piece
    return found


def _everywhere(port: int) -> list[socket.socket]:
    """IPv4 and IPv6 on the same port; a machine without IPv6 has one listener."""
    # The setting asks for every interface; TLS from the first byte makes that safe.
    found = [_bind(socket.AF_INET, "0.0.0.0", port)]  # noqa: S104
    with contextlib.suppress(ConfigError, PortInUse):
        found.append(_bind(socket.AF_INET6, "::", int(found[0].getsockname()[1])))
    return found


def _bind(family: int, host: str, port: int) -> socket.socket:
    where = host_port(host, port)
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"fleetd cannot listen on {where}: {error.strerror}.", param="fleet.listen"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise port_in_use("The peer port", "fleet.listen", host, port) from None
        raise ConfigError(
            f"fleetd cannot listen on {where}: {(error.strerror or str(error)).lower()}.",
            hint="Choose an address of this machine with --listen, or * for all of them.",
            param="fleet.listen",
        ) from None
    return sock
