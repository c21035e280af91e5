"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from msgspec.structs import replace

from fleetd.api.generation import generate
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import read
from fleetd.api.http.client_sessions import session_of
from fleetd.api.http.context import SERVICES
from fleetd.api.openai import bodies, translate
from fleetd.api.openai.render import ChatStream, ChatWhole, ReplyOptions, TextStream, TextWhole
from fleetd.engine.protocol import Generate


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = decode(await read(request), bodies.ChatBody)
    reply = _options(request, "chatcmpl", body)
    generates = translate.chat(body, reply.id)
    reply = replace(
        reply,
        choices=len(generates),
        per_prompt=len(generates),
        logprobs=bool(body.logprobs),
        parallel_tools=body.parallel_tool_calls is not False,
    )
    work = _work(request, "chat", body, reply, generates)
    if body.stream:
        return await generate.stream(request, work, ChatStream(reply))
    return await generate.whole(request, work, ChatWhole(reply))


async def completions(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = decode(await read(request), bodies.CompletionBody)
    reply = _options(request, "cmpl", body)
    generates = translate.completion(body, reply.id)
    reply = replace(
        reply,
        choices=len(generates),
        per_prompt=body.n or 1,
        logprobs=body.logprobs is not None,
        echo=bool(body.echo),
    )
    work = _work(request, "completions", body, reply, generates)
    if body.stream:
        return await generate.stream(request, work, TextStream(reply))
    return await generate.whole(request, work, TextWhole(reply))


def _options(request: web.Request, prefix: str, body: bodies.Common) -> ReplyOptions:
    """What every reply has. The model keeps the name that the client used."""
    services = request.app[SERVICES]
    return ReplyOptions(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=services.names.answered(body.model),
        fingerprint=f"fleetd-{services.version}",
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        smart=services.smart_policy(body.smart_prefill, body.exactness),
    )


def _work(
    request: web.Request,
    route: str,
    body: bodies.Common,
    reply: ReplyOptions,
    generates: Sequence[Generate],
) -> generate.GenerationRequest:
    return generate.GenerationRequest(
        reply.id,
        body.model or "",
        route,
        generates,
        bool(body.local_only),
        reply.smart,
        reply.per_prompt,
        session_of(request.headers, body.prompt_cache_key, body.user),
        body.placement or (),
        body.exactness,
    )
