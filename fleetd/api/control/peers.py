"""/fleet/v1/peers, pairing and unpairing: control of the fleet, on the Unix socket only (auth.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.api.http.relay import relay

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


class Unpair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``keep``: of the machines that are here on its word alone, those that stay."""

    peer: _Text
    keep: Annotated[list[_Text], msgspec.Meta(max_length=limits.ROSTER_MEMBERS)] = []


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``fleet``: all prompts of the fleet, else those typed on this machine."""

    peer: _Text
    allowed: bool
    fleet: bool


async def index(request: web.Request) -> web.StreamResponse:
    return json_answer(request.app[SERVICES].fleet.view())


async def diagnose(request: web.Request) -> web.StreamResponse:
    found = await request.app[SERVICES].fleet.diagnose()
    return json_answer(found if found is not None else {})


async def pair(request: web.Request) -> web.StreamResponse:
    """The window is open for as long as the asker listens."""
    return await relay(request, request.app[SERVICES].fleet.pair())


async def answer(request: web.Request) -> web.StreamResponse:
    said = parse(await read(request), PairingAnswer)
    request.app[SERVICES].fleet.answer(said.node_id, admit=said.admit, sees_prompts=said.sees_prompts)
    return json_answer({"ok": True})


async def join(request: web.Request) -> web.StreamResponse:
    asked = parse(await read(request), Join)
    fleet = request.app[SERVICES].fleet
    return await relay(request, fleet.join(asked.code, asked.host, sees_prompts=asked.sees_prompts))


async def unpair(request: web.Request) -> web.StreamResponse:
    asked = parse(await read(request), Unpair)
    return json_answer(await request.app[SERVICES].fleet.unpair(asked.peer, asked.keep))


async def prompts(request: web.Request) -> web.StreamResponse:
    asked = parse(await read(request), Prompts)
    fleet = request.app[SERVICES].fleet
    return json_answer(await fleet.allow_prompts(asked.peer, asked.allowed, fleet=asked.fleet))
