"""/fleet/v1/*: control, on the Unix socket only (auth.py answers 404 elsewhere)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec.structs import replace

from fleetd import limits
from fleetd.api.control.offered import Rooms, found_models, offered
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.api.http.services import Services
from fleetd.api.model_list import abilities, loaded_models
from fleetd.control.daemon_status import ClientSettings, DaemonStatus, HttpAddress
from fleetd.control.model_listing import (
    FoundModels,
    ImportableModel,
    InstalledModel,
    ModelFit,
    ModelInPart,
    ModelListing,
    UnlistedModel,
)
from fleetd.control.setting_view import SettingChange
from fleetd.control.usage_report import SPANS
from fleetd.engine.protocol import Ready
from fleetd.errors import InvalidValue, ModelCorrupt
from fleetd.models import catalog, file_threads, heads
from fleetd.models.catalog import CatalogEntry
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.folder import ModelFolder
from fleetd.models.names import is_name
from fleetd.models.weights import HEAD_NAME, unused_files
from fleetd.text.host_port import host_port

_DAYS = (1, 3650)


async def status(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    return json_answer(msgspec.structs.replace(services.status(), running=list(services.running())))


async def models(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    if machine := other_machine(services, request.query.get("on", "")):
        return json_answer(await services.fleet.look(machine))
    return json_answer(await listing(services))


def other_machine(services: Services, on: str) -> str:
    """The machine that ``on`` names; "" for this one. Raises InvalidValue for several."""
    if "," in on:
        raise InvalidValue(
            "Models of one machine are managed at a time.", hint="Ask once for each machine.", param="on"
        )
    return "" if not on or services.fleet.is_here(on) else on


async def shown(services: Services, words: str) -> ModelListing | FoundModels:
    """What another machine is told: as ``listing`` and ``found``, without where anything is on the disk."""
    if words:
        return await found(services, words)
    whole = await listing(services)
    installed = [replace(model, path="", ignored=[]) for model in whole.installed if is_name(model.name)]
    return replace(whole, installed=installed, importable=[], unlisted=[])


async def listing(services: Services) -> ModelListing:
    """The models that this machine has or could have."""
    # The engines' state belongs to the event loop; only the disk is asked from a thread.
    loaded = loaded_models(services)
    facts = {name: found for name in loaded if (found := services.pool.facts(name)) is not None}
    return await file_threads.look(_listing, services, loaded, facts, services.status())


def _listing(
    services: Services, loaded: frozenset[str], facts: Mapping[str, Ready], status: DaemonStatus
) -> ModelListing:
    """What is here and what could be. A digest may cost minutes of reading, so it is left to verify."""
    folders = list(services.models.installed())
    rooms = _rooms(services, status)
    fits = {folder.name: rooms.of_folder(folder) for folder in folders}
    importable = [
        ImportableModel(found.name, found.program, str(found.path), found.size_bytes)
        for found in services.models.importable()
    ]
    unlisted = [UnlistedModel(str(each.path), each.reason) for each in services.models.unlisted()]
    return ModelListing(
        installed=_installed(services, folders, loaded, facts, fits, _Drafters.of(services, status, folders)),
        catalog=offered({folder.name for folder in folders}, rooms),
        memory_reason=rooms.memory_reason,
        memory=status.memory,
        evictable_bytes=sum(engine.memory_bytes for engine in status.engines if engine.evictable),
        importable=importable,
        unlisted=unlisted,
        in_part=_in_part(services, status),
    )


def _in_part(services: Services, status: DaemonStatus) -> list[ModelInPart]:
    """The models of which single layers are here."""
    in_use = {engine.part_of or engine.model for engine in status.engines}
    return [
        ModelInPart(
            each.name,
            each.layers,
            each.of_layers,
            each.disk_bytes,
            each.weights_bytes,
            each.own,
            each.from_hub,
            # A part for another machine has the beginning of its digest in its name.
            loaded=any(name.partition("~")[0] == each.name for name in in_use),
        )
        for each in services.models.parts_here()
    ]


# A model whose layers are divided reads no head, and tells nothing of one.
_DIVIDED = "off: its layers are divided between machines"


class _Drafters(msgspec.Struct, frozen=True):
    """What drafts for the models here."""

    # The model that the settings name; "" for none. ``reads``: it drafts from hidden states, in the worker of
    # each model and in place of the model's own head.
    model: str
    reads: bool
    # What loaded models say of what drafts from their hidden states, by their names.
    heads: Mapping[str, str]
    # Nothing drafts: the settings say so.
    off: bool = False

    @classmethod
    def of(cls, services: Services, status: DaemonStatus, folders: Sequence[ModelFolder]) -> _Drafters:
        """Reads the settings' file."""
        values = {setting.key: setting.value for setting in services.settings().settings}
        model = str(values.get("speculation.draft_model") or "")
        reads = any(each.name == model and drafter_kind(each.config) is not None for each in folders)
        said = {engine.model: _DIVIDED if engine.ranks else engine.draft_head for engine in status.engines}
        return cls(model, reads, said, str(values.get("speculation.mode") or "") == "off")

    def for_model(self, folder: ModelFolder) -> tuple[str, str]:
        """``drafter`` and ``drafter_off`` of an InstalledModel."""
        if folder.purpose != "chat" or drafter_kind(folder.config) is not None:
            return "", ""
        own, said = self._own_head(folder), self.heads.get(folder.name, "")
        # Behind a head that drafts stands why the drafter that goes before it does not.
        does, _, off = said.partition("off: ")
        if self.off:
            off = "speculation.mode is off"
        elif self.reads and does and off:
            off = f"{off}; the model's own head does"
        name = self.model if self.reads else own
        if not name:
            # A model that drafts token by token tells nothing of itself before it drafts.
            name, off = ("" if self.model == folder.name else self.model), off if self.off else ""
        return name, off if name else ""

    @staticmethod
    def _own_head(folder: ModelFolder) -> str:
        """ "head", in a model's files, "sidecar", beside them, or ""."""
        try:
            file = heads.head_file(folder.path, folder.config)
        except (ModelCorrupt, OSError):
            return ""
        return ("sidecar" if file == HEAD_NAME else "head") if file else ""


def _installed(
    services: Services,
    folders: Sequence[ModelFolder],
    loaded: frozenset[str],
    facts: Mapping[str, Ready],
    fits: Mapping[str, ModelFit],
    drafters: _Drafters,
) -> list[InstalledModel]:
    """The models of ``folders``. ``facts``: what the workers of those that are ``loaded`` have reported."""
    by_name = {entry.name: entry for entry in catalog.entries()}
    by_hub_id = {entry.hub_id: entry for entry in catalog.entries() if entry.hub_id}
    found = []
    for folder in folders:
        entry = by_name.get(folder.name) or by_hub_id.get(folder.name)
        able = abilities(folder.path, entry, facts.get(folder.name))
        drafter, drafter_off = drafters.for_model(folder)
        found.append(
            InstalledModel(
                name=folder.name,
                source=folder.source,
                architecture=folder.architecture,
                weights_bytes=folder.weights_bytes,
                context_tokens=folder.shape.context_tokens,
                roles=list(entry.roles) if entry is not None else [_use(folder)],
                path=str(folder.path),
                loaded=folder.name in loaded,
                pinned=folder.name in services.pinned.names,
                fit=fits[folder.name],
                tools=able.shown_tools,
                thinking=able.thinking,
                images=folder.images,
                ignored=unused_files(Path(folder.path)),
                drafter=drafter,
                drafter_off=drafter_off,
            )
        )
    return found


def _use(folder: ModelFolder) -> str:
    """What a model is good for that is not in the catalog."""
    return folder.purpose if drafter_kind(folder.config) is None else "draft"


async def search(request: web.Request) -> web.StreamResponse:
    """Models of the hub by words of their names; only a person's question gets here, and only it is sent."""
    services, words = request.app[SERVICES], " ".join(request.query.get("words", "").split())
    _check(words)
    if machine := other_machine(services, request.query.get("on", "")):
        return json_answer(await services.fleet.look(machine, words))
    return json_answer(await found(services, words))


def _check(words: str) -> None:
    """Raises InvalidValue for words that the hub is not asked for."""
    if not 2 <= len(words) <= limits.HUB_SEARCH_CHARS:
        raise InvalidValue(f"words has to have 2 to {limits.HUB_SEARCH_CHARS} characters.", param="words")


async def found(services: Services, words: str) -> FoundModels:
    """The models of the hub that have these words, and whether they fit here.

    Raises InvalidValue, DownloadFailed.
    """
    _check(words)
    page = await services.search(words)
    folders = await file_threads.look(lambda: list(services.models.installed()))
    names = {folder.name for folder in folders} | {entry.hub_id or "" for entry in _entries(folders)}
    return found_models(words, page, names, _rooms(services, services.status()))


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
