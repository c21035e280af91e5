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
    work = generate.Work(
        top.id, body.model or "", "completions", translate.completion(body, top.id), bool(body.local_only)
    )
    count, per_prompt, echo = len(work.generates), body.n or 1, bool(body.echo)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        streamer = TextStream(top, choices=count, per_prompt=per_prompt, include_usage=usage, echo=echo)
        return await generate.stream(request, work, streamer)
    logprobs = body.logprobs is not None
    collector = TextWhole(top, choices=count, per_prompt=per_prompt, logprobs=logprobs, echo=echo)
    return await generate.whole(request, work, collector)
