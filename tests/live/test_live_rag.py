"""What Open WebUI's search in documents sends, to a real daemon: requests as its public source makes them.

Its program is half a gigabyte. By default it asks for the vector of each piece of a document in a request of
its own, with a connection of its own, for all pieces at once; and whatever fails, fails the document.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon
from live_fleet import LiveFleet
from vector_models import write

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

MINILM, JUDGE = "all-minilm-l6-v2", "judge"
# A report of some eighty pages.
PIECES = [
    f"The report of week {n} says that {n % 17} ships lay at the quay. " + "More came. " * (n % 9)
    for n in range(200)
]


@pytest.fixture(scope="module")
def alpha(minilm: ModelFolder, short_dir: Path, programs: Programs) -> Iterator[LiveDaemon]:
    judge = write(short_dir / "rag-models" / JUDGE, "xlm-roberta", head="classifier")
    with LiveFleet(short_dir / "rag", {"alpha": [minilm.path, judge]}, programs=programs) as fleet:
        for name in (MINILM, JUDGE):
            fleet["alpha"].control("POST", "/fleet/v1/models/load", {"model": name})
        yield fleet["alpha"]


async def sent(daemon: LiveDaemon, path: str, body: Any) -> Any:
    """The answer to a request, which has a connection of its own."""
    headers = {"Authorization": f"Bearer {daemon.key}", "X-OpenWebUI-User-Name": "Ada"}
    url = daemon.base_url.removesuffix("/v1") + path
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        reply = await response.json()
        assert response.status == 200, reply
        return reply


async def of_openais(daemon: LiveDaemon, pieces: list[str]) -> list[list[float]]:
    reply = await sent(daemon, "/v1/embeddings", {"input": pieces, "model": MINILM})
    return [each["embedding"] for each in reply["data"]]


async def of_ollamas(daemon: LiveDaemon, pieces: list[str]) -> list[list[float]]:
    found: list[list[float]] = (await sent(daemon, "/api/embed", {"input": pieces, "model": MINILM}))[
        "embeddings"
    ]
    return found


def packed(vectors: list[list[float]]) -> list[bytes]:
    return [struct.pack(f"<{len(vector)}f", *vector) for vector in vectors]


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        (of_openais, 1),
        (of_ollamas, 16),
        pytest.param(of_openais, 16, marks=pytest.mark.long),
        pytest.param(of_ollamas, 1, marks=pytest.mark.long),
    ],
)
async def test_a_document_gets_its_vectors_by_requests_at_once(
    alpha: LiveDaemon, engine: Any, size: int
) -> None:
    batches = [PIECES[first : first + size] for first in range(0, len(PIECES), size)]
    found = await asyncio.gather(*(engine(alpha, batch) for batch in batches))
    whole = packed(await engine(alpha, PIECES))
    assert packed([vector for batch in found for vector in batch]) == whole
    (question,) = packed(await engine(alpha, [PIECES[7]]))
    assert question == whole[7]


async def test_its_external_reranker_orders_what_was_found(alpha: LiveDaemon) -> None:
    query, documents = "How many ships lay at the quay?", PIECES[:20]
    body = {"model": JUDGE, "query": query, "documents": documents, "top_n": len(documents)}
    reply = await sent(alpha, "/v1/rerank", body)
    by_index = sorted(reply["results"], key=lambda each: each["index"])
    assert [each["index"] for each in by_index] == list(range(len(documents)))
    assert len({each["relevance_score"] for each in by_index}) > 1
