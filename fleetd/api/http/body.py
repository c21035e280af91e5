"""Bodies of requests and answers.

A request's body is read within bounds of size, silence and average speed, and decoded with errors that name
the field.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from fleetd import limits
from fleetd.api.http.allowed_values import allowed_words
from fleetd.errors import BadRequest, InvalidValue, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from fleetd.text.decoding import from_json

T = TypeVar("T")

_CODINGS = frozenset({"", "identity", "gzip", "deflate"})


async def expect(_request: web.Request) -> None:
    """Replaces aiohttp's handler, which says "100 Continue" before the token is checked."""


def unknown_coding(coding: str = "") -> UnsupportedMediaType:
    """What is said to a body compressed in a way that is not read here; "" where its name is not known."""
    return UnsupportedMediaType(
        f"The body's Content-Encoding{f' {coding[:64]!r}' if coding else ''} is not read here.",
        hint="Send it as it is, or with Content-Encoding: gzip or deflate.",
    )


def _check_coding(request: web.Request) -> None:
    """aiohttp passes codings that it does not know on unread. Raises UnsupportedMediaType."""
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "")
    if coding.strip().lower() not in _CODINGS:
        raise unknown_coding(coding)


async def read(request: web.Request) -> bytes:
    """The whole body.

    Raises:
        UnsupportedMediaType: it is compressed in a way that is not read here.
        PayloadTooLarge: by its Content-Length, before any of it is read, or when it turns out so.
        RequestTimeout: it stopped arriving, or arrives too slowly to ever be done.
        BadRequest: its encoding is broken.
    """
    _check_coding(request)
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


def json_answer(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A whole answer of JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers
    )


def parse(data: bytes, kind: type[T]) -> T:
    """JSON bytes → a value of ``kind``, with errors that name the field or the position.

    Half a character, which agents cut out of what a tool printed, is U+FFFD, as other servers read it: it
    stays in the conversation, and a refusal would end that for good.
    """
    try:
        return _decoded(data, kind)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(f"The body is not valid JSON: {_position(exc, data)}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return from_json(data, kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        whole = _ESCAPES.sub(_without_half, data)
        if whole == data:
            raise
        return from_json(whole, kind)


def _without_half(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape["half"] else escape[0]


def _position(exc: Exception, data: bytes) -> str:
    if isinstance(exc, UnicodeDecodeError):
        return f"invalid UTF-8 at byte {_broken_at(data)}"
    reason = str(exc).removeprefix("JSON is malformed: ")
    if "(byte" in reason:
        return reason.replace("(byte ", "at byte ").replace(")", "")
    if "truncated" in reason:
        return f"it ends early or has a broken escape, at {len(data)} bytes"
    return reason


def _broken_at(data: bytes) -> int:
    """Where bytes stop being UTF-8: the decoder's own error counts from the beginning of a string."""
    try:
        data.decode()
    except UnicodeDecodeError as exc:
        return exc.start
    return len(data)


# Each escape of JSON's; a "half" is a surrogate without the other one. A backslash occurs in texts alone.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$?\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")


def _invalid(text: str, kind: object) -> InvalidValue:
    """msgspec's sentence → ours: "Expected `int` >= 1 - at `$.n`" becomes "n: expected `int` >= 1."."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidValue(f"The field {param!r} is missing.", param=param)
    what = what[:1].lower() + what[1:]
    words = allowed_words(kind, path) if what.startswith("invalid ") else []
    return InvalidValue(
        f"{path}: {what}." if path else f"The body is invalid: {what}.",
        hint=f"Use {', '.join(words)}." if words else "",
        param=path or None,
    )
