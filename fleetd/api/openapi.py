"""The OpenAPI 3.1 document at /openapi.json, generated from the types that decode and encode."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from fleetd.api import compress
from fleetd.api.context import SERVICES
from fleetd.api.failures import ErrorReply
from fleetd.api.openai import bodies, objects
from fleetd.control.compression_reply import Compression, CompressTimings, CompressUsage, KeptSpan

_REF = "#/components/schemas/{name}"
_TYPES = (
    bodies.ChatBody,
    bodies.CompletionBody,
    compress.CompressBody,
    Compression,
    objects.ChatCompletion,
    objects.ChatChunk,
    objects.TextCompletion,
    objects.ModelObject,
    objects.ModelList,
    objects.Health,
    ErrorReply,
)
# Their defaults are for readers of another version's daemon; this one sends every field that it sets.
_DEFAULTED = (Compression, KeptSpan, CompressUsage, CompressTimings)

# Every status a route may answer with besides 200, and what it means.
_ALWAYS = {
    "400": "The request is not valid HTTP or JSON, or a field is wrong; `error.param` names it.",
    "401": "The token is missing or wrong.",
    "403": "The Host, Origin or peer may not ask.",
    "405": "This method is not allowed here.",
    "500": "A bug; the daemon's log has the details under the request id.",
    "503": "Too many connections, or the daemon is stopping, stalled or out of memory; see Retry-After.",
}
_BODY = {
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
}
_MODEL = {
    "404": "No such model; the nearest names are offered.",
}
_ENGINE = {
    "429": "The queue is full; see Retry-After.",
    "502": "The engine died, or a download failed.",
    "504": "The engine stalled.",
    "507": "The disk is full.",
}


@cache
def document(version: str) -> dict[str, Any]:
    """The whole document, as plain values."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    for kind in _DEFAULTED:
        fields = msgspec.structs.fields(kind)
        components[kind.__name__]["required"] = [field.name for field in fields if field.default is not UNSET]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fleetd",
            "version": version,
            "description": "OpenAI's API for the models of this machine.",
        },
        "security": [{"bearer": []}],
        "paths": {
            "/v1/chat/completions": {
                "post": _generate("chat", bodies.ChatBody, objects.ChatCompletion, objects.ChatChunk)
            },
            "/v1/completions": {
                "post": _generate(
                    "completion", bodies.CompletionBody, objects.TextCompletion, objects.TextCompletion
                )
            },
            "/v1/compress": {
                "post": {
                    **_operation(
                        "compress",
                        "What smart prefill would keep of a prompt; lossy.",
                        _json(Compression),
                        {**_BODY, **_MODEL, **_ENGINE},
                    ),
                    "requestBody": {"required": True, "content": _json(compress.CompressBody)},
                }
            },
            "/v1/models": {
                "get": _operation("listModels", "Models on this machine.", _json(objects.ModelList), {})
            },
            "/v1/models/{id}": {
                "get": {
                    **_operation("showModel", "One model.", _json(objects.ModelObject), _MODEL),
                    "parameters": [
                        {
                            "name": "id",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string", "minLength": 1},
                        }
                    ],
                }
            },
            "/health": {"get": _health("health", "Would a request be served?")},
            "/health/ready": {"get": _health("ready", "The same.")},
            "/health/live": {
                "get": {**_operation("live", "The process runs.", _json(objects.Health), {}), "security": []}
            },
            "/metrics": {
                "get": _operation(
                    "metrics",
                    "Prometheus metrics; OpenMetrics if accepted.",
                    {
                        "text/plain": {"schema": {"type": "string"}},
                        "application/openmetrics-text": {"schema": {"type": "string"}},
                    },
                    {},
                )
            },
            "/openapi.json": {
                "get": _operation(
                    "openapi", "This document.", {"application/json": {"schema": {"type": "object"}}}, {}
                )
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Also accepted as x-api-key."}
            },
        },
    }


async def serve(request: web.Request) -> web.StreamResponse:
    body = msgspec.json.encode(document(request.app[SERVICES].version))
    return web.Response(body=body, content_type="application/json")


# ---- Pieces ----------------------------------------------------------------------------------------------


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(kind)}}


def _operation(name: str, summary: str, content: dict[str, Any], more: dict[str, str]) -> dict[str, Any]:
    failures = {**_ALWAYS, **more}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                status: {"description": meaning, "content": _json(ErrorReply)}
                for status, meaning in sorted(failures.items())
            },
        },
    }


def _generate(name: str, body: type, reply: type, chunk: type) -> dict[str, Any]:
    content = {
        **_json(reply),
        "text/event-stream": {
            # Of each event; the last one's data is [DONE], or an error.
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {
                    "data": {
                        "anyOf": [
                            {"const": "[DONE]"},
                            {
                                "type": "string",
                                "contentMediaType": "application/json",
                                "contentSchema": {"anyOf": [_ref(chunk), _ref(ErrorReply)]},
                            },
                        ]
                    }
                },
            }
        },
    }
    return {
        **_operation(name, "Generate; `stream` asks for events.", content, {**_BODY, **_MODEL, **_ENGINE}),
        "requestBody": {"required": True, "content": _json(body)},
    }


def _health(name: str, summary: str) -> dict[str, Any]:
    operation = _operation(name, summary, _json(objects.Health), {})
    operation["responses"]["503"] = {
        "description": "Not now, and why.",
        "content": {"application/json": {"schema": {"anyOf": [_ref(objects.Health), _ref(ErrorReply)]}}},
    }
    return operation
