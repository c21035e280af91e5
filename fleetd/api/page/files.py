"""The page's files, by an allow-list: they travel in the package, and nothing else in it is served."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from types import MappingProxyType

import msgspec
from aiohttp import hdrs, web

from fleetd.api import health

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
#: Name → content type.
SERVED = MappingProxyType(
    {
        INDEX: "text/html; charset=utf-8",
        "icon.svg": "image/svg+xml",
        **dict.fromkeys(("base.css", "views.css"), _STYLE),
        **dict.fromkeys(
            (
                "app.js",
                "calls.js",
                "chat.js",
                "clients.js",
                "clipboard.js",
                "dom.js",
                "fleet.js",
                "gain.js",
                "history.js",
                "images.js",
                "kept.js",
                "keys.js",
                "listing.js",
                "login.js",
                "markdown.js",
                "models.js",
                "pace.js",
                "pairing.js",
                "picture.js",
                "preview.js",
                "request_list.js",
                "request_detail.js",
                "requests.js",
                "settings.js",
                "store.js",
                "units.js",
                "waterfall.js",
                "whatif.js",
            ),
            _SCRIPT,
        ),
    }
)
PREFIX = "/page/"

# Nothing from elsewhere, nothing inline, no frame around it, no text that becomes markup.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        # With the ETag: asked each time, sent once.
        hdrs.CACHE_CONTROL: "no-cache",
        hdrs.VARY: hdrs.ACCEPT,
    }
)


class PageFile(msgspec.Struct, frozen=True):
    body: bytes
    content_type: str
    etag: str


@cache
def load(name: str) -> PageFile:
    """A file of the list. It cannot change while the daemon runs."""
    body = (FOLDER / name).read_bytes()
    return PageFile(body, SERVED[name], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


async def front(request: web.Request) -> web.StreamResponse:
    """The page for browsers; for programs, which probe this address, that the process runs."""
    if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
        return _answer(request, INDEX)
    return await health.live(request)


async def serve(request: web.Request) -> web.StreamResponse:
    return _answer(request, request.path.removeprefix(PREFIX).rstrip("/"))


def _answer(request: web.Request, name: str) -> web.Response:
    file = load(name)
    headers = {**_HEADERS, hdrs.ETAG: file.etag}
    if file.etag in request.headers.get(hdrs.IF_NONE_MATCH, ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers={**headers, hdrs.CONTENT_TYPE: file.content_type})
