"""One address of the HTTP API: what the application serves there, and what the OpenAPI page says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp.typedefs import Handler

from fleetd.api.http.dialect import Dialect

# "/v1/models/{id:.+}" → the name, without the pattern that aiohttp matches it by.
_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")


class RouteStatus(msgspec.Struct, frozen=True):
    """A status besides 200.

    Args:
        reply: what the body may be besides an error of the dialect.
    """

    meaning: str
    reply: type | None = None


class Route(msgspec.Struct, frozen=True, eq=False):
    """A route. Paths under ``/fleet/`` are served on the Unix socket only (auth.py).

    Args:
        path: in aiohttp's notation.
        dialect: how errors and streams are written.
        name: the operation's id on the OpenAPI page; "" leaves the route off the page.
        body: the type of the request's body; None if it takes none.
        reply: the type of the answer, or a schema per media type where it is not a struct.
        item: the type of each object in a stream, or their union; None if the route never streams.
        statuses: those besides 200 and the ones of every route (openapi.py).
        open: needs no token.
        secret: needs it also at the address where others need none.
        shared: clients of other dialects call here too, and are answered in theirs.
        page: the page may ask for it over TCP (page/access.py).
    """

    method: str
    path: str
    handler: Handler
    dialect: Dialect
    name: str = ""
    summary: str = ""
    body: type | None = None
    reply: type | Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    item: Any = None
    statuses: Mapping[int, RouteStatus] = msgspec.field(default_factory=dict)
    open: bool = False
    secret: bool = False
    shared: bool = False
    page: bool = False

    @property
    def template(self) -> str:
        """The path in OpenAPI's notation."""
        return _PARAMETER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters in the path."""
        return [match[1] for match in _PARAMETER.finditer(self.path)]
