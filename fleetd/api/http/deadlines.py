"""Bounds per connection, which aiohttp leaves to the application: deadlines, and caps on their number.

    connected ─ headers within HTTP_HEADERS_S ─▶ request ─ done ─▶ idle ─ HTTP_KEEPALIVE_IDLE_S ─▶ closed
                                                    ▲               │
                                                    └── first byte, then headers within HTTP_HEADERS_S

When too many sockets are open, the oldest that never sent a token is closed first, then the oldest idle one.
So a flood of silent sockets evicts only itself. A client that opens many at once has a moment to send its
token: Open WebUI asks for the vectors of all pieces of a document at once, with a connection for each.
Deadlines for the body are in body.py, where it is read.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, cast

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong

from fleetd import limits
from fleetd.api.http import failures
from fleetd.api.http.body import unknown_coding
from fleetd.api.http.context import DIALECTS
from fleetd.api.http.dialect import Dialect
from fleetd.errors import BadRequest, FleetError, HeadersTooLarge
from fleetd.process.descriptors import UNSCALED, ConnectionCaps

log = logging.getLogger(__name__)

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
)
# How long the rest of a refused body is thrown away so that the refusal can be read before the reset.
_LINGER_S = 1.0


class Connections:
    """All open connections of one site, oldest first."""

    def __init__(self, caps: ConnectionCaps) -> None:
        self._open: dict[BoundedConnection, None] = {}
        self._caps = caps

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, new: BoundedConnection, now_s: float) -> bool:
        """Make room for a new connection; False if every open one is busy. ``now_s``: by the loop's clock."""
        unknown = [each for each in self._open if not each.known]
        if not new.known:
            late = now_s - limits.HTTP_TOKEN_S
            for each in unknown[: max(0, len(unknown) + 1 - self._caps.http_unknown)]:
                if each.since_s <= late:
                    self._evict(each)
        if len(self._open) >= min(self._caps.http, limits.HTTP_CONNECTIONS):
            idle = [each for each in self._open if not each.busy]
            if not idle:
                return False
            self._evict(min(idle, key=lambda each: each.known))
        self._open[new] = None
        return True

    def forget(self, gone: BoundedConnection) -> None:
        self._open.pop(gone, None)

    def _evict(self, victim: BoundedConnection) -> None:
        self.forget(victim)
        victim.abort()


class BoundedConnection(web.RequestHandler):
    """aiohttp's connection with a deadline for headers.

    ``busy``: a request is being served. ``known``: its client has been let in.
    """

    def __init__(self, manager: BoundedServer, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self.trusted = manager.trusted
        self.needs_token = manager.needs_token
        self.known = manager.trusted
        self.busy = False
        # When it was opened, by the loop's clock.
        self.since_s = 0.0
        self._connections = manager.tracked
        self._dialect = manager.dialect
        self._deadline: asyncio.TimerHandle | None = None

    def authenticated(self) -> None:
        self.known = True

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # ---- Called by the server around each request ----

    def request_started(self) -> None:
        self.busy = True
        self._disarm()

    def request_finished(self) -> None:
        self.busy = False

    # ---- Called by the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.since_s = asyncio.get_running_loop().time()
        if not self._connections.admit(self, self.since_s):
            error = FleetError("Too many connections are open.", hint="Close some, or retry.")
            body = msgspec.json.encode(self._dialect.error(error))
            if self.transport is not None:
                self.transport.write(_BUSY % (len(body), body))
            self.force_close()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        if data and not self.busy and self._deadline is None:
            self._arm()
        super().data_received(data)

    def eof_received(self) -> None:
        # A client that closes its half during a request has left; draining its buffers would hold its slot.
        if self.busy:
            self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        self._connections.forget(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP. The parser's message quotes them, so it is not passed on."""
        log.debug("http.bad_request type=%s", type(exc).__name__)
        error: FleetError
        if isinstance(exc, ContentEncodingError):  # it has no decoder, for brotli
            error = unknown_coding()
        elif isinstance(exc, LineTooLong):
            error = HeadersTooLarge(
                f"The address or a header is over the limit of {limits.HTTP_HEADER_BYTES} bytes.",
                hint="Send it in the body; in a browser, delete the cookies of this host.",
            )
        elif status < HTTPStatus.INTERNAL_SERVER_ERROR:
            error = BadRequest("The request is not valid HTTP.")
        else:
            error = FleetError("Internal error.")
        answer = failures.response(error, self._dialect)
        answer.headers[hdrs.SERVER] = "fleetd"
        answer.force_close()
        return answer

    def _arm(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(limits.HTTP_HEADERS_S, self.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class BoundedServer(web.Server):
    """aiohttp's server, making bounded connections."""

    def __init__(
        self,
        inner: web.Server,
        *,
        trusted: bool,
        needs_token: bool,
        dialect: Dialect,
        caps: ConnectionCaps,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            self._serve, request_factory=inner.request_factory, handler_cancellation=True, **kwargs
        )
        self._inner = inner.request_handler
        self._options = kwargs
        self.trusted = trusted
        self.needs_token = needs_token
        # For answers to bytes that are not a request, and so have no route.
        self.dialect = dialect
        self.tracked = Connections(caps)

    def __call__(self) -> BoundedConnection:
        return BoundedConnection(self, loop=asyncio.get_running_loop(), **self._options)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        protocol = cast("BoundedConnection", request.protocol)
        protocol.request_started()
        try:
            return await self._inner(request)
        finally:
            protocol.request_finished()


class BoundedRunner(web.AppRunner):
    """Serves one site: ``trusted`` for the Unix socket, not for TCP. One application may have several.

    Without ``needs_token`` clients on TCP pass all checks but that of the token.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        trusted: bool,
        needs_token: bool = True,
        caps: ConnectionCaps = UNSCALED,
    ) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=limits.ENGINE_STOP_S)
        self._trusted = trusted
        self._needs_token = needs_token
        self._caps = caps

    async def _make_server(self) -> web.Server:
        return BoundedServer(
            await super()._make_server(),
            trusted=self._trusted,
            needs_token=self._needs_token,
            dialect=self.app[DIALECTS][0],
            caps=self._caps,
            access_log=None,
            keepalive_timeout=limits.HTTP_KEEPALIVE_IDLE_S,
            lingering_time=_LINGER_S,
            max_line_size=limits.HTTP_HEADER_BYTES,
            max_field_size=limits.HTTP_HEADER_BYTES,
        )


def connection(request: web.BaseRequest) -> BoundedConnection | None:
    """None on a server of another runner than ``BoundedRunner``; its requests are not trusted."""
    return request.protocol if isinstance(request.protocol, BoundedConnection) else None


def is_trusted(request: web.BaseRequest) -> bool:
    """True on the Unix socket, whose permissions and peer check stand in for the token."""
    made = connection(request)
    return made is not None and made.trusted


def needs_token(request: web.BaseRequest) -> bool:
    """False on a site where clients on TCP need none."""
    made = connection(request)
    return made is None or made.needs_token
