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
    """A status besides 200."""

    #: A sentence for the OpenAPI page.
    meaning: str
    #: The type of a body that is no error of the dialect, if there is one.
    reply: type | None = None


class Route(msgspec.Struct, frozen=True, eq=False):
    """A route. Paths under ``/fleet/`` are served on the Unix socket only (auth.py)."""

    method: str
    #: The path, in aiohttp's notation.
    path: str
    handler: Handler
    #: How errors and streams are written.
    dialect: Dialect
    #: The operation's id on the OpenAPI page; "" leaves the route off the page.
    name: str = ""
    #: A sentence for the OpenAPI page.
    summary: str = ""
    #: The type of the request's body; None if the route takes none.
    body: type | None = None
    #: The type of the answer, or a schema per media type if the answer is no struct.
    reply: type | Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    #: The type of each object in a stream, or their union; None if the route never streams.
    item: Any = None
    #: The statuses besides 200 and those of every route (openapi.py).
    statuses: Mapping[int, RouteStatus] = msgspec.field(default_factory=dict)
    #: The route needs no token.
    open: bool = False
    #: The route needs the token also at the address where others need none.
    secret: bool = False
    #: Clients of other dialects call this route too, and are answered in theirs.
    shared: bool = False
    #: The page may ask for the route over TCP (page/access.py).
    page: bool = False

    @property
    def template(self) -> str:
        """The path in OpenAPI's notation."""
        return _PARAMETER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters in the path."""
        return [match[1] for match in _PARAMETER.finditer(self.path)]
