"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from fleetd.api.context import SERVICES
from fleetd.api.objects import ModelDetails, ModelList, ModelObject
from fleetd.api.services import Folder, Services, view
from fleetd.errors import ModelNotFound


async def index(request: web.Request) -> web.StreamResponse:
    """Models on this machine, and the default one even before its first use fetches it."""
    services = request.app[SERVICES]
    folders = await asyncio.to_thread(services.models.installed)
    loaded = loaded_models(services)
    found = [_describe(folder, loaded) for folder in folders]
    if all(model.id != services.default_model for model in found):
        found.insert(0, _absent(services.default_model))
    return json(ModelList(data=found))


async def show(request: web.Request) -> web.StreamResponse:
    """Raises ModelNotFound with the nearest names."""
    services = request.app[SERVICES]
    name = request.match_info["id"]
    try:
        folder = await asyncio.to_thread(services.models.resolve, name)
    except ModelNotFound:
        if name != services.default_model:
            raise
        return json(_absent(name))
    return json(_describe(folder, loaded_models(services)))


def loaded_models(services: Services) -> frozenset[str]:
    return frozenset(engine.model for engine in view(services.status()).engines if engine.state == "ready")


def json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _describe(folder: Folder, loaded: frozenset[str]) -> ModelObject:
    owner, slash, _ = folder.name.partition("/")
    return ModelObject(
        id=folder.name,
        created=int(folder.created_s),
        owned_by=owner if slash and owner else "fleetd",
        fleet=ModelDetails(
            source=folder.source,
            architecture=folder.architecture,
            context_tokens=folder.context_tokens,
            weights_bytes=folder.weights_bytes,
            loaded=folder.name in loaded,
            installed=True,
        ),
    )


def _absent(name: str) -> ModelObject:
    details = ModelDetails("catalog", "", 0, 0, loaded=False, installed=False)
    return ModelObject(id=name, created=0, owned_by="fleetd", fleet=details)
