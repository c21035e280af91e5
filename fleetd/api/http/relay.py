"""Streams objects from a source that may be silent for long and may fail: downloads, pairing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from fleetd import limits
from fleetd.api.http.http_stream import HttpStream

_SILENCE = "keepalive 0/0"


async def relay(request: web.Request, items: AsyncGenerator[object, None]) -> web.StreamResponse:
    """Send objects as they come, and an error as the last frame. A client that leaves closes the source."""
    async with aclosing(items):
        out = HttpStream(request)
        await out.start(_SILENCE)
        return await out.finish(_send_all(items, out))


async def _next(items: AsyncGenerator[object, None]) -> object | None:
    return await anext(items, None)


async def _send_all(items: AsyncGenerator[object, None], out: HttpStream) -> None:
    pending: asyncio.Task[object | None] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(items))
            finished, _ = await asyncio.wait({pending}, timeout=limits.SSE_KEEPALIVE_S)
            if not finished:
                await out.comment(_SILENCE)
                continue
            item, pending = pending.result(), None
            if item is None:
                return
            await out.send(item)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
