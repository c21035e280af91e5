"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

from aiohttp import web

from fleetd.api.anthropic import translate
from fleetd.api.anthropic.bodies import CountBody, MessagesBody
from fleetd.api.anthropic.objects import TokenCount
from fleetd.api.anthropic.render import MessageOptions, MessageStream, MessageWhole
from fleetd.api.generation import generate
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.client_sessions import session_of
from fleetd.api.http.context import SERVICES


async def messages(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = decode(await read(request), MessagesBody, spelling=False)
    services = request.app[SERVICES]
    options = MessageOptions(
        id=f"msg_{uuid.uuid4().hex}",
        model=services.names.answered(body.model),
        max_tokens=services.answer_tokens if body.max_tokens is None else body.max_tokens,
        parallel_tools=translate.parallel_tools(body),
        marked=translate.marks_cache(body),
        smart=services.smart_policy(body.smart_prefill, body.exactness),
    )
    work = generate.GenerationRequest(
        options.id,
        body.model or "",
        "messages",
        [translate.generate(body, options.id)],
        bool(body.local_only),
        options.smart,
        session=session_of(request.headers, translate.user_id(body)),
        placement=body.placement or (),
        exactness=body.exactness,
    )
    if body.stream:
        return await generate.stream(request, work, MessageStream(options))
    return await generate.whole(request, work, MessageWhole(options))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = parse(await read(request), CountBody)
    prompt = translate.prompt(body)
    counted = await generate.count(request, prompt, body.model, local_only=bool(body.local_only))
    return json_answer(TokenCount(counted))
