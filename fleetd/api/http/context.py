"""What handlers find on the application and the request."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from fleetd.api.http.dialect import Dialect
from fleetd.api.http.route_entry import Route
from fleetd.api.http.services import Services

SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
ROUTES: web.AppKey[dict[web.AbstractRoute, Route]] = web.AppKey("routes", dict)
# The first one is for clients that do not say which they speak.
DIALECTS: web.AppKey[Sequence[Dialect]] = web.AppKey("dialects", Sequence)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def dialect_of(request: web.Request) -> Dialect:
    """The dialect of the matched route; where routes are shared, or none matches, the client's own or else
    that of the address."""
    route = request.app[ROUTES].get(request.match_info.route)
    if route is not None and not route.shared:
        return route.dialect
    known = request.app[DIALECTS]
    asking = [dialect for dialect in known if dialect.asked_by(request.headers)]
    asking += [each for each in known if each.addresses and request.path.startswith(each.addresses)]
    return asking[0] if asking else known[0]


def is_open(request: web.Request) -> bool:
    """True for an address that needs no token, whatever the method."""
    return any(route.open and route.path == request.path for route in request.app[ROUTES].values())


def needs_token_always(request: web.Request) -> bool:
    """True if clients need the token here also where they need none elsewhere."""
    route = request.app[ROUTES].get(request.match_info.route)
    return route is not None and route.secret


def is_gone(request: web.BaseRequest) -> bool:
    """True when the client has left: a ConnectionError then is its leaving, and otherwise a bug."""
    return request.transport is None or request.transport.is_closing()
