"""One request through the steps of a pipeline, without a runner around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fleetd.engine.protocol import Accepted, Generate
from fleetd.requests.job import LOCAL, Job
from fleetd.requests.metrics import Metrics
from fleetd.requests.pipeline import Pipeline
from fleetd.requests.placement.placement import THIS_NODE, Placement
from fleetd.requests.request import LocatedModel, Request


def request_of(job: Job, folder: Any, *, arrived_s: float = 0.0) -> Request:
    """A request that this machine answers with the model in ``folder``."""
    model = LocatedModel(job.model, folder.name, folder)
    here = Placement(THIS_NODE, LOCAL)
    return Request(job, model, here, Metrics("0"), arrived_s=arrived_s, at_s=1.0)


async def passed(pipeline: Pipeline, request: Request, event: Any) -> list[Any]:
    """What the client is told for an event of the engine."""
    if isinstance(event, Accepted):
        await pipeline.decide(request, event)
    return pipeline.on_event(request, event)


async def answered(
    pipeline: Pipeline, request: Request, stream: Callable[[Generate], AsyncGenerator[Any, None]]
) -> AsyncGenerator[Any, None]:
    """What the client is told in one attempt, whose engine gives ``stream``."""
    try:
        with pipeline.attempt(request):
            for planned in request.take_announced():
                yield planned
            async with aclosing(stream(request.attempt.generate)) as events:
                async for event in events:
                    for told in await passed(pipeline, request, event):
                        yield told
    finally:
        pipeline.end(request)
