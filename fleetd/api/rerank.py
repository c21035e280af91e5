"""POST /v1/rerank, /v2/rerank and /rerank: how well documents answer a query, as Cohere and Jina have it."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from fleetd import limits
from fleetd.api.generation.fields import ExactnessField, LocalOnly, Positive, decode
from fleetd.api.http.body import json_answer, read
from fleetd.api.vectors import answering
from fleetd.api.vectors.answering import Instruction
from fleetd.engine.protocol import RerankTexts
from fleetd.errors import InvalidValue

# Cohere bills a search for so many documents.
_SEARCH_DOCUMENTS = 100


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """A query, and documents as texts or as objects with a ``text``."""

    model: Annotated[str, Meta(max_length=limits.MODEL_NAME_CHARS)] = ""
    query: Annotated[str, Meta(min_length=1, max_length=limits.VECTOR_TEXT_CHARS)]
    documents: list[str | dict[str, Any]]
    top_n: Annotated[Positive | None, Meta(description="How many of the best are returned.")] = None
    return_documents: Annotated[
        bool | None, Meta(description="Return the documents' texts beside the scores.")
    ] = None
    instruction: Instruction | None = None
    truncate: Annotated[
        bool | None,
        Meta(description="False: a document that is too long is refused, instead of cut at its end."),
    ] = None
    local_only: LocalOnly = None
    exactness: ExactnessField = None
    user: str | None = None


class DocumentText(msgspec.Struct, frozen=True):
    text: str


class ScoredDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """One document: its place in the request, and its score, 0 to 1, the better the higher."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class ApiVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    search_units: float


class RerankMeta(msgspec.Struct, frozen=True):
    """What Cohere's clients read."""

    billed_units: BilledUnits
    api_version: ApiVersion = ApiVersion()


class RerankReply(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: Annotated[list[ScoredDocument], Meta(description="The best first.")]
    usage: RerankUsage
    meta: RerankMeta


async def rerank(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    body = decode(await read(request), RerankBody)
    documents = [_text(document, number) for number, document in enumerate(body.documents)]
    if not documents:
        raise InvalidValue("documents is empty.", param="documents")
    answering.check_texts(documents, "documents")
    work_id = f"rerank-{uuid.uuid4().hex}"
    work = RerankTexts(
        work_id,
        body.query,
        documents,
        instruction=body.instruction or "",
        truncate=body.truncate is not False,
    )
    job = answering.job(request, work_id, body.model, work, body.local_only, body.exactness)
    found = await answering.whole(request, job)
    scores = [float(score) for score in found if not isinstance(score, bytes)]
    best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))[: body.top_n]
    reply = RerankReply(
        work_id,
        job.name,
        [
            ScoredDocument(
                number,
                scores[number],
                DocumentText(documents[number]) if body.return_documents else UNSET,
            )
            for number in best
        ],
        RerankUsage(job.tokens, job.tokens),
        RerankMeta(BilledUnits(-(-len(documents) // _SEARCH_DOCUMENTS))),
    )
    return json_answer(reply, headers=answering.headers(job))


def _text(document: str | dict[str, Any], number: int) -> str:
    """Raises InvalidValue for an object without a text."""
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise InvalidValue(
            f"documents[{number}] has no text.",
            hint='A document is a text, or an object with a "text".',
            param="documents",
        )
    return text
