"""POST /api/chat and /api/generate."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime

from aiohttp import web

from fleetd.api.generation import generate
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.client_sessions import session_of
from fleetd.api.http.context import SERVICES
from fleetd.api.ollama import translate
from fleetd.api.ollama.bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody
from fleetd.api.ollama.objects import OllamaFigures
from fleetd.api.ollama.render import OllamaReplyOptions, OllamaStream, OllamaWhole, reply
from fleetd.api.ollama.residency import keep, unload
from fleetd.engine.protocol import Generate

_NS = 1_000_000_000


async def chat(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = parse(await read(request), OllamaChatBody)
    if not body.messages:
        return await _load(request, body, chat=True)
    return await _answer(request, body, translate.chat(body, _name()), chat=True)


async def generate_text(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = parse(await read(request), OllamaGenerateBody)
    if not body.prompt:
        return await _load(request, body, chat=False)
    return await _answer(request, body, translate.generate(body, _name()), chat=False)


def _name() -> str:
    return f"ollama-{uuid.uuid4().hex}"


async def _answer(
    request: web.Request, body: OllamaBody, work: Generate, *, chat: bool
) -> web.StreamResponse:
    seconds = translate.keep_alive_s(body.keep_alive)
    options = _options(request, body, chat=chat)
    asked = _request(request, body, work, "chat" if chat else "completions", options)
    try:
        if body.streamed:
            return await generate.stream(request, asked, OllamaStream(options))
        return await generate.whole(request, asked, OllamaWhole(options))
    finally:
        # The time begins when the answer ends.
        await keep(request, body.model, seconds)


async def _load(request: web.Request, body: OllamaBody, *, chat: bool) -> web.StreamResponse:
    """Nothing to answer: load the model, or with a ``keep_alive`` of 0 unload it. One object either way."""
    seconds = translate.keep_alive_s(body.keep_alive)
    options = _options(request, body, chat=chat)
    if seconds == 0:
        await unload(request, body.model)
    else:
        work = translate.loading(body, _name())
        await generate.prompt_tokens(request, _request(request, body, work, "count_tokens", options))
        await keep(request, body.model, seconds)
    took_ns = round(options.elapsed_s() * _NS)
    figures = OllamaFigures(
        done_reason="unload" if seconds == 0 else "load", total_duration=took_ns, load_duration=took_ns
    )
    return json_answer(reply(options, figures=figures))


def _options(request: web.Request, body: OllamaBody, *, chat: bool) -> OllamaReplyOptions:
    began_s = time.monotonic()
    return OllamaReplyOptions(
        model=request.app[SERVICES].names.answered(body.model),
        chat=chat,
        began=datetime.now(UTC),
        elapsed_s=lambda: time.monotonic() - began_s,
        smart=request.app[SERVICES].smart_policy(None, body.exactness),
    )


def _request(
    request: web.Request, body: OllamaBody, work: Generate, route: str, options: OllamaReplyOptions
) -> generate.GenerationRequest:
    smart = None if work.count_only else options.smart
    local_only, session = bool(body.local_only), session_of(request.headers)
    return generate.GenerationRequest(
        work.id,
        body.model,
        route,
        [work],
        local_only,
        smart,
        session=session,
        placement=body.placement or (),
        exactness=body.exactness,
    )
