"""The trace of a machine that answered, which belongs to the story of the request here."""

from __future__ import annotations

import asyncio

from fleetd.errors import FleetError
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import BackgroundTasks
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.remote.remote import RemoteJob
from fleetd.requests.request import Request

log = get_logger("fleetd.requests")


class RemoteTraces(PipelineStep):
    """The step that asks a machine which answered for its own trace. No client waits for it."""

    def __init__(self) -> None:
        self._running = BackgroundTasks()

    def closed(self, request: Request) -> asyncio.Task[None] | None:
        if request.attempt.remote is None or request.finished is None:
            return None
        return self._running.start(self._fetch(request, request.attempt.remote))

    async def close(self) -> None:
        await self._running.close()

    async def _fetch(self, request: Request, remote: RemoteJob) -> None:
        try:
            request.attempt.there = await remote.trace()
        except (FleetError, TimeoutError) as error:
            log.info("trace.not_told", request=request.id, node=request.answered_by, reason=str(error))
