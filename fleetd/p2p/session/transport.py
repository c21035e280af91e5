"""A session on a TLS connection: feeds it bytes and timers, and passes its events to the owner.

The session makes every decision. Each write is small (limits), because a ping cannot overtake bytes that the
transport already holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any, Protocol, cast

from fleetd import limits
from fleetd.errors import (
    Draining,
    FleetError,
    NotPaired,
    Overloaded,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
)
from fleetd.p2p.actions import Dial
from fleetd.p2p.discovery.unreachable import explain
from fleetd.p2p.session import events as sans_io
from fleetd.p2p.session import tls
from fleetd.p2p.session.frames import Hello
from fleetd.p2p.session.session import Session

# TLS requires a server name; this one does not show an observer which machine is dialled.
_SERVER_NAME = "fleetd"
# The clock for sessions. The loop's clock may stand still within a turn and count whole milliseconds, while a
# round trip on a LAN takes a fraction of one.
_clock = time.monotonic
# The precision of timers.
_LATE_S = 0.001


class Owner(Protocol):
    """Receives the events of a connection. No method may block or raise."""

    def opened(self, connection: PeerConnection) -> None: ...
    def requested(self, connection: PeerConnection, stream: PeerStream, method: str, body: bytes) -> None: ...
    def notified(self, connection: PeerConnection, topic: str, body: bytes) -> None: ...
    def quiet(self, connection: PeerConnection) -> None: ...
    def resumed(self, connection: PeerConnection) -> None: ...
    def measured(self, connection: PeerConnection, rtt_s: float) -> None: ...
    def closed(self, connection: PeerConnection, error: FleetError | None) -> None: ...


class PeerStream:
    """One request, from either end: messages in both directions until each side has ended.

    ``send`` does not wait: it raises Overloaded if the other side reads too slowly.
    """

    def __init__(self, connection: PeerConnection, number: int) -> None:
        self.connection = connection
        self.number = number
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._said_end = False
        # Raised as copies: its traceback would refer to frames that refer to this stream, and such a circle
        # keeps what was not read until the next full collection.
        self._error: FleetError | None = None
        self._waiter: asyncio.Future[None] | None = None
        #: Called once if the other side cancels or is lost.
        self.on_cancel: Callable[[], object] | None = None
        #: True while this side serves the request and has not consumed its body, which counts until then.
        self.holds_request = False

    async def receive(self) -> bytes | None:
        """The next message; None after the last. Raises the other side's error, or PeerLost."""
        self._release_request()
        while not self._inbox:
            if self._error is not None:
                raise copy.copy(self._error)
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        body = self._inbox.popleft()
        self.connection.consumed(self.number)
        return body

    def send(self, body: bytes) -> None:
        if self._error is not None:
            raise copy.copy(self._error)
        self.connection.send(self.number, body)

    async def drained(self) -> None:
        """Wait until at most one window of bytes is queued. Raises PeerLost."""
        await self.connection.drained(self.number)

    def end(self) -> None:
        """No more messages from here."""
        if self._error is None and not self._said_end:
            self._said_end = True
            self._release_request()
            self.connection.end(self.number)
            self._forget_if_over()

    def cancel(self, error: FleetError | None = None) -> None:
        """End both directions; the other side receives the reason."""
        if self._error is None and not (self._ended and self._said_end):
            self._error = error or PeerLost("The request was cancelled here.")
            self.connection.cancel(self.number, error)
        self._wake()

    # ---- called by the connection ------------------------------------------------------------------------

    def deliver(self, body: bytes) -> None:
        self._inbox.append(body)
        self._wake()

    def finish(self) -> None:
        self._ended = True
        self._forget_if_over()
        self._wake()

    def fail(self, error: FleetError) -> None:
        if self._error is None:
            self._error = error
            if self.on_cancel is not None:
                self.on_cancel()
                self.on_cancel = None
        self._wake()

    def _release_request(self) -> None:
        if self.holds_request:
            self.holds_request = False
            self.connection.consumed(self.number)

    def _forget_if_over(self) -> None:
        if self._ended and self._said_end:
            self.connection.forget(self.number)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PeerConnection(asyncio.Protocol):
    """One TLS connection and its session.

    Args:
        members: node ids that may be at the other end; checked when the handshake is done.
        number: the owner's handle.
        dialled: the dial of this side, or None; the machine that it expects must answer.
    """

    def __init__(
        self,
        owner: Owner,
        hello: Hello,
        members: Container[str],
        *,
        number: int = 0,
        dialled: Dial | None = None,
    ) -> None:
        self.number = number
        self.initiator = dialled is not None
        self.dialled = dialled
        self.address = dialled.address if dialled is not None else None
        self.node_id = ""
        self.hello: Hello | None = None
        self.is_closed = False
        self.rtt_s: float | None = None
        #: Done when the session is open or the connection has failed before.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Set when the socket is closed.
        self.gone = asyncio.Event()
        self._owner = owner
        self._hello = hello
        self._members = members
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._streams: dict[int, PeerStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._flushed: asyncio.Future[None] | None = None

    @property
    def clock_offset_s(self) -> float | None:
        """The other machine's monotonic clock less this one's, in seconds; None while it is not known."""
        return self._session.life.clock_offset_s if self._session is not None else None

    @property
    def peer_host(self) -> str:
        """The address of the other side's end of the connection, as it is dialled."""
        found = self._transport.get_extra_info("peername") if self._transport else None
        if not found:
            return ""
        host, scope = str(found[0]), found[3] if len(found) > 3 else 0
        if not scope or "%" in host:
            return host
        try:
            # A link-local address leads nowhere without its interface.
            return f"{host}%{socket.if_indextoname(scope)}"
        except OSError:  # the interface is gone
            return host

    @property
    def is_attached(self) -> bool:
        """True once there has been a transport; before that, the owner must forget a failed connection."""
        return self._transport is not None

    @property
    def busy(self) -> bool:
        """True while a request is open."""
        return bool(self._streams)

    # ---- asyncio's side ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not isinstance: uvloop's TLS transports are not derived from asyncio.Transport.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=limits.PEER_WRITE_BUFFER_BYTES)
        try:
            self.node_id = tls.pinned(transport.get_extra_info("ssl_object"), self._members)
            expected = self.dialled.expected if self.dialled is not None else ""
            if expected and self.node_id != expected:
                raise NotPaired(f"The machine {self.node_id[:7]} answers where {expected[:7]} should be.")
        except NotPaired as error:
            self._end(error)
            transport.abort()
            return
        self._session = Session(hello=self._hello, initiator=self.initiator, now=_clock())
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._session is None or self.is_closed:
            return
        self._handle(self._session.receive(data, _clock()))
        self._flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if self._timer is not None:
            self._timer.cancel()
        if self.is_closed:
            self._let_go()
            return
        if self.hello is None and self.initiator and (exc is None or isinstance(exc, ssl.SSLError)):
            # A TLS 1.3 client finishes the handshake before the server has checked its certificate.
            self._end(
                NotPaired(
                    "It refuses this machine's certificate.",
                    hint="It does not know this machine (any more): pair them again with fleetctl pair.",
                )
            )
        else:
            self._end(PeerLost(f"The connection broke: {exc or 'the other side closed it'}."))
        self._let_go()

    def _let_go(self) -> None:
        """Drop the session, with what was not read or not sent, and the timer that refers back to here."""
        self._session = self._timer = self._flushed = None

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    # ---- the owner's side --------------------------------------------------------------------------------

    def request(self, method: str, body: bytes) -> PeerStream:
        """Begin a request. Raises PeerLost or Overloaded."""
        number = self._alive().open(method, body)
        stream = self._streams[number] = PeerStream(self, number)
        self._flush()
        return stream

    def notify(self, topic: str, body: bytes) -> None:
        """Send a notification, if the connection is open and its queue has room."""
        if not self.is_closed and self._session is not None:
            with contextlib.suppress(PeerLost, Overloaded):
                self._session.notify(topic, body)
            self._flush()

    def send(self, number: int, body: bytes) -> None:
        self._alive().send(number, body)
        self._flush()

    def end(self, number: int) -> None:
        if not self.is_closed and self._session is not None:
            self._session.end(number)
            self._flush()

    def cancel(self, number: int, error: FleetError | None) -> None:
        if not self.is_closed and self._session is not None:
            self._streams.pop(number, None)
            self._session.cancel(number, error)
            self._flush()

    def consumed(self, number: int) -> None:
        if not self.is_closed and self._session is not None:
            self._session.consumed(number)
            self._flush()

    async def drained(self, number: int) -> None:
        """Wait until no more than one window of a stream's bytes waits to be sent. Raises PeerLost."""
        while self._alive().queued(number) > limits.STREAM_WINDOW_BYTES:
            if self._flushed is None or self._flushed.done():
                self._flushed = self._loop.create_future()
            await asyncio.shield(self._flushed)

    def close(self, error: FleetError | None = None) -> None:
        """Send the frames that can leave now, then the error or a good-bye, and close."""
        if self.is_closed or self._session is None or self._transport is None:
            return
        self._flush()
        self._session.close(error)
        self._flush()
        self._end(error, error or Draining("This machine stops."))
        self._transport.close()

    def abort(self, error: FleetError) -> None:
        """Close at once, without a last frame; also when ``close`` has taken too long."""
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Close at once what nobody waits for any more, however far its handshake is."""
        # A transport that is cancelled as its handshake ends says good-bye for seconds. If its socket were
        # closed meanwhile, asyncio would keep the number, and never read the next socket that has it.
        self.abort(PeerLost("Nobody waits for this connection any more."))

    # ---- inside ------------------------------------------------------------------------------------------

    def _alive(self) -> Session:
        if self.is_closed or self._session is None:
            raise PeerLost("The connection to this machine is closed.")
        return self._session

    def _handle(self, events: list[sans_io.Event]) -> None:
        for event in events:
            match event:
                case sans_io.MessageReceived(number, body):
                    if (stream := self._streams.get(number)) is not None:
                        stream.deliver(body)
                case sans_io.Ended(number):
                    if (stream := self._streams.get(number)) is not None:
                        stream.finish()
                case sans_io.Cancelled(number, error):
                    if (stream := self._streams.pop(number, None)) is not None:
                        stream.fail(error)
                case sans_io.Requested(number, method, body):
                    stream = self._streams[number] = PeerStream(self, number)
                    # The bodies of many requests count against the same bound as the messages of one.
                    stream.holds_request = True
                    self._owner.requested(self, stream, method, body)
                case sans_io.Notified(topic, body):
                    self._owner.notified(self, topic, body)
                case sans_io.Measured(rtt_s):
                    self.rtt_s = rtt_s
                    self._owner.measured(self, rtt_s)
                case sans_io.Quiet():
                    self._owner.quiet(self)
                case sans_io.Resumed():
                    self._owner.resumed(self)
                case sans_io.Opened(hello, _):
                    self._open(hello)
                case sans_io.Closed(error):
                    self._flush()
                    self._end(error)
                    if self._transport is not None:
                        self._transport.close()
            if self.is_closed:
                return

    def _open(self, hello: Hello) -> None:
        if hello.node_id != self.node_id:
            self.abort(ProtocolError(f"{self.node_id[:7]} calls itself {hello.node_id[:7]}."))
            return
        self.hello = hello
        if not self.ready.done():
            self.ready.set_result(None)
        self._owner.opened(self)

    def forget(self, number: int) -> None:
        """Remove a stream whose two directions have ended."""
        self._streams.pop(number, None)

    def _flush(self) -> None:
        session, transport = self._session, self._transport
        if session is None or transport is None:
            return
        while not self._paused and not transport.is_closing():
            data = session.data_to_send(limits.PEER_WRITE_BUFFER_BYTES)
            if not data:
                break
            transport.write(data)
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
        self._arm()

    def _arm(self) -> None:
        """Set the timer. It only moves to an earlier time: most deadlines move on before it fires."""
        if self.is_closed or self._session is None:
            return
        due = self._session.next_deadline()
        if due is None or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        # A little late: a timer that fires early would fire several times.
        self._timer = self._loop.call_later(max(0.0, due - _clock()) + _LATE_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._session is not None and not self.is_closed:
            self._handle(self._session.tick(_clock()))
            self._flush()

    def _end(self, error: FleetError | None, lost: FleetError | None = None) -> None:
        """Report the end to every waiter, once; open requests fail with ``lost``, or with ``error``."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(error or PeerLost("The connection was closed."))
            self.ready.exception()  # marks it as retrieved, for a connection without a waiter
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
        lost = lost or error or PeerLost("The other machine said good-bye.")
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(lost)
        self._owner.closed(self, error)


async def accept(connection: PeerConnection, sock: socket.socket, context: ssl.SSLContext) -> None:
    """Accept TLS on a socket; returns when the handshake is over. A failed handshake raises no error."""
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_accepted_socket(
            lambda: connection,
            sock,
            ssl=context,
            ssl_handshake_timeout=limits.PEER_HANDSHAKE_S,
            ssl_shutdown_timeout=limits.PEER_SHUTDOWN_S,
        )
    except (OSError, ssl.SSLError, TimeoutError):
        sock.close()
    except asyncio.CancelledError:
        connection.give_up()
        raise


async def connect(connection: PeerConnection, address: tuple[str, int], context: ssl.SSLContext) -> None:
    """Dial, shake hands and wait for the other side's hello.

    Raises:
        PeerUnreachable: no TCP connection; the OSError is its cause.
        NotPaired, ProtocolError, VersionMismatch, PeerLost: the connection failed before it was open.
    """
    loop = asyncio.get_running_loop()
    sock = await open_socket(address)
    try:
        await loop.create_connection(
            lambda: connection,
            sock=sock,
            ssl=context,
            server_hostname=_SERVER_NAME,
            ssl_handshake_timeout=limits.PEER_HANDSHAKE_S,
            ssl_shutdown_timeout=limits.PEER_SHUTDOWN_S,
        )
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise NotPaired(
            "Another machine answers there than any that is paired with this one.",
            hint="Pair it with fleetctl pair, or correct the address.",
        ) from error
    except (OSError, TimeoutError) as error:
        sock.close()
        raise PeerUnreachable(f"The TLS handshake failed: {error or 'no answer in time'}.") from error
    except asyncio.CancelledError:
        connection.give_up()
        raise
    try:
        await asyncio.shield(connection.ready)
    except asyncio.CancelledError:
        # Two sessions that open at the same time cancel each other's dial; the mesh decides which one stays.
        if not connection.ready.done():
            connection.give_up()
        raise


async def open_socket(address: tuple[str, int]) -> socket.socket:
    """A connected TCP socket, without delay, to the first of a host's addresses that answers.

    Raises PeerUnreachable, with the OSError of the last address as its cause.
    """
    host, port = address
    failed: Exception = TimeoutError()
    try:
        async with asyncio.timeout(limits.PEER_CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, target in found:
                try:
                    # One that swallows calls leaves time for the others.
                    async with asyncio.timeout(limits.PEER_CONNECT_S / len(found)):
                        return await _connected(socket.socket(family, kind, protocol), target)
                except OSError as error:  # a timeout is one
                    failed = error
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        failed = error
    message, hint = explain(failed, host, port, sys.platform)
    raise PeerUnreachable(message, hint=hint) from failed


async def _connected(sock: socket.socket, target: Any) -> socket.socket:
    try:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock
