"""/fleet/v1/peers, pairing and unpairing: control of the fleet, on the Unix socket only (auth.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec
from aiohttp import hdrs, web

from fleetd import limits
from fleetd.api import body as http_body
from fleetd.api.context import SERVICES
from fleetd.api.control.daemon import Route
from fleetd.api.openai.bodies import parse
from fleetd.api.openai.models import json
from fleetd.api.relay import relay
from fleetd.control.pairing_events import PairingEvent

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.CONTROL_TEXT_CHARS)]


# Who may see prompts has no default: a field that is missing or misspelt must not decide it.
class PairingAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the person at this machine says about the one that met it."""

    node_id: _Text
    admit: bool
    sees_prompts: bool


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: _Text
    sees_prompts: bool
    host: _Text | None = None


class PeerRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: _Text


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: _Text
    allowed: bool


async def index(request: web.Request) -> web.StreamResponse:
    return json(request.app[SERVICES].fleet.view())


async def diagnose(request: web.Request) -> web.StreamResponse:
    found = await request.app[SERVICES].fleet.diagnose()
    return json(found if found is not None else {})


async def pair(request: web.Request) -> web.StreamResponse:
    """The window is open for as long as the asker listens."""
    return await relay(request, _encoded(request.app[SERVICES].fleet.pair()))


async def answer(request: web.Request) -> web.StreamResponse:
    said = parse(await http_body.read(request), PairingAnswer)
    request.app[SERVICES].fleet.answer(said.node_id, admit=said.admit, sees_prompts=said.sees_prompts)
    return json({"ok": True})


async def join(request: web.Request) -> web.StreamResponse:
    asked = parse(await http_body.read(request), Join)
    fleet = request.app[SERVICES].fleet
    return await relay(request, _encoded(fleet.join(asked.code, asked.host, sees_prompts=asked.sees_prompts)))


async def unpair(request: web.Request) -> web.StreamResponse:
    ref = parse(await http_body.read(request), PeerRef)
    return json(await request.app[SERVICES].fleet.unpair(ref.peer))


async def prompts(request: web.Request) -> web.StreamResponse:
    asked = parse(await http_body.read(request), Prompts)
    return json(await request.app[SERVICES].fleet.allow_prompts(asked.peer, asked.allowed))


async def _encoded(events: AsyncGenerator[PairingEvent, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield msgspec.json.encode(event)


ROUTES: tuple[Route, ...] = (
    (hdrs.METH_GET, "/fleet/v1/peers", index),
    (hdrs.METH_GET, "/fleet/v1/diagnose", diagnose),
    (hdrs.METH_POST, "/fleet/v1/peers/prompts", prompts),
    (hdrs.METH_POST, "/fleet/v1/pair", pair),
    (hdrs.METH_POST, "/fleet/v1/pair/answer", answer),
    (hdrs.METH_POST, "/fleet/v1/join", join),
    (hdrs.METH_POST, "/fleet/v1/unpair", unpair),
)
