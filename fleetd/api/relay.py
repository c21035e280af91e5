"""A stream of events from a source that may be silent for long and may fail: progress, pairing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from fleetd import limits
from fleetd.api import failures
from fleetd.api.context import REQUEST_ID, is_gone
from fleetd.api.sse import EventStream
from fleetd.errors import FleetError

_SILENCE = "keepalive 0/0"


async def relay(request: web.Request, frames: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send frames as they come, and what went wrong as the last one. A reader that leaves ends the source."""
    async with aclosing(frames):
        out = EventStream(request)
        await out.start(_SILENCE)
        try:
            await _pass_on(frames, out)
        except FleetError as exc:
            await out.fail(exc)
        except Exception as exc:  # the request's boundary, when its status is already out
            if isinstance(exc, ConnectionError) and is_gone(request):
                raise
            await out.fail(failures.unexpected(exc, request[REQUEST_ID]))
        else:
            await out.end()
    return out.response


async def _next(frames: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(frames, None)


async def _pass_on(frames: AsyncGenerator[bytes, None], out: EventStream) -> None:
    pending: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(frames))
            finished, _ = await asyncio.wait({pending}, timeout=limits.SSE_KEEPALIVE_S)
            if not finished:
                await out.comment(_SILENCE)
                continue
            frame, pending = pending.result(), None
            if frame is None:
                return
            await out.data(frame)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
