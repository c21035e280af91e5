"""/fleet/v1/models/*: what people do with the models of this machine and, with ``on``, of another one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api.control.daemon import other_machine
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.api.http.relay import relay
from fleetd.api.http.services import Services
from fleetd.control.model_change import ModelDone, Split, Verb
from fleetd.control.model_listing import ModelVerdict
from fleetd.errors import InvalidValue
from fleetd.models import file_threads

_Ref = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class ManagedModel(msgspec.Struct, frozen=True):
    """The body of the POSTs that change something, but for ``add``."""

    model: _Ref
    # The machine that is to do it, by its name or id; "" is this one.
    on: Annotated[str, msgspec.Meta(max_length=limits.CONTROL_TEXT_CHARS)] = ""
    # The answer is a stream of events, as that of ``pull`` always is.
    stream: bool = False
    # Of a load: the machines that are to hold the model together, "this" first.
    placement: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=limits.CONTROL_TEXT_CHARS)]],
        msgspec.Meta(max_length=limits.PLACEMENT_MACHINES),
    ] = []
    # How they hold it: each some of its layers, or a part of every layer ("tensors"); None leaves it to the
    # planner.
    split: Split | None = None


class VerifiedModel(msgspec.Struct, frozen=True):
    """The body of POST /fleet/v1/models/verify. ``full``: every byte is read."""

    model: _Ref
    full: bool = True


class AddedModel(msgspec.Struct, frozen=True):
    """The body of POST /fleet/v1/models/add: an absolute path, or a name from ``importable``; "" chooses."""

    path: _Ref
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""


def _handler(verb: Verb) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        services, asked = request.app[SERVICES], parse(await read(request), ManagedModel)
        if asked.placement and (verb != "load" or asked.on):
            raise InvalidValue("Only a load here names several machines.", param="placement")
        if asked.split == "tensors" and not asked.placement:
            raise InvalidValue("Layers are divided between machines that are named.", param="split")
        if machine := other_machine(services, asked.on):
            events = services.fleet.manage(machine, verb, asked.model)
        else:
            over = services.over(asked.placement) if asked.placement else None
            events = services.operations.run(verb, asked.model, over, asked.split if over else None)
        if asked.stream or verb == "pull":
            return await relay(request, events)
        answer: dict[str, object] = {"ok": True}
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ModelDone) and event.split is not msgspec.UNSET:
                    answer |= {"split": event.split, "why": event.why}
        return json_answer(answer)

    return handle


pull = _handler("pull")
load = _handler("load")
unload = _handler("unload")
pin = _handler("pin")
unpin = _handler("unpin")
remove = _handler("remove")


async def verify(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    asked = parse(await read(request), VerifiedModel)
    folder = await file_threads.look(services.models.resolve, asked.model)
    await file_threads.read_whole(services.verify, folder.path, full=asked.full)
    digest = await file_threads.read_whole(services.models.digest, folder)
    return json_answer(ModelVerdict(digest=str(digest)))


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
        async with aclosing(services.operations.pulled(path)) as steps:
            async for step in steps:
                yield step
    folder = await file_threads.read_whole(models.add, place, name)
    services.models_changed()
    yield ModelDone(name=folder.name)
