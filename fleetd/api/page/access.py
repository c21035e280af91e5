"""What the page may ask over TCP, and how it logs in and out.

The page says who it is by a header with the key of its session (``sessions.py``); the cookie comes beside it.
It may ask only routes with ``Route.page``, and only from this server's own origin.
"""

from __future__ import annotations

from aiohttp import hdrs, web

from fleetd import limits
from fleetd.api.http.body import json_answer
from fleetd.api.http.client_name import PAGE_HEADER
from fleetd.api.http.context import ROUTES, SERVICES
from fleetd.control.page_login import PageKey, PageTicket
from fleetd.errors import Forbidden, NotFound, Unauthorized
from fleetd.text.host_port import host_port

TICKET_HEADER = "X-Fleet-Ticket"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  addresses to call, not to bind


def asked_by_page(request: web.Request) -> bool:
    return PAGE_HEADER in request.headers


def check(request: web.Request) -> None:
    """Pass a request of a page that is logged in; raises FleetError for others.

    Browsers leave Sec-Fetch-Site out where they do not trust the connection, so the page works on the
    loopback names and behind TLS.
    """
    services = request.app[SERVICES]
    if request.headers.get("Sec-Fetch-Site") != "same-origin":
        services.metrics.auth_failure("page_site")
        raise Forbidden("Only the page itself may ask.", hint="`fleetctl open` opens it on 127.0.0.1.")
    if not services.page.use(_cookie(request), request.headers[PAGE_HEADER]):
        services.metrics.auth_failure("page_session")
        raise Unauthorized("The page is not logged in.", hint="`fleetctl open` logs it in.")
    route = request.app[ROUTES].get(request.match_info.route)
    if route is not None and not route.page:
        raise NotFound("The page may not ask this.", hint="Use fleetctl.")


def still_open(request: web.Request) -> bool:
    """False once the page's session has ended, for long answers; True for requests that need no session."""
    key = request.headers.get(PAGE_HEADER)
    return key is None or request.app[SERVICES].page.use(_cookie(request), key)


async def ticket(request: web.Request) -> web.StreamResponse:
    """The address for `fleetctl open`. The ticket is behind the #, which browsers send to no server."""
    services = request.app[SERVICES]
    http = services.status().http
    if http is None:
        raise NotFound("The daemon listens on its socket alone.", hint="Set http.listen.")
    address = host_port(_ANY_ADDRESS.get(http.host, http.host), http.port)
    url = f"http://{address}/#ticket={services.page.issue()}"
    return json_answer(PageTicket(url, limits.PAGE_TICKET_S))


async def login(request: web.Request) -> web.StreamResponse:
    """The ticket comes in a header: no byte of a stranger's body is read."""
    services = request.app[SERVICES]
    if request.headers.get("Sec-Fetch-Site") != "same-origin":
        services.metrics.auth_failure("page_site")
        raise Forbidden("Only the page itself may log in.", hint="`fleetctl open` opens it on 127.0.0.1.")
    found = services.page.redeem(request.headers.get(TICKET_HEADER, ""))
    if found is None:
        services.metrics.auth_failure("page_ticket")
        raise Unauthorized(
            "This link was used before, or is too old.", hint="`fleetctl open` makes another one."
        )
    answer = json_answer(PageKey(found.key))
    answer.set_cookie(_name(request), found.cookie, path="/", httponly=True, samesite="Strict")
    return answer


async def logout(request: web.Request) -> web.StreamResponse:
    request.app[SERVICES].page.end(_cookie(request))
    answer = json_answer({"ok": True})
    answer.del_cookie(_name(request), path="/", httponly=True, samesite="Strict")
    return answer


def _name(request: web.Request) -> str:
    # Cookies know no ports: two daemons on one machine would log each other's pages out.
    sock = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return f"fleetd-{sock[1]}" if isinstance(sock, tuple) else "fleetd"


def _cookie(request: web.Request) -> str:
    return request.cookies.get(_name(request), "")


def is_visit(request: web.Request) -> bool:
    """True where a browser opens the page's address from a link or a file: what it gets holds no secret."""
    return (
        request.method in (hdrs.METH_GET, hdrs.METH_HEAD)
        and request.path == "/"
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and request.headers.get("Sec-Fetch-Dest") == "document"
    )
