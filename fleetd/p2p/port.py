"""The peer port: one listener, three kinds of visitors, told apart by their first bytes.

    0x16           a TLS hello: a session of a paired machine
    FLT1 + ticket  a sealed stream that a session agreed on
    FLP1           pairing, while a window is open
    anything else  closed unread

A visitor that has not shown which it is costs a socket and one short deadline, nothing more; how many of
these there may be is bounded, in all and per address. When there are too many the oldest one goes, not the
newest: a stranger who holds sockets open cannot keep members out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fleetd import limits
from fleetd.errors import ConfigError, PortInUse
from fleetd.host_port import host_port
from fleetd.observe import get_logger
from fleetd.p2p import tickets

log = get_logger("fleetd.p2p")

TLS_HELLO = b"\x16"
PAIRING = b"FLP1"
_MAGIC_BYTES = 4
_BACKLOG = 128
_EXHAUSTED_S = 0.5


@dataclass(frozen=True, slots=True)
class ConnectionHandlers:
    """What happens to each kind. A handler owns the socket that it is given, and closes it."""

    session: Callable[[socket.socket], Coroutine[Any, Any, None]]
    stream: Callable[[bytes, socket.socket], Coroutine[Any, Any, None]]
    pairing: Callable[[socket.socket], Coroutine[Any, Any, None]]


class PeerPort:
    """Listens on one address, or on every interface for the host ``*``."""

    def __init__(self, visitors: ConnectionHandlers) -> None:
        self._visitors = visitors
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
        try:
            async with asyncio.TaskGroup() as group:
                # Callbacks, not sock_accept: a task that is cancelled just then would lose what it accepted.
                for listener in self._listeners:
                    loop.add_reader(listener, self._accept, listener, group)
                await asyncio.Event().wait()
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening and drop whoever has not said what it wants."""
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
            # Out of descriptors or buffers; the visitor waits in the backlog.
            log.warning("peer_port.exhausted", error=str(error))
            loop.remove_reader(listener)
            loop.call_later(_EXHAUSTED_S, self._resume, listener, group)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._make_room(str(address[0]))
        task = group.create_task(self._sort(sock), name="peer visitor")
        self._unknown[task] = str(address[0])
        task.add_done_callback(partial(self._sorted, sock))

    def _resume(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, group)

    def _sorted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._unknown.pop(task, None)
        if task.cancelled():  # perhaps before it took a single step, so it closed nothing
            sock.close()

    def _make_room(self, address: str) -> None:
        """Oldest first, of the same address if that has too many, else of the address that has most."""
        held = list(self._unknown.items())
        same = [task for task, where in held if where == address]
        if len(same) >= limits.PEER_SOCKETS_PER_ADDRESS:
            self._drop(same[0])
        elif len(held) >= limits.PEER_SOCKETS_UNKNOWN:
            counts: dict[str, int] = {}
            for _, where in held:
                counts[where] = counts.get(where, 0) + 1
            greedy = max(counts, key=lambda where: counts[where])
            self._drop(next(task for task, where in held if where == greedy))

    def _drop(self, task: asyncio.Task[None]) -> None:
        self._unknown.pop(task, None)
        task.cancel()

    async def _sort(self, sock: socket.socket) -> None:
        """Find out what a visitor is and hand it over; from then on the socket is the handler's."""
        try:
            async with asyncio.timeout(limits.PEER_HANDSHAKE_S):
                handler = await self._handler(sock)
        except (TimeoutError, OSError):
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        try:
            await handler
        except Exception:  # the visitor's boundary: whatever it did, the next one is let in
            log.exception("peer_port.visitor")

    async def _handler(self, sock: socket.socket) -> Coroutine[Any, Any, None]:
        if await _peek(sock) == TLS_HELLO:
            # Still unknown: the handler returns when the handshake has told, one way or the other.
            return self._visitors.session(sock)
        magic = await _exactly(sock, _MAGIC_BYTES)
        if magic == tickets.PREFACE:
            return self._visitors.stream(await _exactly(sock, tickets.TICKET_BYTES), sock)
        if magic == PAIRING:
            # Takes as long as people take; the window that it needs bounds it.
            if (task := asyncio.current_task()) is not None:
                self._unknown.pop(task, None)
            return self._visitors.pairing(sock)
        raise ConnectionError


async def _peek(sock: socket.socket) -> bytes:
    """The first byte, left where it is: TLS wants to read it itself."""
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
    """Read ``count`` bytes and not one more: what follows belongs to somebody else."""
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
    # The contract is every interface; TLS from the first byte is what makes that safe.
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
            raise PortInUse(
                f"The peer port {where} is already in use by another program.",
                hint="Stop it, or choose another with --listen HOST:PORT (port 0 picks a free one).",
            ) from None
        raise ConfigError(
            f"fleetd cannot listen on {where}: {(error.strerror or str(error)).lower()}.",
            hint="Choose an address of this machine with --listen, or * for all of them.",
            param="fleet.listen",
        ) from None
    return sock
