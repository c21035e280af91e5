"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from fleetd.api.auth import client_of
from fleetd.api.generation import generate
from fleetd.api.generation.fields import decode
from fleetd.api.generation.reasoning import ReasoningOptions
from fleetd.api.http.body import json_answer, read
from fleetd.api.http.client_sessions import session_of
from fleetd.api.http.context import SERVICES
from fleetd.api.responses import kept
from fleetd.api.responses.bodies import InputItem, ResponsesBody
from fleetd.api.responses.objects import InputTokenCount, ReasoningConfig, Response, ResponseText
from fleetd.api.responses.render import ResponseOptions, ResponseStream, ResponseWhole
from fleetd.api.responses.translate import Translated, translate


async def responses(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    data = await read(request)
    body = decode(data, ResponsesBody)
    services = request.app[SERVICES]
    name = f"resp_{uuid.uuid4().hex}"
    items, previous = _conversation(request, body)
    asked = translate(body, name, items, previous.conversation if previous is not None else ())
    options = ResponseOptions(
        response=_begun(body, asked, name, services.names.answered(body.model)),
        tools=asked.tools,
        carry=asked.carry,
        smart=services.smart_policy(body.smart_prefill, body.exactness),
    )
    if options.response.store:
        client = client_of(request)
        options = replace(
            options,
            keep=lambda answer: kept.keep(
                services.kept_responses, client, answer, items, len(data), previous
            ),
        )
    work = generate.GenerationRequest(
        name,
        body.model or "",
        "responses",
        [asked.generate],
        bool(body.local_only),
        options.smart,
        session=session_of(request.headers, body.prompt_cache_key, body.user),
        placement=body.placement or (),
        exactness=body.exactness,
    )
    if body.stream:
        return await generate.stream(request, work, ResponseStream(options))
    return await generate.whole(request, work, ResponseWhole(options))


async def input_tokens(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = decode(await read(request), ResponsesBody)
    items, previous = _conversation(request, body)
    prompt = translate(body, "", items, previous.conversation if previous is not None else ()).generate.prompt
    counted = await generate.count(request, prompt, body.model, local_only=bool(body.local_only))
    return json_answer(InputTokenCount(counted))


def _conversation(
    request: web.Request, body: ResponsesBody
) -> tuple[Sequence[InputItem], kept.KeptResponse | None]:
    """What is asked, with the items that it names in their place, and the answer that it goes on from.

    Raises ResponseNotFound for what is not kept.
    """
    found, client = request.app[SERVICES].kept_responses, client_of(request)
    previous = None
    if body.previous_response_id is not None:
        previous = kept.answer(found, client, body.previous_response_id, "previous_response_id")
    items = [
        kept.item(found, client, item.id or "", f"input[{i}]") if item.is_reference else item
        for i, item in enumerate(body.items)
    ]
    return items, previous


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
        previous_response_id=body.previous_response_id,
        reasoning=_reasoning(body),
        store=body.store is not False,
        temperature=asked.generate.sampling.temperature,
        text=ResponseText(body.text.format) if body.text and body.text.format else ResponseText(),
        tool_choice=body.tool_choice or "auto",
        tools=asked.tools.served,
        top_p=asked.generate.sampling.top_p,
        user=UNSET if body.user is None else body.user,
        warnings=asked.warnings or UNSET,
    )


def _reasoning(body: ResponsesBody) -> ReasoningConfig:
    asked = body.reasoning
    if isinstance(asked, ReasoningOptions):
        return ReasoningConfig(asked.effort, asked.summary)
    return ReasoningConfig(asked if isinstance(asked, str) else body.reasoning_effort)
