"""/fleet/v1/cache: prompts on this machine's disk."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from fleetd.api.http.body import json_answer
from fleetd.api.http.context import SERVICES
from fleetd.control.cache_report import CacheReport


async def show(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    if services.disk_cache is None:
        return json_answer(CacheReport())
    report = await asyncio.to_thread(services.disk_cache.report)
    return json_answer(msgspec.structs.replace(report, machines=services.fetches()))


async def clear(request: web.Request) -> web.StreamResponse:
    """Answers with what there was. Prompts in the workers' memory go, too: a person who clears wants that."""
    services = request.app[SERVICES]
    services.pool.forget_prompts()
    if services.disk_cache is None:
        return json_answer(CacheReport())
    return json_answer(await asyncio.to_thread(services.disk_cache.clear))
