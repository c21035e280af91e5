"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from aiohttp import web

from fleetd.api import body as http_body
from fleetd.api import generate
from fleetd.api.context import SERVICES
from fleetd.api.openai import bodies, translate
from fleetd.api.openai.render import ChatStream, ChatWhole, ReplyHeader
from fleetd.api.services import Services
from fleetd.compression.policy import resolve


def head(services: Services, prefix: str, model: str | None) -> ReplyHeader:
    """Id, time and names of one reply. The model keeps the name the client used; "default" gets its own."""
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    name = services.default_model if model in (None, "", "default") else model
    return ReplyHeader(answer_id, int(time.time()), name, f"fleetd-{services.version}")


async def completions(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = bodies.decode(await http_body.read(request), bodies.ChatBody)
    top = head(request.app[SERVICES], "chatcmpl", body.model)
    smart = resolve(body.smart_prefill, request.app[SERVICES].smart_defaults)
    generates = translate.chat(body, top.id)
    work = generate.GenerationRequest(
        top.id, body.model or "", "chat", generates, bool(body.local_only), smart, len(generates)
    )
    count = len(work.generates)
    parallel_tools = body.parallel_tool_calls is not False
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        streamer = ChatStream(
            top, choices=count, include_usage=usage, parallel_tools=parallel_tools, smart=smart
        )
        return await generate.stream(request, work, streamer)
    collector = ChatWhole(
        top, choices=count, logprobs=bool(body.logprobs), parallel_tools=parallel_tools, smart=smart
    )
    return await generate.whole(request, work, collector)
