"""Server-sent events: one writer that knows the framing, the deadlines and how a stream may end.

A stream ends in one of two ways, and a reader can tell them apart:
    done()   ``data: [DONE]``
    fail()   ``data: {"error": ...}``, no ``[DONE]``, and the connection closes
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from aiohttp import web

from fleetd import limits
from fleetd.api import failures
from fleetd.errors import FleetError


class EventStream:
    """Args:
    request: the request to answer; headers go out with ``start``.
    headers: added to the stream's own.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str] | None = None) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **(headers or {}),
            }
        )

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def start(self, comment: str) -> None:
        """Send the headers and a first comment: proxies hold headers back until a body begins."""
        await self._response.prepare(self._request)
        await self.comment(comment)

    async def comment(self, text: str) -> None:
        await self._write(b": %b\n\n" % text.encode())

    async def data(self, payload: bytes) -> None:
        """One frame. ``payload`` is JSON, which has no raw newlines."""
        await self._write(b"data: %b\n\n" % payload)

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self.end()

    async def fail(self, error: FleetError) -> None:
        self._response.force_close()
        await self.data(failures.encode(error))
        await self.end()

    async def end(self) -> None:
        """End without a marker, for streams whose last frame says that it is the last."""
        await self._bounded(self._response.write_eof())

    async def _write(self, data: bytes) -> None:
        await self._bounded(self._response.write(data))

    async def _bounded(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(limits.HTTP_WRITE_STALL_S):
                await writing
        except TimeoutError:
            # The reader takes nothing. What is buffered for it would otherwise keep the socket open.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the reader stopped reading") from None
