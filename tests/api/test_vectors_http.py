"""Vectors and scores over HTTP: what each dialect sends back, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from typing import Any

import pytest
from api_fakes import MODEL, FakeVectors, serve, services
from fakes import FakePool
from vector_fakes import WIDTH, score, vector

from fleetd import limits
from fleetd.engine.protocol import EmbedTexts, RerankTexts
from fleetd.errors import ContextLengthExceeded, ModelUnsupported

TEXTS = ["one", "two words", "drei kleine Wörter", "四", "five", "six", "seven"]
RED = ["a blue dog", "a red cat", "a red fox", "nothing"]


async def asked(path: str, body: Any, fake: FakeVectors | None = None) -> tuple[int, Any, Any]:
    fake = fake or FakeVectors()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with serve(services(vectors=fake)) as site, site.client() as session:
        async with session.post(
            path, data=io.BytesIO(data), headers={"Content-Type": "application/json"}
        ) as response:
            return response.status, await response.json(), response.headers


def numbers(text: str | list[int], width: int = WIDTH) -> list[float]:
    return list(struct.unpack(f"<{width}f", vector(text, width)))


# ---- OpenAI ------------------------------------------------------------------------------------------------


async def test_vectors_come_in_the_order_of_the_texts() -> None:
    fake = FakeVectors()
    code, reply, headers = await asked("/v1/embeddings", {"model": "m", "input": TEXTS}, fake)
    assert code == 200
    assert [each["embedding"] for each in reply["data"]] == [numbers(text) for text in TEXTS]
    assert [(each["index"], each["object"]) for each in reply["data"]] == [(n, "embedding") for n in range(7)]
    tokens = sum(max(1, len(text) // 4) for text in TEXTS)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (reply["object"], reply["model"]) == ("list", MODEL)
    assert headers["X-Fleet-Plan"] == "local; nodes=this"
    assert headers["X-Fleet-Exactness"] == "exact"
    assert headers["X-Fleet-Request"] == fake.jobs[0].id


async def test_base64_holds_the_same_numbers() -> None:
    _, reply, _ = await asked("/v1/embeddings", {"model": "m", "input": "one", "encoding_format": "base64"})
    assert base64.b64decode(reply["data"][0]["embedding"]) == vector("one")


@pytest.mark.parametrize(
    ("given", "texts"),
    [("one", ["one"]), (["one"], ["one"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])],
)
async def test_a_text_is_a_string_or_token_ids_alone_or_in_a_list(given: Any, texts: Any) -> None:
    fake = FakeVectors()
    code, reply, _ = await asked("/v1/embeddings", {"model": "m", "input": given}, fake)
    assert code == 200
    assert fake.jobs[0].request.texts == texts  # type: ignore[union-attr]
    assert [each["embedding"] for each in reply["data"]] == [numbers(text) for text in texts]


async def test_what_is_asked_of_the_model_reaches_it() -> None:
    fake = FakeVectors()
    body = {
        "model": "m",
        "input": "one",
        "dimensions": 2,
        "task": "retrieval.query",
        "instruction": "Find it",
        "truncate": True,
        "local_only": True,
    }
    _, reply, _ = await asked("/v1/embeddings", body, fake)
    job = fake.jobs[0]
    wanted = EmbedTexts(job.id, ["one"], "query", 2, "Find it", truncate=True)
    assert (job.request, job.model, job.local_only) == (wanted, "m", True)
    assert len(reply["data"][0]["embedding"]) == 2


@pytest.mark.parametrize(
    ("given", "cut"), [(True, True), (False, False), ("END", True), ("NONE", False), (None, False)]
)
async def test_a_long_text_is_cut_as_clients_of_other_servers_say_it(given: Any, cut: bool) -> None:
    fake = FakeVectors()
    code, _, _ = await asked("/v1/embeddings", {"model": "m", "input": "one", "truncate": given}, fake)
    assert (code, fake.jobs[0].request.truncate) == (200, cut)


async def test_a_field_that_is_null_is_one_that_was_left_out() -> None:
    """litellm and clients in JavaScript send all fields that they know."""
    optional = ["encoding_format", "dimensions", "input_type", "instruction", "truncate", "stream", "user"]
    fake = FakeVectors()
    body = {"model": "m", "input": "one", **dict.fromkeys(optional)}
    code, reply, _ = await asked("/v1/embeddings", body, fake)
    assert (code, reply["data"][0]["embedding"]) == (200, numbers("one"))
    assert fake.jobs[0].request == EmbedTexts(fake.jobs[0].id, ["one"])
    optional = ["top_n", "return_documents", "instruction", "truncate", "local_only", "exactness"]
    body = {"model": "m", "query": "red", "documents": RED, **dict.fromkeys(optional)}
    code, reply, _ = await asked("/v1/rerank", body, fake)
    assert (code, len(reply["results"])) == (200, len(RED))
    assert fake.jobs[1].request == RerankTexts(fake.jobs[1].id, "red", RED, truncate=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "input"),
        ({"model": "m", "input": []}, "input"),
        ({"model": "m", "input": ""}, "input"),
        ({"model": "m", "input": ["one", ""]}, "input"),
        ({"model": "m", "input": [[]]}, "input"),
        ({"model": "m", "input": ["one", [1]]}, "input"),
        ({"model": "m", "input": ["one", 1]}, "input"),
        ({"model": "m", "input": [-1]}, "input[0]"),
        ({"model": "m", "input": {"text": "one"}}, "input"),
        ({"model": "m", "input": "one", "encoding_format": "int8"}, "encoding_format"),
        ({"model": "m", "input": "one", "dimensions": 0}, "dimensions"),
        ({"model": "m", "input": "one", "input_type": "poem"}, "input_type"),
        ({"model": "m", "input": "one", "dimension": 3}, "dimension"),
        ({"model": "m", "input": "one", "task": "poem"}, "task"),
        ({"model": "m", "input": "one", "truncate": "START"}, "truncate"),
        ({"model": "m", "input": "one", "task": "query", "input_type": "document"}, "task"),
        ({"model": "m", "input": "one", "output_dimension": 3}, "output_dimension"),
        ({"model": "m", "input": "one", "normalized": False}, "normalized"),
        ({"model": "m", "input": "one", "output_dtype": "int8"}, "output_dtype"),
        ({"model": "m", "input": ["x"] * (limits.VECTOR_REQUEST_TEXTS + 1)}, "input"),
        ({"model": "m", "input": ["x"] * 100_000}, "input"),
        ({"model": "m", "input": "x" * 10_000_000}, "input"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    fake = FakeVectors()
    code, reply, _ = await asked("/v1/embeddings", body, fake)
    assert (code, reply["error"]["param"]) == (400, param)
    assert reply["error"]["type"] == "invalid_request_error"
    assert not fake.jobs


async def test_half_a_character_is_read_as_other_servers_read_it() -> None:
    fake = FakeVectors()
    code, _, _ = await asked("/v1/embeddings", rb'{"model": "m", "input": "cut \ud83d"}', fake)
    assert code == 200
    assert fake.jobs[0].request.texts == ["cut \ufffd"]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_early_refusal_has_its_own_status(stream: bool) -> None:
    fake = FakeVectors()
    fake.trouble = ModelUnsupported("m answers chats.", param="model")
    code, reply, _ = await asked("/v1/embeddings", {"model": "m", "input": "one", "stream": stream}, fake)
    assert (code, reply["error"]["code"]) == (400, "model_unsupported")
    fake.trouble = ContextLengthExceeded("700 tokens; the model takes 512.")
    code, reply, _ = await asked("/v1/embeddings", {"model": "m", "input": "one", "stream": stream}, fake)
    assert (code, reply["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stream_tells_the_load_each_part_and_the_end() -> None:
    async with serve(services()) as site, site.client() as session:
        body = {"model": "m", "input": TEXTS, "stream": True, "encoding_format": "base64"}
        async with session.post("/v1/embeddings", json=body) as response:
            text = await response.text()
    said = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert said.pop() == "[DONE]"
    parts = [json.loads(each) for each in said]
    assert parts[0] == {"object": "embedding.part", "loading": "reading", "done": 1, "total": 2}
    found = {each["index"]: each["embedding"] for part in parts for each in part.get("data", ())}
    assert [base64.b64decode(found[n]) for n in range(7)] == [vector(text) for text in TEXTS]
    assert [part["done"] for part in parts[1:-1]] == [1, 4, 7]
    assert parts[-1]["plan"] == "local; nodes=this"
    assert parts[-1]["usage"]["total_tokens"] == sum(max(1, len(text) // 4) for text in TEXTS)


async def test_a_stream_whose_vectors_take_long_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.01)
    fake = FakeVectors()
    fake.gate = asyncio.Event()
    async with serve(services(vectors=fake)) as site, site.client() as session, asyncio.timeout(60):
        body = {"model": "m", "input": TEXTS, "stream": True}
        async with session.post("/v1/embeddings", json=body) as response:
            said = await response.content.readuntil(b": keepalive ")
            fake.gate.set()
            said += await response.content.read()
    assert said.endswith(b"data: [DONE]\n\n")
    assert b'"done":7' in said


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work(stream: bool) -> None:
    fake = FakeVectors()
    fake.gate = asyncio.Event()
    async with serve(services(vectors=fake)) as site, site.client() as session:
        body = {"model": "m", "input": TEXTS, "stream": stream}
        asking = asyncio.create_task(session.post("/v1/embeddings", json=body).__aenter__())
        async with asyncio.timeout(60):
            await fake.begun.wait()
            if stream:
                (await asking).close()
            else:
                asking.cancel()
            await fake.closed.wait()


# ---- Ollama ------------------------------------------------------------------------------------------------


async def test_ollamas_clients_get_its_fields() -> None:
    fake = FakeVectors()
    code, reply, _ = await asked("/api/embed", {"model": "m", "input": TEXTS}, fake)
    assert code == 200
    assert reply["embeddings"] == [numbers(text) for text in TEXTS]
    assert reply["model"] == "m"
    assert reply["prompt_eval_count"] == sum(max(1, len(text) // 4) for text in TEXTS)
    assert reply["total_duration"] > 0
    assert fake.jobs[0].request.truncate
    _, reply, _ = await asked("/api/embed", {"model": "m", "input": "one", "truncate": False}, fake)
    assert not fake.jobs[1].request.truncate
    assert reply["embeddings"] == [numbers("one")]


async def test_the_older_form_has_one_vector() -> None:
    code, reply, _ = await asked("/api/embeddings", {"model": "m", "prompt": "one", "keep_alive": "5m"})
    assert (code, reply) == (200, {"embedding": numbers("one")})


@pytest.mark.parametrize(
    ("path", "body", "reply"),
    [
        ("/api/embed", {"model": "m", "input": ""}, {"model": "m", "embeddings": []}),
        ("/api/embed", {"model": "m", "input": []}, {"model": "m", "embeddings": []}),
        ("/api/embeddings", {"model": "m", "prompt": ""}, {"embedding": []}),
    ],
)
async def test_nothing_to_embed_is_no_vector(path: str, body: Any, reply: Any) -> None:
    code, found, _ = await asked(path, body)
    assert code == 200
    found.pop("total_duration", None)
    assert found == reply


@pytest.mark.parametrize("body", [{"input": ""}, {"input": []}, {"input": ["", ""]}, {}])
async def test_ollamas_clients_load_a_model_for_vectors_without_a_text(body: dict[str, Any]) -> None:
    fake, pool = FakeVectors(), FakePool(loaded=[MODEL])
    async with serve(services(vectors=fake, pool=pool)) as site, site.client() as session:
        for seconds in (60, 0):
            sent = {"model": MODEL, "keep_alive": seconds, **body}
            async with session.post("/api/embed", json=sent) as response:
                assert (response.status, (await response.json())["embeddings"]) == (200, [])
            # A text is computed to load it, and none to unload it.
            assert (len(fake.jobs), pool.kept) == (1, {MODEL: seconds})


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_a_model_that_cannot_be_asked_is_refused_without_a_text_too(path: str) -> None:
    fake = FakeVectors()
    fake.trouble = ModelUnsupported("m answers chats.")
    code, reply, _ = await asked(path, {"model": "m"}, fake)
    assert (code, reply["error"]) == (400, "m answers chats.")
    code, reply, _ = await asked(path, {"model": "nobody-knows", "keep_alive": 0})
    assert (code, reply["code"]) == (404, "model_not_found")


async def test_an_error_of_ollamas_is_one_sentence() -> None:
    fake = FakeVectors()
    fake.trouble = ModelUnsupported("m answers chats.")
    code, reply, _ = await asked("/api/embed", {"model": "m", "input": "one"}, fake)
    assert (code, reply["error"]) == (400, "m answers chats.")
    code, reply, _ = await asked("/api/embed", {"model": "m", "input": ["x"] * 100_000})
    assert code == 400
    assert "10000" in reply["error"]


# ---- rerank ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_the_best_documents_come_first(path: str) -> None:
    fake = FakeVectors()
    code, reply, headers = await asked(path, {"model": "m", "query": "red cat", "documents": RED}, fake)
    assert code == 200
    assert [each["index"] for each in reply["results"]] == [1, 2, 0, 3]
    assert reply["results"][0] == {"index": 1, "relevance_score": score("red cat", RED[1])}
    assert reply["model"] == MODEL
    assert reply["meta"]["billed_units"] == {"search_units": 1}
    assert reply["usage"]["total_tokens"] > 0
    assert headers["X-Fleet-Exactness"] == "exact"
    job = fake.jobs[0]
    assert job.request == RerankTexts(job.id, "red cat", RED, truncate=True)


async def test_documents_are_objects_too_and_come_back_if_asked_for() -> None:
    body = {
        "model": "m",
        "query": "red cat",
        "documents": [{"text": text, "id": n} for n, text in enumerate(RED)],
        "top_n": 2,
        "return_documents": True,
    }
    _, reply, _ = await asked("/v1/rerank", body)
    assert [each["document"] for each in reply["results"]] == [{"text": RED[1]}, {"text": RED[2]}]
    assert [each["index"] for each in reply["results"]] == [1, 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m", "documents": RED}, "query"),
        ({"model": "m", "query": "", "documents": RED}, "query"),
        ({"model": "m", "query": "q", "documents": []}, "documents"),
        ({"model": "m", "query": "q", "documents": ["a", ""]}, "documents"),
        ({"model": "m", "query": "q", "documents": [{"title": "a"}]}, "documents"),
        ({"model": "m", "query": "q", "documents": RED, "top_n": 0}, "top_n"),
        ({"model": "m", "query": "q", "documents": ["x"] * 100_000}, "documents"),
        ({"model": "m", "query": "q" * 5_000_000, "documents": RED}, "query"),
        ({"model": "m", "query": "q", "documents": RED, "top_k": 2}, "top_k"),
        ({"model": "m", "query": "q", "documents": RED, "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ({"model": "m", "query": "q", "documents": [{"text": "a"}], "rank_fields": ["b"]}, "rank_fields"),
    ],
)
async def test_a_search_that_makes_no_sense_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    code, reply, _ = await asked("/v1/rerank", body)
    assert (code, reply["error"]["param"]) == (400, param)
