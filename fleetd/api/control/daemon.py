"""/fleet/v1/*: control, on the Unix socket only (auth.py answers 404 elsewhere)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api.control.offered import Rooms, found_models, offered
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.api.http.relay import relay
from fleetd.api.http.services import Services
from fleetd.api.model_list import abilities, loaded_models
from fleetd.control.daemon_status import ClientSettings, DaemonStatus, HttpAddress
from fleetd.control.model_listing import (
    ImportableModel,
    InstalledModel,
    ModelListing,
    ModelVerdict,
    UnlistedModel,
)
from fleetd.control.setting_view import SettingChange
from fleetd.control.usage_report import SPANS
from fleetd.engine.protocol import Ready
from fleetd.errors import InvalidValue, ModelCorrupt, ModelNotFound
from fleetd.models import catalog, file_threads
from fleetd.models.catalog import CatalogEntry
from fleetd.models.folder import ModelFolder
from fleetd.models.weights import unused_files
from fleetd.text.host_port import host_port

_DAYS = (1, 3650)


class ModelRef(msgspec.Struct, frozen=True):
    """The body of every POST under /fleet/v1/models; ``full`` is for verify alone."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    full: bool = True


class AddedModel(msgspec.Struct, frozen=True):
    """The body of POST /fleet/v1/models/add: an absolute path, or a name from ``importable``; "" chooses."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""


async def _ref(request: web.Request) -> ModelRef:
    return parse(await read(request), ModelRef)


async def _resolve(request: web.Request, ref: ModelRef | None = None) -> ModelFolder:
    ref = ref or await _ref(request)
    return await file_threads.look(request.app[SERVICES].models.resolve, ref.model)


# ---- Reading ---------------------------------------------------------------------------------------------


async def status(request: web.Request) -> web.StreamResponse:
    return json_answer(request.app[SERVICES].status())


async def models(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    # The engines' state belongs to the event loop; only the disk is asked from a thread.
    loaded = loaded_models(services)
    facts = {name: found for name in loaded if (found := services.pool.facts(name)) is not None}
    return json_answer(await file_threads.look(_listing, services, loaded, facts, services.status()))


def _listing(
    services: Services, loaded: frozenset[str], facts: Mapping[str, Ready], status: DaemonStatus
) -> ModelListing:
    """What is here and what could be. A digest may cost minutes of reading, so it is left to verify."""
    folders = list(services.models.installed())
    rooms = _rooms(services, status)
    importable = [
        ImportableModel(found.name, found.program, str(found.path), found.size_bytes)
        for found in services.models.importable()
    ]
    unlisted = [UnlistedModel(str(each.path), each.reason) for each in services.models.unlisted()]
    return ModelListing(
        installed=_installed(services, folders, loaded, facts),
        catalog=offered({folder.name for folder in folders}, rooms),
        memory_reason=rooms.memory_reason,
        memory=status.memory,
        evictable_bytes=sum(engine.memory_bytes for engine in status.engines if engine.evictable),
        importable=importable,
        unlisted=unlisted,
    )


def _installed(
    services: Services, folders: Sequence[ModelFolder], loaded: frozenset[str], facts: Mapping[str, Ready]
) -> list[InstalledModel]:
    """The models of ``folders``. ``facts``: what the workers of those that are ``loaded`` have reported."""
    by_name = {entry.name: entry for entry in catalog.entries()}
    by_hub_id = {entry.hub_id: entry for entry in catalog.entries() if entry.hub_id}
    found = []
    for folder in folders:
        entry = by_name.get(folder.name) or by_hub_id.get(folder.name)
        able = abilities(folder.path, entry, facts.get(folder.name))
        found.append(
            InstalledModel(
                name=folder.name,
                source=folder.source,
                architecture=folder.architecture,
                weights_bytes=folder.weights_bytes,
                context_tokens=folder.context_tokens,
                roles=list(entry.roles) if entry is not None else ["chat"],
                path=str(folder.path),
                loaded=folder.name in loaded,
                pinned=folder.name in services.pinned.names,
                tools=able.shown_tools,
                thinking=able.thinking,
                ignored=unused_files(Path(folder.path)),
            )
        )
    return found


async def search(request: web.Request) -> web.StreamResponse:
    """Models of the hub by words of their names; only a person's question gets here, and only it is sent."""
    services = request.app[SERVICES]
    words = " ".join(request.query.get("words", "").split())
    if not 2 <= len(words) <= limits.HUB_SEARCH_CHARS:
        raise InvalidValue(f"words has to have 2 to {limits.HUB_SEARCH_CHARS} characters.", param="words")
    page = await services.search(words)
    folders = await file_threads.look(lambda: list(services.models.installed()))
    names = {folder.name for folder in folders} | {entry.hub_id or "" for entry in _entries(folders)}
    return json_answer(found_models(words, page, names, _rooms(services, services.status())))


def _entries(folders: Sequence[ModelFolder]) -> list[CatalogEntry]:
    """The entries of those folders that hold models of the catalog."""
    return [entry for folder in folders if (entry := catalog.find(folder.name)) is not None]


def _rooms(services: Services, status: DaemonStatus) -> Rooms:
    evictable = sum(engine.memory_bytes for engine in status.engines if engine.evictable)
    return Rooms(status, services.weight_rules(status.machine), evictable)


async def usage(request: web.Request) -> web.StreamResponse:
    text = request.query.get("days", "30")
    if not text.isascii() or not text.isdigit() or not _DAYS[0] <= int(text[:8]) <= _DAYS[1]:
        raise InvalidValue(f"days has to be a number from {_DAYS[0]} to {_DAYS[1]}.", param="days")
    by = next((span for span in SPANS if span == request.query.get("by", "day")), None)
    if by is None:
        raise InvalidValue(f"by has to be {' or '.join(SPANS)}.", param="by")
    # The ledger asks its disk.
    return json_answer(await asyncio.to_thread(request.app[SERVICES].ledger.usage, int(text), by))


async def settings(request: web.Request) -> web.StreamResponse:
    return json_answer(await asyncio.to_thread(request.app[SERVICES].settings))


async def change_setting(request: web.Request) -> web.StreamResponse:
    """Write one key into the settings file; the answer says what a restart would change."""
    change = parse(await read(request), SettingChange)
    return json_answer(await asyncio.to_thread(request.app[SERVICES].change_setting, change))


async def env(request: web.Request) -> web.StreamResponse:
    """What programs on this machine need to call the API."""
    services = request.app[SERVICES]
    status, names = services.status(), services.names
    return json_answer(
        ClientSettings(
            None if status.http is None else f"{_url(status.http)}/v1",
            services.token,
            names.large,
            names.small,
            "" if status.ollama is None else _url(status.ollama),
        )
    )


def _url(http: HttpAddress) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(http.host, http.host)  # noqa: S104  an address to call, not to bind
    return f"http://{host_port(host, http.port)}"


# ---- Acting ----------------------------------------------------------------------------------------------


async def load(request: web.Request) -> web.StreamResponse:
    folder = await _resolve(request)
    await request.app[SERVICES].pool.load(folder)
    return json_answer({"ok": True})


async def unload(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    name = await _installed_name(services, (await _ref(request)).model)
    if not await services.pool.unload(name):
        raise ModelNotFound(f"{name} is not loaded.", hint="`fleetctl status` lists what is.")
    return json_answer({"ok": True})


async def pin(request: web.Request) -> web.StreamResponse:
    """Load it too: what is pinned can be loaded here."""
    services = request.app[SERVICES]
    folder = await _resolve(request)
    await services.pool.load(folder)
    await asyncio.to_thread(services.pinned.pin, folder.name)
    return json_answer({"ok": True})


async def unpin(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    name = await _installed_name(services, (await _ref(request)).model)
    if name not in services.pinned.names:
        raise ModelNotFound(f"{name} is not pinned.", hint="`fleetctl models` lists what is.")
    await asyncio.to_thread(services.pinned.unpin, name)
    return json_answer({"ok": True})


async def remove(request: web.Request) -> web.StreamResponse:
    await remove_model(request.app[SERVICES], (await _ref(request)).model)
    return json_answer({"ok": True})


async def remove_model(services: Services, ref: str) -> None:
    """Unload first: a worker that has the files mapped would keep the disk space. Raises FleetError."""
    name = await _installed_name(services, ref)
    await services.pool.unload(name)
    await file_threads.look(services.models.remove, name)
    await asyncio.to_thread(services.pinned.unpin, name)
    services.models_changed()


async def _installed_name(services: Services, ref: str) -> str:
    """The name that a model is loaded and removed by; ``ref`` itself where its folder is gone or damaged."""
    try:
        return (await file_threads.look(services.models.resolve, ref)).name
    except (ModelNotFound, ModelCorrupt):
        return ref


async def verify(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    ref = await _ref(request)
    folder = await _resolve(request, ref)
    await file_threads.read_whole(services.verify, folder.path, full=ref.full)
    digest = await file_threads.read_whole(services.models.digest, folder)
    return json_answer(ModelVerdict(digest=str(digest)))


async def pull(request: web.Request) -> web.StreamResponse:
    """Progress as a stream of events; the last one says done, or what went wrong."""
    services = request.app[SERVICES]
    return await relay(request, _pulling(services, (await _ref(request)).model))


async def _pulling(services: Services, ref: str) -> AsyncGenerator[object, None]:
    async with aclosing(_steps(services, ref)) as steps:
        async for step in steps:
            yield step
    folder = await file_threads.look(services.models.resolve, ref)
    yield {"done": True, "name": folder.name}


async def _steps(services: Services, ref: str) -> AsyncGenerator[object, None]:
    async with aclosing(services.pull(ref)) as steps:
        async for step in steps:
            yield {
                "file": step.file,
                "done_bytes": step.done_bytes,
                "total_bytes": step.total_bytes,
                "stage": step.stage,
            }


async def add(request: web.Request) -> web.StreamResponse:
    """Stream progress as ``pull`` does: importing a GGUF file takes a while."""
    body = parse(await read(request), AddedModel)
    return await relay(request, _adding(request.app[SERVICES], body))


async def _adding(services: Services, body: AddedModel) -> AsyncGenerator[object, None]:
    models = services.models
    place = await file_threads.look(models.locate, body.path)
    name = await file_threads.look(models.name_for, place, body.name)
    path = str(place if isinstance(place, Path) else place.path)
    if await file_threads.look(models.needs_pull, path):
        async with aclosing(_steps(services, path)) as steps:
            async for step in steps:
                yield step
    folder = await file_threads.read_whole(models.add, place, name)
    services.models_changed()
    yield {"done": True, "name": folder.name}
