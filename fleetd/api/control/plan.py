"""/fleet/v1/plan and /fleet/v1/traces: how prompts would be, and were, prefilled with others' help.

On the Unix socket only (auth.py).
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from fleetd import limits
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.control.prefill_plan import AddedQuestion, KnownMachines, PlanQuestion
from fleetd.errors import InvalidValue
from fleetd.plan import known_machines

_LAST = 20


async def plan(request: web.Request) -> web.StreamResponse:
    """What is planned here and now; no token of the text leaves this machine."""
    services = request.app[SERVICES]
    question = parse(await read(request), PlanQuestion)
    if (question.tokens is None) == (question.text is None):
        raise InvalidValue("Give either tokens, a number, or text.", param="tokens")
    return json_answer(await services.plan(question))


async def added(request: web.Request) -> web.StreamResponse:
    """How soon first tokens would come with one more machine."""
    question = parse(await read(request), AddedQuestion)
    return json_answer(await request.app[SERVICES].added(question))


async def machines(request: web.Request) -> web.StreamResponse:
    """The machines that ``added`` knows."""
    return json_answer(KnownMachines([machine.name for machine in known_machines.MACHINES]))


async def traces(request: web.Request) -> web.StreamResponse:
    text = request.query.get("last", str(_LAST))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:8]) <= limits.TRACES:
        raise InvalidValue(f"last has to be a number from 1 to {limits.TRACES}.", param="last")
    request_id = request.query.get("id", "")
    if len(request_id) > limits.CONTROL_TEXT_CHARS:
        raise InvalidValue("No request has an id that long.", param="id")
    found = request.app[SERVICES].traces
    return json_answer(await asyncio.to_thread(found, int(text), request_id))
