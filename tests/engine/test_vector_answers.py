"""Vectors and scores as the daemon sees them: workers that all these requests share, and what they refuse."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio
import vector_models
from asking import ask, run
from vector_asking import vector_events

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import (
    Accepted,
    EmbedTexts,
    Finished,
    RerankTexts,
    TextsEmbedded,
    TextsReranked,
)
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    InvalidValue,
    ModelUnsupported,
    UnsupportedParameter,
)
from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.one_loop, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[EnginePool]:
    made = EnginePool(WorkerMaker(WorkerOptions(device="cpu", max_memory_bytes=2 << 30)))
    yield made
    await made.close()


async def test_texts_are_embedded_in_their_order(pool: EnginePool, embedder: ModelFolder) -> None:
    texts = ["a" * (1 + 37 * index % 90) for index in range(limits.VECTOR_PART_TEXTS)]
    accepted, told, finished = await vector_events(pool, embedder, EmbedTexts("a", list(texts)))
    assert isinstance(accepted, Accepted)
    assert isinstance(told, TextsEmbedded)
    assert isinstance(finished, Finished)
    tokens = [len(text) + 2 for text in texts]
    assert told.tokens == tokens
    assert finished.usage.prompt_tokens == accepted.prompt_tokens == sum(tokens)
    found = np.frombuffer(told.vectors, "<f4").reshape(len(texts), told.width)
    # Texts of one length are the same text here.
    (alone,) = [
        e for e in await vector_events(pool, embedder, EmbedTexts("b", [texts[5]])) if hasattr(e, "vectors")
    ]
    assert np.allclose(found[5], np.frombuffer(alone.vectors, "<f4"), atol=1e-6)
    same = [index for index, text in enumerate(texts) if len(text) == len(texts[5])]
    assert np.allclose(found[same], found[5], atol=1e-6)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


async def test_the_order_of_documents_changes_no_score(pool: EnginePool, reranker: ModelFolder) -> None:
    documents = ["cats", "a long text about dogs and their owners", "", "cats and mice"]

    async def scores(asked: list[str]) -> list[float]:
        told = await vector_events(pool, reranker, RerankTexts("a", "cats", asked))
        return [score for event in told if isinstance(event, TextsReranked) for score in event.scores]

    forward, backward = await scores(documents), await scores(documents[::-1])
    assert forward == pytest.approx(backward[::-1], abs=1e-6)
    assert len(set(forward)) == len(documents)


async def test_a_models_shape_says_what_it_is_for(
    pool: EnginePool, embedder: ModelFolder, reranker: ModelFolder
) -> None:
    await pool.load(embedder)
    facts = pool.facts(embedder.name)
    assert facts is not None
    for told in (embedder.shape, facts.shape):
        assert (told.purpose, told.vector_width) == ("embedding", vector_models.WIDTH)
        assert told.context_tokens == 128
    assert (reranker.shape.purpose, reranker.shape.vector_width) == ("rerank", 0)
    assert facts.speed.prefill_tok_s > 0


async def test_a_model_answers_only_what_it_is_for(
    pool: EnginePool, embedder: ModelFolder, reranker: ModelFolder, chain: ModelFolder
) -> None:
    with pytest.raises(ModelUnsupported, match="does not rerank"):
        await vector_events(pool, embedder, RerankTexts("a", "x", ["y"]))
    with pytest.raises(ModelUnsupported, match="makes no vectors"):
        await vector_events(pool, reranker, EmbedTexts("a", ["x"]))
    with pytest.raises(ModelUnsupported, match="writes none"):
        await run(pool, embedder, ask("<hello>"))
    with pytest.raises(ModelUnsupported, match="makes no vectors"):
        await vector_events(pool, chain, EmbedTexts("a", ["x"]))
    assert (await run(pool, chain, ask("<hello>"))).text == "Hello there, world!"


REFUSED: list[tuple[EmbedTexts, type[Exception], str]] = [
    (
        EmbedTexts("a", ["ok", "a" * 200]),
        ContextLengthExceeded,
        "A text has 202 tokens; this model reads 128",
    ),
    (EmbedTexts("a", [[9] * 129]), ContextLengthExceeded, "A text has 129 tokens"),
    (EmbedTexts("a", ["a" * 10_000_000]), ContextLengthExceeded, "10000000 characters"),
    (EmbedTexts("a", ["x"] * 100_000), BadRequest, "100000 texts are more than 256"),
    (EmbedTexts("a", [[9], [vector_models.VOCAB]]), InvalidValue, "A text has token 300"),
    (EmbedTexts("a", [[2**31 - 1]]), InvalidValue, "2147483647"),
    (EmbedTexts("a", [[]]), InvalidValue, "A text is empty"),
    (EmbedTexts("a", ["x"], dimensions=0), InvalidValue, "dimensions"),
    (EmbedTexts("a", ["x"], dimensions=vector_models.WIDTH + 1), InvalidValue, "dimensions"),
    (EmbedTexts("a", ["x"], instruction="do"), UnsupportedParameter, "instruction"),
]


@pytest.mark.parametrize(("request_", "error", "words"), REFUSED)
async def test_what_is_out_of_bounds_is_refused_by_type_and_ends_nothing_else(
    request_: EmbedTexts, error: type[Exception], words: str, pool: EnginePool, embedder: ModelFolder
) -> None:
    with pytest.raises(error, match=words):
        await vector_events(pool, embedder, request_)
    assert len(await vector_events(pool, embedder, EmbedTexts("b", ["still here"]))) == 3


async def test_a_query_that_fills_the_model_is_refused(pool: EnginePool, reranker: ModelFolder) -> None:
    with pytest.raises(ContextLengthExceeded, match="query"):
        await vector_events(pool, reranker, RerankTexts("a", "q" * 126, ["x"]))
    with pytest.raises(ContextLengthExceeded, match="A text has") as caught:
        await vector_events(pool, reranker, RerankTexts("b", "q" * 100, ["x", "y" * 100]))
    assert caught.value.param == "documents"
    told = await vector_events(pool, reranker, RerankTexts("c", "q" * 100, ["x", "y" * 100], truncate=True))
    assert [event.tokens for event in told if isinstance(event, TextsReranked)] == [[104, 128]]


async def test_the_end_of_a_long_text_is_left_out_on_request(pool: EnginePool, embedder: ModelFolder) -> None:
    asked = EmbedTexts("a", ["a" * 2_000_000, "a" * 126, [9] * 500], truncate=True)
    (told,) = [e for e in await vector_events(pool, embedder, asked) if isinstance(e, TextsEmbedded)]
    assert told.tokens == [128, 128, 128]
    first, second, _ = np.frombuffer(told.vectors, "<f4").reshape(3, -1)
    assert np.allclose(first, second, atol=1e-6)


async def test_no_texts_are_an_answer_without_vectors(pool: EnginePool, embedder: ModelFolder) -> None:
    accepted, finished = await vector_events(pool, embedder, EmbedTexts("a", []))
    assert isinstance(accepted, Accepted)
    assert isinstance(finished, Finished)


async def test_a_client_that_leaves_ends_its_texts_and_no_others(
    pool: EnginePool, embedder: ModelFolder
) -> None:
    long = EmbedTexts("long", [[9] * 128] * limits.VECTOR_PART_TEXTS)
    async with aclosing(pool.vectors(embedder, long)) as told:
        async for event in told:
            if isinstance(event, Accepted):
                break
    engine = pool.engine(embedder)
    assert engine is not None
    assert not engine.busy
    again = await vector_events(pool, embedder, EmbedTexts("again", ["x"]))
    assert [type(event) for event in again] == [Accepted, TextsEmbedded, Finished]


async def test_a_short_request_is_not_behind_a_long_one(pool: EnginePool, embedder: ModelFolder) -> None:
    long = EmbedTexts("long", [[9] * 128] * limits.VECTOR_PART_TEXTS, background=True)
    said: list[str] = []

    async def read(request: EmbedTexts) -> None:
        async with aclosing(pool.vectors(embedder, request)) as told:
            said.extend([request.id async for event in told if isinstance(event, TextsEmbedded)])

    await pool.load(embedder)
    engine = pool.engine(embedder)
    assert engine is not None
    assert engine.pid is not None
    # It finds both when it goes on: else the long one might be over before the short one comes.
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.TaskGroup() as tasks:
        for count, request in enumerate((long, EmbedTexts("short", ["x"])), 1):
            tasks.create_task(read(request))
            while engine.status.waiting < count:  # noqa: ASYNC110  (nothing tells that it was sent)
                await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGCONT)
    assert said == ["short", "long"]
