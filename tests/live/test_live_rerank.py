"""Documents are reranked by real daemons: by a small sequence classifier of random weights."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon
from live_fleet import LiveFleet
from test_live_vectors import post
from vector_models import write

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

JUDGE, QUERY = "judge", "Who keeps the bridge?"
DOCUMENTS = [
    f"The keeper of bridge {n} is called {name}." for n in range(20) for name in ("Ada", "Tom", "Eve")
]


@pytest.fixture(scope="module")
def pair(short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    folder = write(short_dir / JUDGE, "xlm-roberta", head="classifier")
    models = {"alpha": [folder], "beta": [folder], "gamma": []}
    with LiveFleet(short_dir / "rerank", models, programs=programs) as fleet:
        fleet.until_usable()
        fleet.load("alpha", JUDGE, seen_by="beta")
        fleet.load("beta", JUDGE, seen_by="alpha")
        for name in ("alpha", "beta"):
            fleet.until_has("gamma", name, JUDGE, "loaded")
        yield fleet


def ranked(daemon: LiveDaemon, documents: list[Any], path: str = "/v1/rerank", **fields: Any) -> Any:
    status, headers, reply = post(
        daemon, path, {"model": JUDGE, "query": QUERY, "documents": documents, **fields}
    )
    assert status == 200, reply
    return reply["results"], headers


def test_the_order_of_documents_changes_no_score(pair: LiveFleet) -> None:
    first, _ = ranked(pair["alpha"], DOCUMENTS, local_only=True)
    scores = [each["relevance_score"] for each in first]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > len(scores) / 2
    shuffled = list(DOCUMENTS)
    random.Random(3).shuffle(shuffled)
    again, _ = ranked(pair["alpha"], shuffled, local_only=True)
    assert [each["relevance_score"] for each in again] == scores
    assert [shuffled[each["index"]] for each in again[:10]] == [
        DOCUMENTS[each["index"]] for each in first[:10]
    ]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_few_of_the_best_with_their_texts(pair: LiveFleet, path: str) -> None:
    every, _ = ranked(pair["alpha"], DOCUMENTS)
    objects = [{"text": text} for text in DOCUMENTS]
    best, _ = ranked(pair["alpha"], objects, path, top_n=3, return_documents=True)
    assert [each["index"] for each in best] == [each["index"] for each in every[:3]]
    assert [each["document"]["text"] for each in best] == [DOCUMENTS[each["index"]] for each in best]


def test_a_machine_without_the_model_asks_one_that_has_it(pair: LiveFleet) -> None:
    alone, _ = ranked(pair["alpha"], DOCUMENTS, local_only=True)
    there, headers = ranked(pair["gamma"], DOCUMENTS)
    assert there == alone
    assert "this" not in headers["x-fleet-plan"]
    assert headers["x-fleet-exactness"] == "exact"


@pytest.mark.long
def test_coheres_library(pair: LiveFleet) -> None:
    if importlib.util.find_spec("cohere") is None:
        pytest.skip("cohere is not installed (pip install cohere): its library was NOT tried")
    import cohere

    alpha = pair["alpha"]
    every, _ = ranked(alpha, DOCUMENTS)
    with httpx.Client() as http:
        client = cohere.ClientV2(alpha.key, base_url=alpha.base_url.removesuffix("/v1"), httpx_client=http)
        found = client.rerank(model=JUDGE, query=QUERY, documents=DOCUMENTS, top_n=5)
    assert [each.index for each in found.results] == [each["index"] for each in every[:5]]
    assert [each.relevance_score for each in found.results] == [each["relevance_score"] for each in every[:5]]
