"""Vectors and scores as the daemon sees them: a real worker, its bounds, cancels, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vector_models
from asking import ask, run

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    EmbedTexts,
    Event,
    Finished,
    Generate,
    Loading,
    PromptsRead,
    RerankTexts,
    TextPrompt,
    TextsEmbedded,
    TextsReranked,
    Tokenized,
)
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    InvalidValue,
    ModelCorrupt,
    ModelUnsupported,
    OutOfMemory,
    UnsupportedParameter,
)
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.memory_need import WORKING_BYTES


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return folder(vector_models.write(tmp_path_factory.mktemp("m") / "embedder", "bert"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return folder(vector_models.write(tmp_path_factory.mktemp("m") / "ranker", "bert", head="classifier"))


def folder(path: Path) -> ModelFolder:
    return read_folder(path, name=path.name, source="folder", revision=None)


async def events(pool: EnginePool, model: ModelFolder, request: EmbedTexts | RerankTexts) -> list[Event]:
    async with asyncio.timeout(60), aclosing(pool.vectors(model, request)) as told:
        return [event async for event in told if not isinstance(event, Loading)]


async def test_texts_are_embedded_in_their_order(pool: EnginePool, embedder: ModelFolder) -> None:
    texts = ["a" * (1 + 37 * index % 90) for index in range(limits.VECTOR_PART_TEXTS)]
    accepted, told, finished = await events(pool, embedder, EmbedTexts("a", list(texts)))
    assert isinstance(accepted, Accepted)
    assert isinstance(told, TextsEmbedded)
    assert isinstance(finished, Finished)
    tokens = [len(text) + 2 for text in texts]
    assert told.tokens == tokens
    assert finished.usage.prompt_tokens == accepted.prompt_tokens == sum(tokens)
    found = np.frombuffer(told.vectors, "<f4").reshape(len(texts), told.width)
    # Texts of one length are the same text here.
    (alone,) = [e for e in await events(pool, embedder, EmbedTexts("b", [texts[5]])) if hasattr(e, "vectors")]
    assert np.allclose(found[5], np.frombuffer(alone.vectors, "<f4"), atol=1e-6)
    same = [index for index, text in enumerate(texts) if len(text) == len(texts[5])]
    assert np.allclose(found[same], found[5], atol=1e-6)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


async def test_the_order_of_documents_changes_no_score(pool: EnginePool, reranker: ModelFolder) -> None:
    documents = ["cats", "a long text about dogs and their owners", "", "cats and mice"]

    async def scores(asked: list[str]) -> list[float]:
        told = await events(pool, reranker, RerankTexts("a", "cats", asked))
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
        await events(pool, embedder, RerankTexts("a", "x", ["y"]))
    with pytest.raises(ModelUnsupported, match="makes no vectors"):
        await events(pool, reranker, EmbedTexts("a", ["x"]))
    with pytest.raises(ModelUnsupported, match="writes none"):
        await run(pool, embedder, ask("<hello>"))
    with pytest.raises(ModelUnsupported, match="makes no vectors"):
        await events(pool, chain, EmbedTexts("a", ["x"]))
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
        await events(pool, embedder, request_)
    assert len(await events(pool, embedder, EmbedTexts("b", ["still here"]))) == 3


async def test_a_query_that_fills_the_model_is_refused(pool: EnginePool, reranker: ModelFolder) -> None:
    with pytest.raises(ContextLengthExceeded, match="query"):
        await events(pool, reranker, RerankTexts("a", "q" * 126, ["x"]))
    with pytest.raises(ContextLengthExceeded, match="A text has"):
        await events(pool, reranker, RerankTexts("b", "q" * 100, ["x", "y" * 100]))
    told = await events(pool, reranker, RerankTexts("c", "q" * 100, ["x", "y" * 100], truncate=True))
    assert [event.tokens for event in told if isinstance(event, TextsReranked)] == [[104, 128]]


async def test_the_end_of_a_long_text_is_left_out_on_request(pool: EnginePool, embedder: ModelFolder) -> None:
    asked = EmbedTexts("a", ["a" * 2_000_000, "a" * 126, [9] * 500], truncate=True)
    (told,) = [e for e in await events(pool, embedder, asked) if isinstance(e, TextsEmbedded)]
    assert told.tokens == [128, 128, 128]
    first, second, _ = np.frombuffer(told.vectors, "<f4").reshape(3, -1)
    assert np.allclose(first, second, atol=1e-6)


async def test_no_texts_are_an_answer_without_vectors(pool: EnginePool, embedder: ModelFolder) -> None:
    accepted, finished = await events(pool, embedder, EmbedTexts("a", []))
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
    again = await events(pool, embedder, EmbedTexts("again", ["x"]))
    assert [type(event) for event in again] == [Accepted, TextsEmbedded, Finished]


async def test_a_short_request_is_not_behind_a_long_one(pool: EnginePool, embedder: ModelFolder) -> None:
    long = EmbedTexts("long", [[9] * 128] * limits.VECTOR_PART_TEXTS, background=True)
    said: list[str] = []
    begun = asyncio.Event()

    async def read(request: EmbedTexts) -> None:
        async with aclosing(pool.vectors(embedder, request)) as told:
            async for event in told:
                begun.set()
                if isinstance(event, TextsEmbedded):
                    said.append(request.id)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read(long))
        await begun.wait()
        await read(EmbedTexts("short", ["x"]))
    assert said == ["short", "long"]


async def test_a_model_for_vectors_counts_as_memory_and_makes_room(
    make_pool: Callable[..., EnginePool], embedder: ModelFolder, chain: ModelFolder
) -> None:
    pool = make_pool()
    await events(pool, embedder, EmbedTexts("a", ["x"]))
    assert pool.held_bytes > 0
    assert [status.model for status in pool.status()] == [embedder.name]
    await pool.unload(embedder.name)
    with pytest.raises(OutOfMemory):
        await events(make_pool(max_memory_bytes=1 << 20), embedder, EmbedTexts("a", ["x"]))


async def test_a_model_for_vectors_and_one_that_chats_make_room_for_each_other_unless_pinned(
    embedder: ModelFolder, chain: ModelFolder
) -> None:
    """In a memory that holds one of them, and where each takes some."""
    pinned: set[str] = set()
    most = WorkerOptions(device="cpu", max_memory_bytes=WORKING_BYTES + (64 << 20))
    pool = EnginePool(WorkerMaker(most), pinned=lambda: pinned)

    def loaded() -> list[str]:
        return [status.model for status in pool.status() if status.state == "ready"]

    try:
        await events(pool, embedder, EmbedTexts("a", ["x"]))
        await pool.load(chain)
        assert loaded() == [chain.name]
        await events(pool, embedder, EmbedTexts("b", ["x"]))
        assert loaded() == [embedder.name]
        pinned.add(embedder.name)
        with pytest.raises(OutOfMemory):
            await pool.load(chain)
        assert loaded() == [embedder.name]
    finally:
        await pool.close()


async def test_a_model_that_lacks_weights_or_steps_is_refused_by_type(
    pool: EnginePool, tmp_path: Path
) -> None:
    steps = vector_models.steps("Transformer", "Pooling", "LSTM")
    odd = vector_models.write(tmp_path / "odd", "bert", recipe={"modules.json": steps})
    with pytest.raises(ModelUnsupported, match="LSTM"):
        await events(pool, folder(odd), EmbedTexts("a", ["x"]))
    lacking = vector_models.write(tmp_path / "lacking-embedding", "gemma")
    with pytest.raises(ModelCorrupt, match=r"dense\.0"):
        await events(pool, folder(lacking), EmbedTexts("a", ["x"]))
    bare = vector_models.write(tmp_path / "bare", "bert")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        await events(pool, folder(bare), EmbedTexts("a", ["x"]))


async def test_a_worker_for_vectors_is_told_while_a_chat_s_prompt_is_read(
    pool: EnginePool, embedder: ModelFolder, chain: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bool]] = []
    send = EngineProcess._send

    def spied(worker: EngineProcess, command: Any) -> None:
        if isinstance(command, PromptsRead):
            told.append((worker.settings.name, command.reading))
        send(worker, command)

    monkeypatch.setattr(EngineProcess, "_send", spied)
    await pool.load(embedder)
    begun = asyncio.Event()

    async def chat() -> None:
        request = Generate("chat", TextPrompt("hello"), max_tokens=3)
        async with aclosing(pool.stream(chain, request)) as answer:
            async for event in answer:
                if isinstance(event, Tokenized | Accepted):
                    assert told == [(embedder.name, True)]
                    begun.set()
                elif isinstance(event, Delta):
                    assert told == [(embedder.name, True), (embedder.name, False)]

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(chat())
        await begun.wait()
        found = await events(pool, embedder, EmbedTexts("beside", ["x"]))
    assert isinstance(found[-1], Finished)
    assert told == [(embedder.name, True), (embedder.name, False)]
    counted = Generate("count", TextPrompt("hello"), max_tokens=1, count_only=True)
    async with aclosing(pool.stream(chain, counted)) as answer:
        assert [type(event) async for event in answer][-1] is Finished
    assert len(told) == 2


async def test_a_worker_that_was_loaded_while_a_prompt_is_read_is_told_too(
    pool: EnginePool, embedder: ModelFolder, chain: ModelFolder
) -> None:
    await pool.load(chain)
    engine = pool.engine(chain)
    assert engine is not None
    engine._note_prompt("chat", True)
    assert isinstance((await events(pool, embedder, EmbedTexts("a", ["x"])))[-1], Finished)
    vectors = pool.engine(embedder)
    assert vectors is not None
    assert vectors._told_of_prompts
    engine._note_prompt("chat", False)
    assert not vectors._told_of_prompts
