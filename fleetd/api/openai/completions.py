"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web

from fleetd.api import body as http_body
from fleetd.api import generate
from fleetd.api.context import SERVICES
from fleetd.api.openai import bodies, translate
from fleetd.api.openai.chat import head
from fleetd.api.openai.render import TextStream, TextWhole
from fleetd.compression.policy import resolve


async def completions(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = bodies.decode(await http_body.read(request), bodies.CompletionBody)
    top = head(request.app[SERVICES], "cmpl", body.model)
    smart = resolve(body.smart_prefill, request.app[SERVICES].smart_defaults)
    generates = translate.completion(body, top.id)
    work = generate.GenerationRequest(
        top.id, body.model or "", "completions", generates, bool(body.local_only), smart, body.n or 1
    )
    count, per_prompt, echo = len(work.generates), body.n or 1, bool(body.echo)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        streamer = TextStream(
            top, choices=count, per_prompt=per_prompt, include_usage=usage, echo=echo, smart=smart
        )
        return await generate.stream(request, work, streamer)
    logprobs = body.logprobs is not None
    collector = TextWhole(
        top, choices=count, per_prompt=per_prompt, logprobs=logprobs, echo=echo, smart=smart
    )
    return await generate.whole(request, work, collector)
