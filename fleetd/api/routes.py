"""Every address of the HTTP API, once: the application serves this table, the OpenAPI page is made from it.

``PUBLIC`` is on TCP and on the Unix socket; ``FLEET`` is on the Unix socket, and what the
page may ask of it on TCP too.
"""

from __future__ import annotations

from functools import partial

from aiohttp import hdrs

from fleetd.api import compress, health, models, rerank
from fleetd.api.anthropic import handlers as messages
from fleetd.api.anthropic.bodies import CountBody, MessagesBody
from fleetd.api.anthropic.dialect import ANTHROPIC
from fleetd.api.anthropic.objects import MessageEvent, MessageReply, TokenCount
from fleetd.api.control import cache, daemon, events, model_verbs, peers, plan
from fleetd.api.http import openapi
from fleetd.api.http.openai_dialect import CONTROL, OPENAI
from fleetd.api.http.route_entry import Route, RouteStatus
from fleetd.api.model_list import ModelList, ModelObject
from fleetd.api.ollama import bodies as ollama_bodies
from fleetd.api.ollama import embedding as ollama_embedding
from fleetd.api.ollama import handlers as ollama
from fleetd.api.ollama import model_handlers as ollama_models
from fleetd.api.ollama import objects as ollama_objects
from fleetd.api.ollama.dialect import OLLAMA
from fleetd.api.openai import bodies, embeddings, handlers, objects
from fleetd.api.page import access, files
from fleetd.api.responses import handlers as responses
from fleetd.api.responses import kept_handlers as kept_responses
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.api.responses.dialect import RESPONSES
from fleetd.api.responses.objects import (
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    Response,
    ResponseEvent,
)
from fleetd.control.compression_reply import Compression

_BODY = {
    408: RouteStatus("The body arrived too slowly."),
    413: RouteStatus("The body is too large."),
    415: RouteStatus("The body is not JSON."),
}
_MODEL = {404: RouteStatus("No such model; the nearest names are offered.")}
_KEPT = {404: RouteStatus("No such answer is kept.")}
_ENGINE = {
    429: RouteStatus("The queue is full; see Retry-After."),
    502: RouteStatus("The engine died, or a download failed."),
    504: RouteStatus("The engine stalled."),
    507: RouteStatus("The disk is full."),
}
_ENGINE_OF_RESPONSES = {
    **{status: meaning for status, meaning in _ENGINE.items() if status != 429},
    503: RouteStatus("The queue is full, the memory short, or the daemon stopping; see Retry-After."),
}
_BUSY = {529: RouteStatus("The queue is full, the memory short, or the daemon stopping; see Retry-After.")}
_NOT_NOW = {503: RouteStatus("Not now, and why.", health.Health)}
_METRICS = {
    "text/plain": {"schema": {"type": "string"}},
    "application/openmetrics-text": {"schema": {"type": "string"}},
}
_ANY_OBJECT = {"application/json": {"schema": {"type": "object"}}}

_get = partial(Route, hdrs.METH_GET)
_post = partial(Route, hdrs.METH_POST)

_rerank = partial(
    _post,
    handler=rerank.rerank,
    dialect=OPENAI,
    body=rerank.RerankBody,
    reply=rerank.RerankReply,
    statuses={**_BODY, **_MODEL, **_ENGINE},
)

_OLLAMA: tuple[Route, ...] = (
    _get(
        "/api/version",
        ollama_models.version,
        OLLAMA,
        name="ollamaVersion",
        summary="The Ollama whose API this is like.",
        reply=ollama_objects.OllamaVersion,
    ),
    _get(
        "/api/tags",
        ollama_models.tags,
        OLLAMA,
        name="ollamaTags",
        summary="Models of all machines of the fleet, as Ollama's clients read them.",
        reply=ollama_objects.OllamaTags,
    ),
    _get(
        "/api/ps",
        ollama_models.ps,
        OLLAMA,
        name="ollamaPs",
        summary="Those that are loaded.",
        reply=ollama_objects.OllamaProcesses,
    ),
    _post(
        "/api/show",
        ollama_models.show,
        OLLAMA,
        name="ollamaShow",
        summary="One model: its context, and what it can.",
        body=ollama_bodies.OllamaModelBody,
        reply=ollama_objects.OllamaShown,
        statuses={**_BODY, **_MODEL},
    ),
    _post(
        "/api/chat",
        ollama.chat,
        OLLAMA,
        name="ollamaChat",
        summary="Generate, as Ollama's clients ask; streamed unless `stream` is false.",
        body=ollama_bodies.OllamaChatBody,
        reply=ollama_objects.OllamaChatReply,
        item=ollama_objects.OllamaChatReply,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post(
        "/api/generate",
        ollama.generate_text,
        OLLAMA,
        name="ollamaGenerate",
        summary="The same for one prompt.",
        body=ollama_bodies.OllamaGenerateBody,
        reply=ollama_objects.OllamaTextReply,
        item=ollama_objects.OllamaTextReply,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post("/api/pull", ollama_models.pull, OLLAMA),
    Route(hdrs.METH_DELETE, "/api/delete", ollama_models.delete, OLLAMA),
    _post(
        "/api/embed",
        ollama_embedding.embed,
        OLLAMA,
        name="ollamaEmbed",
        summary="Vectors of texts.",
        body=ollama_embedding.OllamaEmbedBody,
        reply=ollama_embedding.OllamaEmbedReply,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post(
        "/api/embeddings",
        ollama_embedding.embeddings,
        OLLAMA,
        name="ollamaEmbeddings",
        summary="The vector of one text, in an older form.",
        body=ollama_embedding.OllamaEmbeddingsBody,
        reply=ollama_embedding.OllamaEmbeddingsReply,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post("/api/create", ollama_models.refused, OLLAMA),
    _post("/api/copy", ollama_models.refused, OLLAMA),
    _post("/api/push", ollama_models.refused, OLLAMA),
    _post("/api/blobs/{digest}", ollama_models.refused, OLLAMA),
    Route(hdrs.METH_HEAD, "/api/blobs/{digest}", ollama_models.refused, OLLAMA),
)

PUBLIC: tuple[Route, ...] = (
    _post(
        "/v1/chat/completions",
        handlers.chat_completions,
        OPENAI,
        name="chat",
        page=True,
        summary="Generate; `stream` asks for events.",
        body=bodies.ChatBody,
        reply=objects.ChatCompletion,
        item=objects.ChatChunk,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post(
        "/v1/completions",
        handlers.completions,
        OPENAI,
        name="completion",
        summary="Generate; `stream` asks for events.",
        body=bodies.CompletionBody,
        reply=objects.TextCompletion,
        item=objects.TextCompletion,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post(
        "/v1/compress",
        compress.compress,
        OPENAI,
        name="compress",
        page=True,
        summary="What smart prefill would keep of a prompt; lossy.",
        body=compress.CompressBody,
        reply=Compression,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _post(
        "/v1/embeddings",
        embeddings.embeddings,
        OPENAI,
        name="embed",
        summary="Vectors of texts; `stream` asks for parts as they are computed.",
        body=embeddings.EmbeddingsBody,
        reply=embeddings.EmbeddingList,
        item=embeddings.EmbeddingsPart,
        statuses={**_BODY, **_MODEL, **_ENGINE},
    ),
    _rerank("/v1/rerank", name="rerank", summary="How well documents answer a query, the best first."),
    _rerank("/v2/rerank", name="rerankCohere", summary="The same, where Cohere's clients ask."),
    _rerank("/rerank", name="rerankBare", summary="The same."),
    _post(
        "/v1/responses",
        responses.responses,
        RESPONSES,
        name="response",
        summary="Generate, as Codex asks; `stream` asks for events. The answer is kept for a while.",
        body=ResponsesBody,
        reply=Response,
        item=ResponseEvent,
        statuses={**_BODY, **_MODEL, **_ENGINE_OF_RESPONSES},
    ),
    _post(
        "/v1/responses/input_tokens",
        responses.input_tokens,
        RESPONSES,
        name="countInputTokens",
        summary="How many tokens the prompt of a response has.",
        body=ResponsesBody,
        reply=InputTokenCount,
        statuses={**_BODY, **_MODEL, **_ENGINE_OF_RESPONSES},
    ),
    _get(
        "/v1/responses/{id}",
        kept_responses.show,
        RESPONSES,
        name="showResponse",
        summary="An answer that is kept.",
        reply=Response,
        statuses=_KEPT,
    ),
    Route(
        hdrs.METH_DELETE,
        "/v1/responses/{id}",
        kept_responses.delete,
        RESPONSES,
        name="deleteResponse",
        summary="Forget an answer.",
        reply=DeletedResponse,
        statuses=_KEPT,
    ),
    _get(
        "/v1/responses/{id}/input_items",
        kept_responses.input_items,
        RESPONSES,
        name="listInputItems",
        summary="What an answer was asked.",
        reply=InputItemList,
        statuses=_KEPT,
    ),
    _post(
        "/v1/messages",
        messages.messages,
        ANTHROPIC,
        name="message",
        summary="Generate, as Anthropic's clients ask; `stream` asks for events.",
        body=MessagesBody,
        reply=MessageReply,
        item=MessageEvent,
        statuses={**_BODY, **_MODEL, **_ENGINE, **_BUSY},
    ),
    _post(
        "/v1/messages/count_tokens",
        messages.count_tokens,
        ANTHROPIC,
        name="countTokens",
        summary="How many tokens a prompt has.",
        body=CountBody,
        reply=TokenCount,
        statuses={**_BODY, **_MODEL, **_ENGINE, **_BUSY},
    ),
    *_OLLAMA,
    _get(
        "/v1/models",
        models.index,
        OPENAI,
        name="listModels",
        summary="Models of all machines of the fleet; in Anthropic's form with an anthropic-version header.",
        reply=ModelList,
        shared=True,
    ),
    _get(
        "/v1/models/{id:.+}",
        models.show,
        OPENAI,
        name="showModel",
        summary="One model.",
        reply=ModelObject,
        statuses=_MODEL,
        shared=True,
    ),
    _get("/", files.front, OPENAI, open=True, shared=True),
    *(_get(f"{files.PREFIX}{name}", files.serve, OPENAI, open=True) for name in files.SERVED),
    _get(
        "/health",
        health.ready,
        OPENAI,
        name="health",
        summary="Would a request be served?",
        reply=health.Health,
        statuses=_NOT_NOW,
    ),
    _get(
        "/health/ready",
        health.ready,
        OPENAI,
        name="ready",
        summary="The same.",
        reply=health.Health,
        statuses=_NOT_NOW,
    ),
    _get("/ready", health.ready, OPENAI),
    _get(
        "/health/live",
        health.live,
        OPENAI,
        name="live",
        summary="The process runs.",
        reply=health.Health,
        open=True,
    ),
    _get("/live", health.live, OPENAI, open=True),
    _get(
        "/metrics",
        health.metrics,
        OPENAI,
        name="metrics",
        summary="Prometheus metrics; OpenMetrics if accepted.",
        reply=_METRICS,
        # They tell who asks for what how often, and call models by the paths of their folders.
        secret=True,
    ),
    _get(
        "/openapi.json",
        openapi.serve,
        OPENAI,
        name="openapi",
        summary="This document.",
        reply=_ANY_OBJECT,
    ),
)

FLEET: tuple[Route, ...] = (
    _get("/fleet/v1/status", daemon.status, CONTROL, page=True),
    _get("/fleet/v1/events", events.events, CONTROL, page=True),
    _get("/fleet/v1/models", daemon.models, CONTROL, page=True),
    _get("/fleet/v1/models/search", daemon.search, CONTROL, page=True),
    _get("/fleet/v1/usage", daemon.usage, CONTROL, page=True),
    _get("/fleet/v1/settings", daemon.settings, CONTROL, page=True),
    Route(hdrs.METH_PATCH, "/fleet/v1/settings", daemon.change_setting, CONTROL, page=True),
    _get("/fleet/v1/env", daemon.env, CONTROL),
    _post("/fleet/v1/models/pull", model_verbs.pull, CONTROL, page=True),
    _post("/fleet/v1/models/add", model_verbs.add, CONTROL),
    _post("/fleet/v1/models/load", model_verbs.load, CONTROL, page=True),
    _post("/fleet/v1/models/unload", model_verbs.unload, CONTROL, page=True),
    _post("/fleet/v1/models/pin", model_verbs.pin, CONTROL, page=True),
    _post("/fleet/v1/models/unpin", model_verbs.unpin, CONTROL, page=True),
    _post("/fleet/v1/models/verify", model_verbs.verify, CONTROL),
    _post("/fleet/v1/models/remove", model_verbs.remove, CONTROL, page=True),
    _get("/fleet/v1/cache", cache.show, CONTROL, page=True),
    _post("/fleet/v1/cache/clear", cache.clear, CONTROL),
    _get("/fleet/v1/peers", peers.index, CONTROL, page=True),
    _get("/fleet/v1/diagnose", peers.diagnose, CONTROL),
    _post("/fleet/v1/peers/prompts", peers.prompts, CONTROL, page=True),
    _post("/fleet/v1/pair", peers.pair, CONTROL, page=True),
    _post("/fleet/v1/pair/answer", peers.answer, CONTROL, page=True),
    _post("/fleet/v1/join", peers.join, CONTROL, page=True),
    _post("/fleet/v1/unpair", peers.unpair, CONTROL, page=True),
    _post("/fleet/v1/plan", plan.plan, CONTROL, page=True),
    _post("/fleet/v1/plan/added", plan.added, CONTROL, page=True),
    _get("/fleet/v1/plan/machines", plan.machines, CONTROL, page=True),
    _get("/fleet/v1/traces", plan.traces, CONTROL, page=True),
    _post("/fleet/v1/page/ticket", access.ticket, CONTROL),
    _post("/fleet/v1/page/session", access.login, CONTROL, open=True),
    _post("/fleet/v1/page/logout", access.logout, CONTROL, page=True),
)

ALL_ROUTES: tuple[Route, ...] = (*PUBLIC, *FLEET)
