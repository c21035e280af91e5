"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
import uuid

from aiohttp import web
from msgspec import UNSET

from fleetd.api import generate
from fleetd.api.body import json_answer, read
from fleetd.api.client_sessions import session_of
from fleetd.api.context import SERVICES
from fleetd.api.openai import bodies
from fleetd.api.reasoning import ReasoningOptions
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.api.responses.objects import InputTokenCount, ReasoningConfig, Response
from fleetd.api.responses.render import ResponseOptions, ResponseStream, ResponseWhole
from fleetd.api.responses.translate import Translated, translate
from fleetd.compression.policy import resolve


async def responses(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = bodies.decode(await read(request), ResponsesBody)
    services = request.app[SERVICES]
    name = f"resp_{uuid.uuid4().hex}"
    asked = translate(body, name)
    options = ResponseOptions(
        response=_begun(body, asked, name, services.names.named(body.model)),
        tools=asked.tools,
        carry=asked.carry,
        smart=resolve(body.smart_prefill, services.smart_defaults),
    )
    work = generate.GenerationRequest(
        name,
        body.model or "",
        "responses",
        [asked.generate],
        bool(body.local_only),
        options.smart,
        session=session_of(request.headers, body.prompt_cache_key, body.user),
    )
    if body.stream:
        return await generate.stream(request, work, ResponseStream(options))
    return await generate.whole(request, work, ResponseWhole(options))


async def input_tokens(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = bodies.decode(await read(request), ResponsesBody)
    prompt = translate(body, "").generate.prompt
    counted = await generate.count(request, prompt, body.model, local_only=bool(body.local_only))
    return json_answer(InputTokenCount(counted))


def _begun(body: ResponsesBody, asked: Translated, name: str, model: str) -> Response:
    """The answer before anything of it is known: what was asked for."""
    return Response(
        id=name,
        created_at=int(time.time()),
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=_reasoning(body),
        temperature=body.temperature,
        tool_choice=body.tool_choice or "auto",
        tools=asked.tools.served,
        top_p=body.top_p,
        user=body.user,
        warnings=asked.warnings or UNSET,
    )


def _reasoning(body: ResponsesBody) -> ReasoningConfig:
    asked = body.reasoning
    if isinstance(asked, ReasoningOptions):
        return ReasoningConfig(asked.effort, asked.summary)
    return ReasoningConfig(asked if isinstance(asked, str) else body.reasoning_effort)
