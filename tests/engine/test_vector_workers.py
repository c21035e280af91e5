"""Workers for vectors beside those of chats: their memory, what they lack, and what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import vector_models
from vector_asking import vector_events, vectors_folder

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    EmbedTexts,
    Finished,
    Generate,
    PromptsRead,
    TextPrompt,
    Tokenized,
)
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import ModelCorrupt, ModelUnsupported, OutOfMemory
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES


async def test_a_model_for_vectors_counts_as_memory_and_makes_room(
    make_pool: Callable[..., EnginePool], embedder: ModelFolder, chain: ModelFolder
) -> None:
    pool = make_pool()
    await vector_events(pool, embedder, EmbedTexts("a", ["x"]))
    assert pool.held_bytes > 0
    assert [status.model for status in pool.status()] == [embedder.name]
    await pool.unload(embedder.name)
    with pytest.raises(OutOfMemory):
        await vector_events(make_pool(max_memory_bytes=1 << 20), embedder, EmbedTexts("a", ["x"]))


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
        await vector_events(pool, embedder, EmbedTexts("a", ["x"]))
        await pool.load(chain)
        assert loaded() == [chain.name]
        await vector_events(pool, embedder, EmbedTexts("b", ["x"]))
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
        await vector_events(pool, vectors_folder(odd), EmbedTexts("a", ["x"]))
    lacking = vector_models.write(tmp_path / "lacking-embedding", "gemma")
    with pytest.raises(ModelCorrupt, match=r"dense\.0"):
        await vector_events(pool, vectors_folder(lacking), EmbedTexts("a", ["x"]))
    bare = vector_models.write(tmp_path / "bare", "bert")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        await vector_events(pool, vectors_folder(bare), EmbedTexts("a", ["x"]))


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
        found = await vector_events(pool, embedder, EmbedTexts("beside", ["x"]))
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
    assert isinstance((await vector_events(pool, embedder, EmbedTexts("a", ["x"])))[-1], Finished)
    vectors = pool.engine(embedder)
    assert vectors is not None
    assert vectors._told_of_prompts
    engine._note_prompt("chat", False)
    assert not vectors._told_of_prompts
