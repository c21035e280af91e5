"""What handlers find on the application, the request and its connection."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from aiohttp import web

from fleetd.api.services import Services

SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


@runtime_checkable
class Connection(Protocol):
    """What a connection tells: set by ``deadlines.make_runner``."""

    trusted: bool

    def authenticated(self) -> None: ...


def connection(request: web.BaseRequest) -> Connection | None:
    """None on servers that were not made by ``make_runner``; those are treated as TCP from strangers."""
    protocol = request.protocol
    return protocol if isinstance(protocol, Connection) else None


def is_gone(request: web.BaseRequest) -> bool:
    """True when the client has left: a ConnectionError then is its leaving, and otherwise a fault of ours."""
    return request.transport is None or request.transport.is_closing()


def is_trusted(request: web.BaseRequest) -> bool:
    """True on the Unix socket, whose permissions and peer check stand in for the token."""
    made = connection(request)
    return made is not None and made.trusted
