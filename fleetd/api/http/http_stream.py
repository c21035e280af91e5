"""Sends an answer in frames: the headers, the write deadline, and how a stream may end.

A stream ends in one of two ways, and a client can tell them apart:
    complete   the end marker of the dialect
    failed     the error as the last frame, no end marker, and the connection closes
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from fleetd import limits
from fleetd.api.http import failures
from fleetd.api.http.context import REQUEST_ID, dialect_of, is_gone
from fleetd.errors import FleetError


class HttpStream:
    """Args:
    request: the request to answer, in the dialect of its route.
    headers: added to the stream's own.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str] | None = None) -> None:
        self._request = request
        self._format = dialect_of(request).stream()
        self._response = web.StreamResponse(
            headers={
                "Content-Type": self._format.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **(headers or {}),
            }
        )

    async def start(self, comment: str) -> None:
        """Send the headers and a first comment: proxies hold headers back until a body begins."""
        await self._response.prepare(self._request)
        await self.comment(comment)

    async def comment(self, text: str) -> None:
        """Send a comment, which clients skip; nothing in a format without comments."""
        await self._write(self._format.comment(text))

    async def send(self, item: object) -> None:
        """Send one frame."""
        await self._write(self._format.frame(item))

    async def finish(
        self, sending: Awaitable[None], failure: Callable[[FleetError], object | None] = lambda error: None
    ) -> web.StreamResponse:
        """Await ``sending``, which sends the frames, then end the stream: complete, or with its error.

        ``failure`` makes the last object of a stream that failed; None is the dialect's own.

        Raises:
            ConnectionError: the client has left.
        """
        try:
            await sending
        except FleetError as exc:
            await self._fail(exc, failure)
        except Exception as exc:  # the request's boundary, when its status is already out
            if isinstance(exc, ConnectionError) and is_gone(self._request):
                raise
            await self._fail(failures.unexpected(exc, self._request[REQUEST_ID]), failure)
        else:
            await self._write(self._format.end())
            await self._bounded(self._response.write_eof())
        return self._response

    async def _fail(self, error: FleetError, failure: Callable[[FleetError], object | None]) -> None:
        self._response.force_close()
        item = failure(error)
        await self._write(self._format.error(error) if item is None else self._format.frame(item))
        await self._bounded(self._response.write_eof())

    async def _write(self, data: bytes) -> None:
        if data:
            await self._bounded(self._response.write(data))

    async def _bounded(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(limits.HTTP_WRITE_STALL_S):
                await writing
        except TimeoutError:
            # The client takes nothing. What is buffered for it would otherwise keep the socket open.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None
