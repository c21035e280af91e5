"""The OpenAPI 3.1 document at /openapi.json, made from the table of routes and the types in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from fleetd.api.http.body import json_answer
from fleetd.api.http.context import ROUTES, SERVICES
from fleetd.api.http.route_entry import Route, RouteStatus
from fleetd.control.compression_reply import Compression, CompressTimings, CompressUsage, KeptSpan

Schemas = Mapping[type, dict[str, Any]]

# Their defaults are for readers of another version's daemon; this one sends every field that it sets.
_DEFAULTED = (Compression, KeptSpan, CompressUsage, CompressTimings)

# Statuses of every route; a route adds its own.
_ALWAYS: Mapping[int, RouteStatus] = {
    400: RouteStatus("The request is not valid HTTP or JSON, or a field is wrong; `error.param` names it."),
    401: RouteStatus("The token is missing or wrong."),
    403: RouteStatus("The Host, Origin or peer may not ask."),
    405: RouteStatus("This method is not allowed here."),
    500: RouteStatus("A bug; the daemon's log has the details under the request id."),
    503: RouteStatus(
        "Too many connections, or the daemon is stopping, stalled or out of memory; see Retry-After."
    ),
}


async def serve(request: web.Request) -> web.StreamResponse:
    return json_answer(document(request.app[ROUTES].values(), request.app[SERVICES].version))


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The whole document, as plain values. Routes without a name are left out."""
    listed = [route for route in routes if route.name]
    types = list(dict.fromkeys(kind for route in listed for kind in _types(route)))
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, references, strict=True))
    for kind in _DEFAULTED:
        fields = msgspec.structs.fields(kind)
        components[kind.__name__]["required"] = [field.name for field in fields if field.default is not UNSET]
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fleetd",
            "version": version,
            "description": "OpenAI's, Anthropic's and Ollama's APIs for the models of this machine.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Also accepted as x-api-key."}
            },
        },
    }


def _types(route: Route) -> Iterator[type]:
    """The types that a route's operation refers to."""
    reply = route.reply if isinstance(route.reply, type) else None
    others = [status.reply for status in route.statuses.values()]
    for kind in (route.body, reply, route.item, route.dialect.error_type, *others):
        if kind is not None:
            yield kind


def _operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    statuses = sorted({**_ALWAYS, **route.statuses}.items())
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer.", "content": _content(route, schemas)},
            **{str(code): _failure(route, status, schemas) for code, status in statuses},
        },
    }
    if route.parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in route.parameters
        ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.body])}
    if route.open:
        operation["security"] = []
    return operation


def _content(route: Route, schemas: Schemas) -> dict[str, Any]:
    content = _json(schemas[route.reply]) if isinstance(route.reply, type) else dict(route.reply)
    if route.item is not None:
        stream = route.dialect.stream()
        media_type = stream.content_type.partition(";")[0]
        content[media_type] = {
            "schema": stream.schema([schemas[route.item], schemas[route.dialect.error_type]])
        }
    return content


def _failure(route: Route, status: RouteStatus, schemas: Schemas) -> dict[str, Any]:
    schema = schemas[route.dialect.error_type]
    if status.reply is not None:
        schema = {"anyOf": [schemas[status.reply], schema]}
    return {"description": status.meaning, "content": _json(schema)}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
