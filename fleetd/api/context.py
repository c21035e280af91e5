"""What handlers find on the application and the request."""

from __future__ import annotations

from aiohttp import web

from fleetd.api.dialect import Dialect
from fleetd.api.route_entry import Route
from fleetd.api.services import Services

SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
ROUTES: web.AppKey[dict[web.AbstractRoute, Route]] = web.AppKey("routes", dict)
DEFAULT_DIALECT: web.AppKey[Dialect] = web.AppKey("default_dialect", Dialect)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def dialect_of(request: web.Request) -> Dialect:
    """The dialect of the matched route; the default one where no route matches."""
    route = request.app[ROUTES].get(request.match_info.route)
    return route.dialect if route is not None else request.app[DEFAULT_DIALECT]


def is_open(request: web.Request) -> bool:
    """True for an address that needs no token, whatever the method."""
    return any(route.open and route.path == request.path for route in request.app[ROUTES].values())


def is_gone(request: web.BaseRequest) -> bool:
    """True when the client has left: a ConnectionError then is its leaving, and otherwise a bug."""
    return request.transport is None or request.transport.is_closing()
