"""Authentication, from the connection and the headers alone: no byte of the body is read before it.

    Unix socket   the peer has to run as our own user (or root)
    TCP           own Host → no foreign Origin → not cross-site → token, or session of the page → JSON
    TCP, as Ollama's clients expect it (setting http.ollama_listen)
                  the same without the token; what changes the disk still needs it

Host comes first because a rebound DNS name makes a foreign page same-origin; Origin and Sec-Fetch-Site stop
the pages that are not. The token would stop all of them; these checks hold when a user turns it off.
"""

from __future__ import annotations

import os
import re

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from fleetd.api.http.context import SERVICES, is_open, needs_token_always
from fleetd.api.http.deadlines import connection, is_trusted, needs_token
from fleetd.api.http.services import Services
from fleetd.api.http.token import check_token
from fleetd.api.page import access
from fleetd.errors import Forbidden, NotFound, UnsupportedMediaType
from fleetd.process.peercred import peer_uid

CONTROL_PREFIX = "/fleet/"
_NO_TYPE = "application/octet-stream"
# Names that no name server can point at another machine. The port may be any: that of a tunnel, of a
# container or of a proxy is not the one listened on.
_LOOPBACK = re.compile(
    r"(?:127\.0\.0\.1|localhost\.?|\[::1\])(?::[1-9][0-9]{0,4})?", re.ASCII | re.IGNORECASE
)
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?: *, *[\w!#$%&'*+.^`|~-]+)*", re.ASCII)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Pass on requests that are allowed; raises FleetError for the others."""
    services = request.app[SERVICES]
    if is_trusted(request):
        _check_user(request, services)
        return await handler(request)
    _check_host(request, services)
    _check_site(request, services)
    if request.method == hdrs.METH_OPTIONS and request.headers.get(hdrs.ORIGIN) in services.origins:
        return web.Response(status=204)  # a preflight has no token yet; on_prepare adds what it asks for
    if not is_open(request):
        by_page = access.asked_by_page(request)
        if by_page:
            access.check(request)
        elif needs_token(request) or needs_token_always(request):
            check_token(request)
        if (made := connection(request)) is not None:
            made.authenticated()
        if request.path.startswith(CONTROL_PREFIX) and not by_page:
            raise NotFound("The control API is served on the Unix socket only.", hint="Use fleetctl.")
        if request.match_info.http_exception is None:  # a wrong address is what there is to say first
            _check_content_type(request)
    return await handler(request)


def _check_user(request: web.Request, services: Services) -> None:
    # The socket's mode already keeps other users out. This second check refuses unknown users as well.
    if peer_uid(request.transport) not in (0, os.geteuid()):
        services.metrics.auth_failure("user")
        raise Forbidden("This socket serves its own user only.", hint=f"It belongs to uid {os.geteuid()}.")


def _check_host(request: web.Request, services: Services) -> None:
    values = request.headers.getall(hdrs.HOST, [])
    if len(values) != 1 or not (_LOOPBACK.fullmatch(values[0]) or values[0].lower() in services.hosts):
        services.metrics.auth_failure("host")
        raise Forbidden(
            "The Host header does not name this server.",
            hint="Use 127.0.0.1 or localhost, or list the name, with its port, under http.allowed_hosts.",
        )


def _check_site(request: web.Request, services: Services) -> None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None:
        # A page of another port of this machine is another origin, so the Host counts with its port.
        if origin != f"http://{request.headers[hdrs.HOST].lower()}" and origin not in services.origins:
            services.metrics.auth_failure("origin")
            raise Forbidden(
                "Web pages of this origin may not call.", hint="List it under http.allowed_origins."
            )
        return
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none") and not access.is_visit(request):
        services.metrics.auth_failure("fetch_site")
        raise Forbidden("Web pages of other sites may not call.")


def client_of(request: web.Request) -> str:
    """Whose request it is, as far as that can be told: "" for who has the token or this user's socket, and
    another word for all those who need none."""
    return "" if is_trusted(request) or needs_token(request) else "open"


def _check_content_type(request: web.Request) -> None:
    """A page can post a form or text/plain anywhere without a preflight, but not JSON.

    Programs may leave the type out, or send the one that stands for none, as litellm does towards Ollama: a
    browser says for whom it posts.
    """
    if request.method not in (hdrs.METH_POST, hdrs.METH_PATCH):
        return
    by_page = hdrs.ORIGIN in request.headers or "Sec-Fetch-Site" in request.headers
    if request.headers.get(hdrs.CONTENT_TYPE, _NO_TYPE) == _NO_TYPE and not by_page:
        return
    if request.content_type != "application/json":
        given = request.headers.get(hdrs.CONTENT_TYPE, "nothing")[:64]
        raise UnsupportedMediaType(
            f"The body has to be JSON; its Content-Type is {given!r}.",
            hint="Send Content-Type: application/json.",
        )


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """CORS headers, only for origins that were listed."""
    services = request.app[SERVICES]
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or origin not in services.origins:
        return
    response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
    response.headers[hdrs.VARY] = hdrs.ORIGIN
    response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "*"
    if request.method == hdrs.METH_OPTIONS:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = _allowed_methods(request)
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = _allowed_headers(request)
        response.headers[hdrs.VARY] = f"{hdrs.ORIGIN}, {hdrs.ACCESS_CONTROL_REQUEST_HEADERS}"
        response.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = "600"


def _allowed_methods(request: web.Request) -> str:
    """Those of the address; of one that is not served, what most have: its answer says what is wrong."""
    refusal = request.match_info.http_exception
    allowed = refusal.allowed_methods if isinstance(refusal, web.HTTPMethodNotAllowed) else {"GET", "POST"}
    return ", ".join(sorted(allowed))


def _allowed_headers(request: web.Request) -> str:
    """What the page asks to send: client libraries name their platform in a dozen headers of their own."""
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    return asked if _HEADER_NAMES.fullmatch(asked) else "Authorization, Content-Type"
