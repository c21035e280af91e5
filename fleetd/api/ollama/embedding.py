"""POST /api/embed and its older form /api/embeddings."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from fleetd.api.generation.fields import ExactnessField, LocalOnly, Positive
from fleetd.api.http.body import json_answer, parse, read
from fleetd.api.http.context import SERVICES
from fleetd.api.ollama.bodies import KeepAlive, ModelName
from fleetd.api.ollama.residency import keep, unload
from fleetd.api.ollama.translate import keep_alive_s
from fleetd.api.vectors import answering
from fleetd.engine.protocol import EmbedTexts
from fleetd.requests.vectors.job import VectorJob
from fleetd.requests.vectors.part_answer import Found, floats

_NS = 1_000_000_000
# Computing any text loads the model.
_LOADING = "a"


class OllamaEmbedFields(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[ModelName, Meta(min_length=1)]
    truncate: Annotated[
        bool | None, Meta(description="False: a text that is too long is refused, instead of cut at its end.")
    ] = None
    keep_alive: KeepAlive | None = None
    local_only: LocalOnly = None
    exactness: ExactnessField = None


class OllamaEmbedBody(OllamaEmbedFields, frozen=True, kw_only=True):
    """One text or several. Without a text the model is loaded."""

    input: str | list[str] = ""
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(OllamaEmbedFields, frozen=True, kw_only=True):
    prompt: str = ""


class OllamaEmbedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbeddingsReply(msgspec.Struct, frozen=True):
    embedding: list[float]


async def embed(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = parse(await read(request), OllamaEmbedBody)
    texts = [body.input] if isinstance(body.input, str) else body.input
    began_s = time.monotonic()
    job, found = await _found(request, body, texts, "input", body.dimensions)
    vectors = await asyncio.to_thread(_numbers, found)
    reply = OllamaEmbedReply(
        request.app[SERVICES].names.answered(body.model),
        vectors,
        total_duration=round((time.monotonic() - began_s) * _NS),
        load_duration=round(job.load_s * _NS),
        prompt_eval_count=job.tokens if found else 0,
    )
    return json_answer(reply, headers=answering.headers(job))


async def embeddings(request: web.Request) -> web.StreamResponse:
    """The same for one text. Raises FleetError."""
    body = parse(await read(request), OllamaEmbeddingsBody)
    job, found = await _found(request, body, [body.prompt], "prompt", None)
    vectors = _numbers(found)
    return json_answer(OllamaEmbeddingsReply(vectors[0] if vectors else []), headers=answering.headers(job))


async def _found(
    request: web.Request, body: OllamaEmbedFields, texts: list[str], param: str, dimensions: int | None
) -> tuple[VectorJob, list[Found]]:
    """The vectors of the texts. If none of them says anything, there are none, as Ollama has it: the model is
    loaded, or with a ``keep_alive`` of 0 unloaded."""
    seconds = keep_alive_s(body.keep_alive)
    work_id = f"ollama-{uuid.uuid4().hex}"
    given: list[str | list[int]] = list(texts) if any(texts) else [_LOADING]
    answering.check_texts(given, param)
    work = EmbedTexts(work_id, given, dimensions=dimensions, truncate=body.truncate is not False)
    job = answering.job(request, work_id, body.model, work, body.local_only, body.exactness)
    if seconds == 0 and not any(texts):
        await unload(request, body.model)
        return job, []
    try:
        found = await answering.whole(request, job)
        return job, found if any(texts) else []
    finally:
        # The time begins when the answer ends.
        await keep(request, body.model, seconds)


def _numbers(found: list[Found]) -> list[list[float]]:
    return [floats(vector).tolist() for vector in found if isinstance(vector, bytes)]
