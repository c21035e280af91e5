"""The one HTTP application of the daemon: routes, and what happens around every handler.

    request id → errors as JSON → guard (auth.py) → handler

Both sites, Unix socket and TCP, serve it through ``deadlines.make_runner``; who is trusted is a property of
the connection, not of the application.
"""

from __future__ import annotations

import re
import uuid

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from fleetd import limits
from fleetd.api import auth, body, compress, failures, health, openapi
from fleetd.api.context import REQUEST_ID, SERVICES, is_gone
from fleetd.api.control import daemon, peers, plan
from fleetd.api.deadlines import make_runner
from fleetd.api.openai import chat, completions, models
from fleetd.api.services import Services
from fleetd.errors import FleetError

__all__ = ["build_app", "make_runner"]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_app(services: Services) -> web.Application:
    """The application; serve it with ``make_runner``."""
    app = web.Application(middlewares=[_errors, auth.guard], client_max_size=limits.HTTP_BODY_BYTES)
    app[SERVICES] = services
    app.on_response_prepare.append(_on_prepare)
    get, post = hdrs.METH_GET, hdrs.METH_POST
    for method, path, handler in (
        (post, "/v1/chat/completions", chat.completions),
        (post, "/v1/completions", completions.completions),
        (post, "/v1/compress", compress.compress),
        (get, "/v1/models", models.index),
        (get, "/v1/models/{id:.+}", models.show),
        (get, "/health", health.ready),
        (get, "/health/ready", health.ready),
        (get, "/ready", health.ready),
        (get, "/health/live", health.live),
        (get, "/live", health.live),
        (get, "/metrics", health.metrics),
        (get, "/openapi.json", openapi.serve),
        *daemon.ROUTES,
        *peers.ROUTES,
        *plan.ROUTES,
    ):
        app.router.add_route(method, path, handler, expect_handler=body.expect)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, and every failure its shape."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
    try:
        return await handler(request)
    except FleetError as exc:
        return failures.response(exc)
    except web.HTTPMethodNotAllowed as exc:
        answer = failures.response(failures.HttpFailure(exc.status, f"{exc.method} is not allowed here."))
        answer.headers[hdrs.ALLOW] = ", ".join(sorted(exc.allowed_methods))
        return answer
    except web.HTTPException as exc:
        message = "There is nothing at this address." if exc.status == 404 else exc.reason
        return failures.response(failures.HttpFailure(exc.status, f"{message}"))
    except Exception as exc:  # the request's boundary
        if isinstance(exc, ConnectionError) and is_gone(request):
            raise  # there is nobody to answer
        return failures.response(failures.unexpected(exc, request[REQUEST_ID]))


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers[hdrs.SERVER] = "fleetd"
    await auth.on_prepare(request, response)
