"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web

from fleetd.api import body as http_body
from fleetd.api import generate, requests, translate
from fleetd.api.chat import head
from fleetd.api.context import SERVICES
from fleetd.api.render import TextStream, TextWhole


async def completions(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = requests.decode(await http_body.read(request), requests.CompletionBody)
    top = head(request.app[SERVICES], "cmpl", body.model)
    work = generate.Work(top.id, body.model or "", "completions", translate.completion(body, top.id))
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return await generate.stream(
            request, work, TextStream(top, per_prompt=body.n or 1, include_usage=usage)
        )
    collector = TextWhole(
        top, choices=len(work.generates), per_prompt=body.n or 1, logprobs=body.logprobs is not None
    )
    return await generate.whole(request, work, collector)
