"""Streams objects from a source that may be silent for long and may fail: downloads, pairing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from fleetd import limits
from fleetd.api.http.http_stream import HttpStream
from fleetd.requests.concurrency import with_heartbeats

_SILENCE = "keepalive 0/0"


async def relay(request: web.Request, items: AsyncGenerator[object, None]) -> web.StreamResponse:
    """Send objects as they come, and an error as the last frame. A client that leaves closes the source."""
    async with aclosing(items):
        out = HttpStream(request)
        await out.start(_SILENCE)
        return await out.finish(_send_all(items, out))


async def _send_all(items: AsyncGenerator[object, None], out: HttpStream) -> None:
    async with aclosing(with_heartbeats(items, limits.SSE_KEEPALIVE_S)) as beats:
        async for item in beats:
            await (out.comment(_SILENCE) if item is None else out.send(item))
