"""Who shows the token, and what may not be asked without it, also at an address that needs none."""

from __future__ import annotations

import hmac

from aiohttp import hdrs, web

from fleetd.api.http.context import SERVICES
from fleetd.api.http.deadlines import is_trusted
from fleetd.errors import Forbidden, Unauthorized
from fleetd.models import names


def require_token(
    request: web.Request,
    what: str = "Models are fetched and deleted",
    hint: str = "Use `fleetctl models`.",
) -> None:
    """Refuse what only the token's owner may have done, also where all else needs no token.

    Raises Unauthorized, or Forbidden if the settings have turned the token off.
    """
    services = request.app[SERVICES]
    if is_trusted(request):
        return
    if not services.token:
        raise Forbidden(
            f"{what} by clients that show a token, and the settings turn it off.",
            hint=hint,
        )
    check_token(request)


def check_model(request: web.Request, model: str | None) -> None:
    """Refuse a path as a model's name without the token, before the disk is looked at; as ``require_token``.

    Whatever lies there would be read, and the answer would tell what does.
    """
    if model is not None and names.is_path(model):
        require_token(
            request,
            "Models are called by their paths",
            "Give it a name: fleetctl models add PATH.",
        )


def check_token(request: web.Request) -> None:
    """Raises Unauthorized, if the settings want a token and it is not shown."""
    services = request.app[SERVICES]
    if not services.token:
        return
    scheme, _, credentials = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    given = credentials.strip() if scheme.lower() == "bearer" else ""
    # Anthropic's clients, then Azure's.
    given = given or request.headers.get("x-api-key", "") or request.headers.get("api-key", "")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), services.token.encode()):
        services.metrics.auth_failure("token")
        what = "The token is wrong." if given else "A token is needed: Authorization: Bearer TOKEN."
        raise Unauthorized(what, hint="`fleetctl env` prints the address and the key.")
