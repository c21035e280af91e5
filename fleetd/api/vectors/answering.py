"""Runs one request for vectors or scores and gathers what comes back.

texts ──checked──► VectorJob ──► TextsDone, in any order ──► found, in the order of the texts
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated
from urllib.parse import quote

from aiohttp import web
from msgspec import Meta

from fleetd import limits
from fleetd.api.http import token
from fleetd.api.http.client_name import client_name
from fleetd.api.http.context import SERVICES
from fleetd.engine.protocol import Loading, TextKind
from fleetd.errors import Draining, InvalidValue
from fleetd.requests.job import Exactness
from fleetd.requests.vectors.job import TextsDone, VectorJob
from fleetd.requests.vectors.messages import TextsRequest, texts_of
from fleetd.requests.vectors.part_answer import Found

#: What a model is told to do with texts.
Instruction = Annotated[
    str, Meta(max_length=limits.VECTOR_TEXT_CHARS, description="In place of the model's own words.")
]

#: What clients call the two kinds of texts, lower case: Cohere's, Voyage's, Jina's and NVIDIA's words.
KINDS: Mapping[str, TextKind] = {
    "": "",
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}


def job(
    request: web.Request,
    work_id: str,
    model: str,
    work: TextsRequest,
    local_only: bool | None,
    exactness: Exactness | None,
) -> VectorJob:
    """The job of a request; what it does not say about exactness is as the settings have it."""
    exact = (exactness or request.app[SERVICES].exactness) == "exact"
    return VectorJob(work_id, model, work, bool(local_only), exact, client_name(request))


def run(request: web.Request, job: VectorJob) -> AsyncGenerator[Loading | TextsDone, None]:
    """The parts of a job, in any order. Raises FleetError."""
    services = request.app[SERVICES]
    token.check_model(request, job.model)
    if services.vectors is None:
        raise Draining("The daemon is stopping and takes no new work.", hint="Retry in a moment.")
    return services.vectors.run(job)


async def whole(request: web.Request, job: VectorJob) -> list[Found]:
    """What was found for each text, once all of a job is done. Raises FleetError."""
    gathered: list[Found] = [0.0] * len(texts_of(job.request))
    async with aclosing(run(request, job)) as parts:
        async for part in parts:
            if isinstance(part, TextsDone):
                for text, found in zip(part.texts, part.found, strict=True):
                    gathered[text] = found
    return gathered


def headers(job: VectorJob, *, ended: bool = True) -> Mapping[str, str]:
    """The headers of an answer: where it ran, and whether one machine would have found the same bytes."""
    if not ended:
        return {"X-Fleet-Request": job.id, "X-Fleet-Plan": "undecided; nodes="}
    return {
        "X-Fleet-Request": job.id,
        # A machine's name is whatever its owner typed; a header holds one line of ASCII.
        "X-Fleet-Plan": quote(job.plan, safe=" ;=,"),
        "X-Fleet-Exactness": job.exactness,
    }


def check_texts(texts: Sequence[str | list[int]], param: str) -> None:
    """Raises InvalidValue for more texts, or longer ones, than one request may have, and for empty ones."""
    if len(texts) > limits.VECTOR_REQUEST_TEXTS:
        raise InvalidValue(
            f"{param} has {len(texts)} texts; one request may have {limits.VECTOR_REQUEST_TEXTS}.",
            hint="Send them in several requests.",
            param=param,
        )
    for number, text in enumerate(texts):
        if not text:
            raise InvalidValue(f"{param}[{number}] is empty.", hint="Leave it out.", param=param)
        if len(text) > limits.VECTOR_TEXT_CHARS:
            raise InvalidValue(
                f"{param}[{number}] has {len(text)} characters; a text may have {limits.VECTOR_TEXT_CHARS}.",
                hint="Cut it into pieces, and ask for a vector of each.",
                param=param,
            )


def kind_of(word: str | None, param: str) -> TextKind:
    """Raises InvalidValue for a word that no client uses."""
    kind = KINDS.get((word or "").lower())
    if kind is None:
        raise InvalidValue(f"{param} cannot be {word!r:.64}.", hint="Use query or document.", param=param)
    return kind
