"""/health, /health/live, /health/ready and /metrics. Health is read off the engines' progress."""

from __future__ import annotations

from typing import Annotated, Literal

from aiohttp import hdrs, web
from msgspec import Meta, Struct

from fleetd import limits
from fleetd.api.http.body import json_answer
from fleetd.api.http.context import SERVICES
from fleetd.api.http.deadlines import is_trusted, needs_token
from fleetd.control.daemon_status import DaemonStatus

_RETRY_AFTER_S = "5"


class EngineHealth(Struct, frozen=True):
    """A worker's part in the daemon's health."""

    model: str
    #: As in ``EngineStatus``.
    state: str
    progress_age_s: Annotated[
        float | None, Meta(description="Seconds since the worker's last step; null if it has taken none.")
    ]


class Health(Struct, frozen=True):
    """Whether a request would be served now."""

    status: Literal["ok", "stalled", "draining", "starting"]
    reason: Annotated[str, Meta(description="Why not, or which models are not loaded; may be empty.")] = ""
    engines: list[EngineHealth] = []


def judge(status: DaemonStatus) -> Health:
    """What the engines' progress says. Pure."""
    engines = [EngineHealth(engine.model, engine.state, engine.progress_age_s) for engine in status.engines]
    if status.draining:
        return Health("draining", "The daemon is stopping and takes no new requests.", engines)
    for engine in status.engines:
        age_s = engine.progress_age_s
        if engine.busy and engine.state == "ready" and age_s > limits.ENGINE_STALL_REPORT_S:
            reason = f"{engine.model} has work but took no step for {age_s:.0f} s."
            return Health("stalled", reason, engines)
    if not status.ready:
        return Health("starting", "The daemon is starting.", engines)
    # A model that is loading, or failed to load, does not stop others from being served: the status stays.
    reasons = [
        f"{engine.model} is {engine.state}."
        for engine in status.engines
        if engine.state in ("loading", "failed")
    ]
    return Health("ok", " ".join(reasons), engines)


async def ready(request: web.Request) -> web.StreamResponse:
    """200 when a request would be served, 503 with the reason when it would not."""
    health = judge(request.app[SERVICES].status())
    if not is_trusted(request) and not needs_token(request):
        health = Health(health.status)  # a model's name may be the path of its folder
    if health.status == "ok":
        return json_answer(health)
    return json_answer(health, status=503, headers={hdrs.RETRY_AFTER: _RETRY_AFTER_S})


async def live(_request: web.Request) -> web.StreamResponse:
    """The process runs and its loop turns; that is all, so it needs no token."""
    return json_answer(Health("ok"))


async def metrics(request: web.Request) -> web.StreamResponse:
    body, content_type = request.app[SERVICES].metrics.render(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})
