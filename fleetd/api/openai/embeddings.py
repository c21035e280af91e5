"""POST /v1/embeddings: vectors of texts, whole or streamed.

``stream`` is fleetd's own: each part comes as soon as a machine has computed it, in any order, so that a
client sees how far a long request is and may keep what it has if it is cut off.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from fleetd import limits
from fleetd.api.generation.fields import ExactnessField, LocalOnly, Positive, decode
from fleetd.api.http import body as http_body
from fleetd.api.http.http_stream import HttpStream
from fleetd.api.vectors import answering
from fleetd.api.vectors.answering import Instruction
from fleetd.engine.protocol import EmbedTexts, Loading, TextKind
from fleetd.errors import InvalidValue
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.vectors.job import LongJob, TextsDone, VectorJob
from fleetd.requests.vectors.messages import texts_of
from fleetd.requests.vectors.part_answer import Found, floats

Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Vector = list[float] | str


class JobPart(msgspec.Struct, frozen=True):
    """A client's job of so many texts that it sends them in several requests."""

    id: Annotated[
        str,
        Meta(pattern=r"\A[A-Za-z0-9]{8,64}\Z", description="The same in all its requests, and in no others."),
    ]
    total: Annotated[int, Meta(ge=0, le=2**53, description="Texts in all its requests.")] = 0


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or their token ids, that are to have vectors."""

    model: Annotated[str, Meta(max_length=limits.MODEL_NAME_CHARS)] = ""
    input: Annotated[
        str | list[str | Tokens | list[Tokens]],
        Meta(description="One text or several, each as a string or as token ids."),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="`base64`: float32, little endian.")
    ] = None
    dimensions: Annotated[
        Positive | None, Meta(description="The first numbers of each vector, made one unit long again.")
    ] = None
    input_type: Annotated[
        str | None,
        Meta(description="`query` or `document`, for models that put other words before each."),
    ] = None
    task: Annotated[str | None, Meta(description="Jina's name for `input_type`.")] = None
    instruction: Instruction | None = None
    truncate: Annotated[
        bool | Literal["NONE", "END"] | None,
        Meta(
            description="Leave out the end of a text that is too long, instead of refusing it; as NVIDIA's "
            "clients say it, too."
        ),
    ] = None
    stream: Annotated[bool | None, Meta(description="Send each part as soon as it is computed.")] = None
    local_only: LocalOnly = None
    exactness: ExactnessField = None
    part_of: Annotated[
        JobPart | None,
        Meta(
            description="The job that this request is a part of, for clients that send texts in several "
            "requests: they are one row in the list of requests."
        ),
    ] = None
    user: str | None = None


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one text."""

    index: int
    embedding: Vector
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class EmbeddingsPart(
    msgspec.Struct, frozen=True, omit_defaults=True, tag="embedding.part", tag_field="object"
):
    """What has come of a streamed request: some vectors, or how far a load is. The last object has ``usage``
    and says where it ran."""

    data: list[Embedding] = []
    done: int = 0
    total: int = 0
    loading: str = ""
    model: str = ""
    usage: EmbeddingsUsage | UnsetType = UNSET
    plan: str = ""
    exactness: str = ""


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = decode(await http_body.read(request), EmbeddingsBody)
    texts = _texts(body.input)
    answering.check_texts(texts, "input")
    work_id = f"embd-{uuid.uuid4().hex}"
    work = EmbedTexts(
        work_id,
        texts,
        kind=_kind(body),
        dimensions=body.dimensions,
        instruction=body.instruction or "",
        truncate=body.truncate in (True, "END"),
    )
    job = answering.job(request, work_id, body.model, work, body.local_only, body.exactness)
    if body.part_of is not None:
        job.part_of = LongJob(body.part_of.id, body.part_of.total)
    if body.stream:
        return await _streamed(request, job, body.encoding_format or "float")
    found = await answering.whole(request, job)
    usage = EmbeddingsUsage(job.tokens, job.tokens)
    data = await asyncio.to_thread(_embeddings, range(len(texts)), found, body.encoding_format or "float")
    return await asyncio.to_thread(
        http_body.json_answer, EmbeddingList(data, job.name, usage), headers=answering.headers(job)
    )


def _texts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The texts of either form. Raises InvalidValue for a mixture."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidValue("input is empty.", param="input")
    if all(isinstance(each, int) for each in given):
        return [[each for each in given if isinstance(each, int)]]
    texts = [each for each in given if not isinstance(each, int)]
    if len(texts) < len(given) or len({type(each) for each in texts}) > 1:
        raise InvalidValue("input mixes texts and token ids.", hint="Send one form of them.", param="input")
    return texts


def _kind(body: EmbeddingsBody) -> TextKind:
    """Raises InvalidValue for a word that no client uses, and for two that differ."""
    kind, task = answering.kind_of(body.input_type, "input_type"), answering.kind_of(body.task, "task")
    if kind and task and kind != task:
        raise InvalidValue(
            "input_type and task say different things.", hint="Send one of them.", param="task"
        )
    return kind or task


async def _streamed(request: web.Request, job: VectorJob, form: str) -> web.StreamResponse:
    async with (
        aclosing(answering.run(request, job)) as events,
        aclosing(with_heartbeats(events, limits.SSE_KEEPALIVE_S)) as parts,
    ):
        # The first one, so that an early refusal has a status of its own.
        first = await anext(parts, None)
        out = HttpStream(request, answering.headers(job, ended=False))
        await out.start(f"request {job.id}")
        return await out.finish(_send(out, job, first, parts, form))


async def _send(
    out: HttpStream,
    job: VectorJob,
    first: Loading | TextsDone | None,
    parts: AsyncGenerator[Loading | TextsDone | None, None],
    form: str,
) -> None:
    done = await _told(out, job, first, 0, form)
    async for part in parts:
        done = await _told(out, job, part, done, form)
    usage = EmbeddingsUsage(job.tokens, job.tokens)
    await out.send(
        EmbeddingsPart(
            done=done,
            total=len(texts_of(job.request)),
            model=job.name,
            usage=usage,
            plan=job.plan,
            exactness=job.exactness,
        )
    )


async def _told(
    out: HttpStream, job: VectorJob, part: Loading | TextsDone | None, done: int, form: str
) -> int:
    """Send a part, or a comment if none has come for a while. ``done``: texts that had been told before;
    returns how many are now."""
    total = len(texts_of(job.request))
    if part is None:
        await out.comment(f"keepalive {done}/{total}")
    elif isinstance(part, Loading):
        await out.send(EmbeddingsPart(loading=part.stage, done=part.done, total=part.total))
    else:
        done += len(part.texts)
        data = await asyncio.to_thread(_embeddings, part.texts, part.found, form)
        await out.send(EmbeddingsPart(data=data, done=done, total=total))
    return done


def _embeddings(texts: Sequence[int], found: Sequence[Found], form: str) -> list[Embedding]:
    return [
        Embedding(text, vector_of(vector, form))
        for text, vector in zip(texts, found, strict=True)
        if isinstance(vector, bytes)
    ]


def vector_of(vector: bytes, form: str) -> Vector:
    """A vector as JSON has it."""
    return base64.b64encode(vector).decode() if form == "base64" else floats(vector).tolist()
