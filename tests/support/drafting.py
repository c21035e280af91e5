"""Engine workers that draft for each other on one box: the part of a daemon that introduces them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from request_events import RequestEvents
from sharing import settle

from bench.harness.delayed_sockets import Delayed
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Accepted, Delta, DraftFor, Generate, StreamTag
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.errors import FleetError

# A dozen frames of drafts.
DRAFTED_BYTES = 1500


async def answer(home: EngineProcess, request: Generate) -> RequestEvents:
    """Without drafts of others."""
    told = RequestEvents()
    async for event in home.stream(request):
        told.events.append(event)
    return told


@asynccontextmanager
async def following(
    drafter: EngineProcess, follow: DraftFor
) -> AsyncIterator[tuple[RequestEvents, asyncio.Task[None]]]:
    """A follow that is accepted, or has failed."""
    told, ready = RequestEvents(), asyncio.Event()

    async def run() -> None:
        try:
            async for event in drafter.follow(follow):
                told.events.append(event)
                ready.set()
        except FleetError as error:
            told.error = error
        ready.set()

    task = asyncio.create_task(run())
    try:
        await ready.wait()
        yield told, task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def drafted(
    home: EngineProcess,
    drafter: EngineProcess,
    request: Generate,
    *,
    begun: Callable[[], None] = lambda: None,
    leave: bool = False,
) -> tuple[RequestEvents, RequestEvents]:
    """The answer with drafts from another worker, and that one's own account.

    The prompt of a ``shared`` request is kept waiting until there are drafts: tiny models are quick.

    Args:
        begun: called when the answer's first text comes.
        leave: the daemon gives the drafter up when the first text comes.
    """
    told, follow, wire = RequestEvents(), DraftFor(f"{request.id}.drafts"), Delayed(0.0)
    try:
        async with following(drafter, follow) as (followed, task):
            assert followed.error is None, followed.error
            async for event in home.stream(request):
                if isinstance(event, Delta) and not told.of(Delta):
                    begun()
                    if leave:
                        task.cancel()
                told.events.append(event)
                if isinstance(event, Accepted):
                    key = os.urandom(32)
                    await home.give_stream(StreamTag(request.id, DRAFTS, key, "connector"), wire.near)
                    await drafter.give_stream(StreamTag(follow.id, DRAFTS, key, "acceptor"), wire.far)
                    if event.waits:
                        await settle(lambda: wire.came > DRAFTED_BYTES)
                        home.alone(request.id)
            if drafter.state == "ready" and not leave:
                await asyncio.wait({task}, timeout=60)
                assert followed.error is not None or followed.events[1:], "it did not see the stream end"
        return told, followed
    finally:
        wire.close()
