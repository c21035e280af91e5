"""GET /v1/models and /v1/models/{id}: addresses that several dialects share."""

from __future__ import annotations

from aiohttp import web
from msgspec.structs import replace

from fleetd.api.anthropic.dialect import ANTHROPIC
from fleetd.api.anthropic.models import info, page
from fleetd.api.http import token
from fleetd.api.http.body import json_answer
from fleetd.api.http.context import SERVICES, dialect_of
from fleetd.api.model_list import ModelList, all_models, one_model


async def index(request: web.Request) -> web.StreamResponse:
    """The fleet's models, each once, and the default model even before its first use fetches it."""
    found = await all_models(request.app[SERVICES])
    if dialect_of(request) is ANTHROPIC:
        return json_answer(page(found))
    return json_answer(ModelList(data=found))


async def show(request: web.Request) -> web.StreamResponse:
    """The model that a request for this name would get, called by it. Raises ModelNotFound with the nearest
    names."""
    name = request.match_info["id"].rstrip("/")
    token.check_model(request, name)
    found = await one_model(request.app[SERVICES], name)
    if dialect_of(request) is ANTHROPIC:
        return json_answer(info(found, name))
    return json_answer(replace(found, id=name))
