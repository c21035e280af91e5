"""Scoring as the daemon sees it: a real worker, beside answers, cancelled, killed."""

from __future__ import annotations

import asyncio

import pytest
from asking import GREEDY, ask, run

from fleetd.compression.document import Document
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.select import select
from fleetd.compression.token_scores import SegmentScores, merge
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Generate,
    Keep,
    Loading,
    Prefill,
    Profile,
    Score,
    Scored,
)
from fleetd.errors import BadRequest, InvalidValue, ScorerNotReady
from fleetd.models.folder import ModelFolder

TEXT = "abc def " * 300 + "which?"
SCORE = Score("s", TEXT, [(2400, 2406)], profile=Profile([(0, 0)], 1))
# Takes long enough that nothing sent after its first progress can come too late.
LONG = Score("s", TEXT * 50, profile=SCORE.profile)


async def scored(
    pool: EnginePool, folder: ModelFolder, score: Score
) -> tuple[list[Loading | Prefill], Scored]:
    """The progress, and the scores."""
    progress: list[Loading | Prefill] = []
    async with asyncio.timeout(60):
        return progress, await pool.ask(folder, score, progress=progress.append)


async def test_a_text_is_scored_beside_an_answer(pool: EnginePool, chain: ModelFolder) -> None:
    await pool.load(chain)
    answer, (progress, last) = await asyncio.gather(
        run(pool, chain, ask("<hello>")), scored(pool, chain, SCORE)
    )
    assert answer.text == "Hello there, world!"
    assert [type(event) for event in progress] == [Prefill] * len(progress)
    assert progress
    found = merge([SegmentScores.unpack(last.scores)])
    assert (found.starts[0], found.ends[-1]) == (0, 2400)
    assert last.seconds > 0
    with pytest.raises(InvalidValue, match="head"):
        await scored(pool, chain, Score("s", TEXT, profile=Profile([(99, 0)], 100)))
    with pytest.raises(BadRequest):
        await scored(pool, chain, Score("s", "", profile=SCORE.profile))


@pytest.mark.one_loop
async def test_a_worker_is_measured_while_nothing_runs(pool: EnginePool, chain: ModelFolder) -> None:
    await pool.load(chain)
    engine = pool.engine(chain)
    assert engine is not None
    assert (engine.scoring.state, pool.status()[0].scoring) == ("unmeasured", "unmeasured")
    begun = engine.scoring.left
    with pytest.raises(ScorerNotReady):
        await scored(pool, chain, Score("s", TEXT))
    async with asyncio.timeout(60):
        while engine.scoring.left == begun:  # a beat tells it
            pool.measuring.use_idle_time()
            await asyncio.sleep(0.05)
    answer = await run(pool, chain, ask("<hello>"))
    assert answer.text == "Hello there, world!"


async def test_a_question_that_is_cancelled_leaves_nothing_in_the_worker(
    pool: EnginePool, chain: ModelFolder
) -> None:
    await pool.load(chain)
    begun = asyncio.Event()
    asking = asyncio.create_task(pool.ask(chain, LONG, progress=lambda step: begun.set()))
    async with asyncio.timeout(60):
        await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    answer = await run(pool, chain, ask("<hello>"))
    assert answer.text == "Hello there, world!"
    async with asyncio.timeout(60):
        # A beat tells it.
        while pool.status()[0].kv_bytes or pool.status()[0].assisting:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.one_loop
async def test_one_familys_scores_choose_another_familys_tokens(
    pool: EnginePool, chain: ModelFolder, embedded_model: ModelFolder
) -> None:
    """A scorer of 49,152 words, and a target whose tokens are bytes: characters are what they share."""
    needle = "The secret code of the café is 48213 🔑."
    towns = ("Zürich", "Łódź", "Kraków", "Nîmes", "大阪")
    lines = [f"In {towns[n % 5]} the market was open and people came." for n in range(50)]
    lines.insert(30, needle)
    messages = [
        {"role": "user", "content": "\n".join(lines)},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the secret code of the café? <hello>"},
    ]
    document = Document.of_messages(messages)
    some = Profile([(2, 0), (5, 3)], 6)
    await pool.load(embedded_model)
    score = Score("s", document.text, list(document.questions), profile=some)
    _, last = await scored(pool, embedded_model, score)
    tokens = merge([SegmentScores.unpack(last.scores)])
    selection = select(document, tokens, SmartPrefillPolicy(enabled=True, target_ratio=0.2, mode="sparse"))
    kept = "".join(document.blocks[0].text[a:b] for a, b in selection.kept[0])
    assert needle in kept
    keep = Keep({i: list(spans) for i, spans in enumerate(selection.kept)})
    answer = await run(pool, chain, Generate("g", ChatPrompt(messages), GREEDY, keep=keep))
    (accepted,) = [event for event in answer.events if isinstance(event, Accepted)]
    dropped = len(document.text.encode()) - sum(
        len(block.text[a:b].encode())
        for block, spans in zip(document.blocks, selection.kept, strict=True)
        for a, b in spans
    )
    # Each line feed between two blocks is nobody's.
    assert accepted.prompt_tokens - accepted.kept == dropped - (len(messages) - 1)
    assert accepted.kept < 0.4 * accepted.prompt_tokens
    assert answer.text == "Hello there, world!"
