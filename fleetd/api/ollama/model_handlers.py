"""/api/version, tags, ps, show, pull and delete; /api/create, copy, push and blobs are refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from fleetd.api.http import token
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.api.http.relay import relay
from fleetd.api.http.services import Services
from fleetd.api.model_list import ModelObject, abilities, all_models, one_model
from fleetd.api.ollama import model_details as facts
from fleetd.api.ollama import objects as o
from fleetd.api.ollama.bodies import OllamaModelBody
from fleetd.api.ollama.residency import expires_at
from fleetd.errors import FleetError, InvalidValue, NotOffered
from fleetd.models import file_threads
from fleetd.models.catalog import find
from fleetd.models.chat_templates import DEFAULT, for_tools, read_templates
from fleetd.models.folder import ModelFolder
from fleetd.models.model_names import untagged

# The Ollama whose API this is like: clients ask for one that is new enough (Copilot: 0.6.4).
API_VERSION = "0.12.0"


async def version(request: web.Request) -> web.StreamResponse:
    return json_answer(o.OllamaVersion(API_VERSION, request.app[SERVICES].version))


async def tags(request: web.Request) -> web.StreamResponse:
    """The models of all machines of the fleet."""
    found = await all_models(request.app[SERVICES])
    return json_answer(o.OllamaTags([facts.tag(model) for model in found]))


async def ps(request: web.Request) -> web.StreamResponse:
    """Models that are loaded, here or on another machine of the fleet."""
    services = request.app[SERVICES]
    here = {each.model: each for each in services.status().engines if each.state == "ready"}
    running = []
    for model in await all_models(services):
        engine = here.get(model.id)
        if engine is None and all(place.state != "loaded" for place in model.fleet.nodes):
            continue
        size = engine.memory_bytes if engine is not None else model.fleet.weights_bytes
        running.append(
            o.OllamaRunning(
                name=model.id,
                model=model.id,
                size=size,
                size_vram=0 if engine is None or engine.device == "cpu" else size,
                digest=facts.digest(model),
                details=facts.details(model),
                context_length=engine.shape.context_tokens
                if engine is not None
                else model.fleet.context_tokens,
                expires_at=expires_at(services.pool, engine) if engine is not None else "",
            )
        )
    return json_answer(o.OllamaProcesses(running))


async def show(request: web.Request) -> web.StreamResponse:
    """Raises ModelNotFound with the nearest names."""
    services = request.app[SERVICES]
    model = await one_model(services, await _ref(request))
    return json_answer(await file_threads.look(_shown, services, model))


def _shown(services: Services, model: ModelObject) -> o.OllamaShown:
    try:
        folder: ModelFolder | None = services.models.in_part(services.names.here(model.id))
    except FleetError:
        folder = None
    name = folder.name if folder is not None else untagged(model.id)
    entry = find(services.names.alias(name) or name)
    config = folder.config if folder is not None else {}
    path = Path(folder.path) if folder is not None else None
    templates = read_templates(path) if path is not None else {}
    context = model.fleet.context_tokens or (entry.context_tokens if entry is not None else 0)
    return o.OllamaShown(
        modified_at=facts.modified(model),
        details=facts.details(model, config),
        model_info=facts.model_info(model, config, context),
        capabilities=facts.capabilities(model, abilities(path, entry, services.pool.facts(name))),
        template=templates.get(DEFAULT) or for_tools(templates),
    )


async def pull(request: web.Request) -> web.StreamResponse:
    """Progress as status lines, the last of which is "success"."""
    token.require_token(request)
    body = parse(await read(request), OllamaModelBody)
    lines = _pulling(request.app[SERVICES], _named(body))
    if body.stream is not False:
        return await relay(request, lines)
    async with aclosing(lines):
        async for _ in lines:
            pass
    return json_answer(o.OllamaPullLine("success"))


async def _pulling(services: Services, ref: str) -> AsyncGenerator[o.OllamaPullLine, None]:
    yield o.OllamaPullLine("pulling manifest")
    async with aclosing(services.pull(ref)) as steps:
        async for step in steps:
            if step.stage == "downloading":
                status = f"pulling {step.file}"
                yield o.OllamaPullLine(status, step.file, step.total_bytes, step.done_bytes)
            else:
                yield o.OllamaPullLine(step.stage)
    yield o.OllamaPullLine("success")


async def delete(request: web.Request) -> web.StreamResponse:
    token.require_token(request)
    await request.app[SERVICES].operations.remove(await _ref(request))
    return web.Response()


async def refused(request: web.Request) -> NoReturn:
    raise NotOffered(
        f"{request.method} {request.path[:80]} is not served: models are neither made nor published here.",
        hint="`fleetctl models add PATH` makes a model of a folder or a GGUF file.",
    )


async def _ref(request: web.Request) -> str:
    ref = _named(parse(await read(request), OllamaModelBody))
    token.check_model(request, ref)
    return ref


def _named(body: OllamaModelBody) -> str:
    if not body.ref:
        raise InvalidValue("The field 'model' is missing.", param="model")
    return untagged(body.ref)
