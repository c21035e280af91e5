"""Reads a request's body within its bounds: size, silence, and average speed."""

from __future__ import annotations

import asyncio
import time

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from fleetd import limits
from fleetd.errors import BadRequest, PayloadTooLarge, RequestTimeout


async def expect(_request: web.Request) -> None:
    """Replaces aiohttp's handler, which says "100 Continue" before anybody has looked at the token."""


async def read(request: web.Request) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLarge: by its Content-Length, before any of it is read, or when it turns out so.
        RequestTimeout: it stopped arriving, or arrives too slowly to ever be done.
        BadRequest: its encoding is broken.
    """
    _check_size(request.content_length or 0)
    await _continue(request)
    body = bytearray()
    started = time.monotonic()
    try:
        while True:
            earned_s = limits.HTTP_BODY_STALL_S + len(body) / limits.HTTP_BODY_BYTES_PER_S
            left_s = min(limits.HTTP_BODY_STALL_S, started + earned_s - time.monotonic())
            async with asyncio.timeout(max(0.0, left_s)):
                piece = await request.content.readany()
            if not piece:
                return bytes(body)
            body += piece
            _check_size(len(body))
    except TimeoutError:
        raise RequestTimeout(
            f"The body stopped arriving after {len(body)} bytes.", hint="Send it without pauses."
        ) from None
    except web.RequestPayloadError as exc:
        raise BadRequest("The body does not match its Content-Encoding or Transfer-Encoding.") from exc


def _check_size(size_bytes: int) -> None:
    if size_bytes > limits.HTTP_BODY_BYTES:
        raise PayloadTooLarge(
            f"The body is over the limit of {limits.HTTP_BODY_BYTES} bytes.", hint="Send a shorter prompt."
        )


async def _continue(request: web.Request) -> None:
    waits = request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
