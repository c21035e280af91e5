"""GET /v1/models and /v1/models/{id}: addresses that several dialects share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from aiohttp import web
from msgspec.structs import replace

from fleetd.api.anthropic.dialect import ANTHROPIC
from fleetd.api.anthropic.objects import ModelInfo, ModelPage
from fleetd.api.http import token
from fleetd.api.http.body import json_answer
from fleetd.api.http.context import SERVICES, dialect_of
from fleetd.api.model_list import ModelList, ModelObject, all_models, one_model
from fleetd.models.model_names import CLAUDE_PREFIX


async def index(request: web.Request) -> web.StreamResponse:
    """The fleet's models, each once, and the default model even before its first use fetches it."""
    found = await all_models(request.app[SERVICES])
    if dialect_of(request) is ANTHROPIC:
        return json_answer(_page(found))
    return json_answer(ModelList(data=found))


async def show(request: web.Request) -> web.StreamResponse:
    """The model that a request for this name would get, called by it. Raises ModelNotFound with the nearest
    names."""
    name = request.match_info["id"].rstrip("/")
    token.check_model(request, name)
    found = await one_model(request.app[SERVICES], name)
    if dialect_of(request) is ANTHROPIC:
        return json_answer(_info(found, name))
    return json_answer(replace(found, id=name))


def _info(model: ModelObject, name: str = "") -> ModelInfo:
    """A model as Anthropic's clients read it, under ``name`` if that is given."""
    return ModelInfo(
        id=name or model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=model.fleet.context_tokens or None,
    )


def _page(models: Iterable[ModelObject]) -> ModelPage:
    """All that answer chats, and each again under the name by which Claude Code lets it be chosen.

    Anthropic's API has nothing that a model for vectors could be asked for.
    """
    data = list(_each(model for model in models if model.fleet.purpose == "chat"))
    ids = [model.id for model in data]
    return ModelPage(data=data, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)


def _each(models: Iterable[ModelObject]) -> Iterator[ModelInfo]:
    listed = list(models)
    yield from (_info(model) for model in listed)
    yield from (_info(model, CLAUDE_PREFIX + model.id) for model in listed)
