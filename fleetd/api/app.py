"""The one HTTP application of the daemon: what happens around every handler.

    request id → errors in the route's dialect → guard (auth.py) → handler

All sites, Unix socket and TCP, serve it through ``deadlines.BoundedRunner``; whether a client is trusted is a
property of the connection, not of the application. The addresses are in ``routes.py``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from fleetd import limits
from fleetd.api import auth
from fleetd.api.http import body, failures
from fleetd.api.http.context import DIALECTS, REQUEST_ID, ROUTES, SERVICES, dialect_of, is_gone
from fleetd.api.http.deadlines import is_trusted
from fleetd.api.http.openai_dialect import OPENAI
from fleetd.api.http.refusal_log import RefusalLog
from fleetd.api.http.route_entry import Route
from fleetd.api.http.served_paths import advice
from fleetd.api.http.services import Services
from fleetd.api.routes import ALL_ROUTES
from fleetd.errors import FleetError, PayloadTooLarge

_REFUSALS: web.AppKey[RefusalLog] = web.AppKey("refusals", RefusalLog)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_app(services: Services, routes: Sequence[Route] = ALL_ROUTES) -> web.Application:
    """The application; serve it with ``deadlines.BoundedRunner``."""
    app = web.Application(middlewares=[_errors, auth.guard], client_max_size=limits.HTTP_BODY_BYTES)
    app[SERVICES] = services
    app[_REFUSALS] = RefusalLog()
    app[DIALECTS] = tuple(dict.fromkeys((OPENAI, *(route.dialect for route in routes))))
    app[ROUTES] = {
        app.router.add_route(method, path, route.handler, expect_handler=body.expect): route
        for route in routes
        for method in _methods(route)
        for path in dict.fromkeys((route.path, route.path.rstrip("/") + "/"))
    }
    app.on_response_prepare.append(_on_prepare)
    return app


def _methods(route: Route) -> Sequence[str]:
    # aiohttp leaves the body of an answer to HEAD out.
    return (hdrs.METH_GET, hdrs.METH_HEAD) if route.method == hdrs.METH_GET else (route.method,)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, and every failure the format of the route's dialect."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
    try:
        return await handler(request)
    except FleetError as exc:
        answer = _refusal(request, exc)
        if isinstance(exc, PayloadTooLarge):
            # The rest of the body is not read: a client must not send its next request behind it.
            answer.force_close()
        return answer
    except web.HTTPMethodNotAllowed as exc:
        allowed = ", ".join(sorted(exc.allowed_methods))
        message = f"{exc.method} is not allowed at {request.path[:200]}."
        answer = _refusal(request, failures.HttpFailure(exc.status, message, f"Use {allowed}."))
        answer.headers[hdrs.ALLOW] = allowed
        return answer
    except web.HTTPException as exc:
        message, hint = f"{exc.reason}", ""
        if exc.status == HTTPStatus.NOT_FOUND:
            message = f"There is nothing at {request.method} {request.path[:200]}."
            hint = advice(request.path, [route.path for route in request.app[ROUTES].values()])
        return _refusal(request, failures.HttpFailure(exc.status, message, hint))
    except Exception as exc:  # the request's boundary
        if isinstance(exc, ConnectionError) and is_gone(request):
            raise  # the client has left
        return failures.response(failures.unexpected(exc, request[REQUEST_ID]), dialect_of(request))


def _refusal(request: web.Request, error: FleetError) -> web.Response:
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and not is_trusted(request):
        request.app[_REFUSALS].note(request, error)
    return failures.response(error, dialect_of(request))


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(dialect_of(request).headers(request.get(REQUEST_ID, "")))
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers[hdrs.SERVER] = "fleetd"
    await auth.on_prepare(request, response)
