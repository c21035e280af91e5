"""GET /fleet/v1/events: the state of the fleet as it changes. Costs nothing while no one listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from aiohttp import web

from fleetd import limits
from fleetd.api.control.changes import ChangeTracker
from fleetd.api.http.context import SERVICES
from fleetd.api.http.relay import relay
from fleetd.api.page import access
from fleetd.errors import Overloaded


async def events(request: web.Request) -> web.StreamResponse:
    """Ends when the daemon stops, or the session of the page does."""
    listeners = request.app[SERVICES].listeners
    if len(listeners) >= limits.EVENT_LISTENERS:
        raise Overloaded(
            f"{len(listeners)} listeners get events already; that is the limit.",
            hint="Close a page.",
            retry_after_s=limits.EVENTS_S,
        )
    one = object()
    listeners.add(one)
    try:
        return await relay(request, _changes(request))
    finally:
        listeners.discard(one)


async def _changes(request: web.Request) -> AsyncGenerator[object, None]:
    services = request.app[SERVICES]
    tracker = ChangeTracker()
    number, _ = services.ended(-1)
    while True:
        status = services.status()
        number, traces = services.ended(number)
        change = tracker.next(status, services.running(), traces)
        if change is not None:
            yield change
        if status.draining or not access.still_open(request):
            return
        await asyncio.sleep(limits.EVENTS_S)
