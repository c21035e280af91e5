"""What a worker answers: a real process and a tiny model, which all these requests share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from asking import GREEDY, ask, run

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Generate,
    Loading,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import BadRequest, InvalidValue
from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.one_loop, pytest.mark.asyncio(loop_scope="module")]
WEATHER = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[EnginePool]:
    made = EnginePool(WorkerMaker(WorkerOptions(device="cpu", max_memory_bytes=2 << 30)))
    yield made
    await made.close()


async def test_a_prompt_that_is_only_counted_is_not_read(pool: EnginePool, chain: ModelFolder) -> None:
    for text in ("<hello>", "x" * 5000):  # longer than the context
        asked = msgspec.structs.replace(ask(text), count_only=True, max_tokens=0)
        answer = await run(pool, chain, asked)
        accepted, finished = [event for event in answer.events if not isinstance(event, Loading)]
        assert (finished, type(accepted)) == (answer.finished, Accepted)
        # The marker is one token.
        counted = len("user: ") + (1 if text == "<hello>" else len(text))
        assert isinstance(accepted, Accepted)
        assert accepted.prompt_tokens == counted
        assert answer.finished.usage.prompt_tokens == 0


async def test_never_splits_a_code_point(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<utf8>"))
    assert answer.text == "aé€😀z"
    assert all("\ufffd" not in e.text for e in answer.events if isinstance(e, Delta))


async def test_half_a_code_point_at_the_end_is_no_text(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<utf8>", max_tokens=2))
    assert answer.text == "a"
    assert answer.finished.reason == "length"


async def test_reasoning_is_set_apart(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<ponder>"))
    assert answer.reasoning == "First, I wonder."
    assert answer.text == "So: 42."
    assert answer.finished.usage.reasoning_tokens > 0


async def test_tool_call_is_parsed_and_its_tags_never_shown(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<weather>", tools=WEATHER))
    assert answer.text == "Let me look."
    assert [(c.index, c.name, json.loads(c.arguments)) for c in answer.calls] == [
        (0, "get_weather", {"city": "Paris"})
    ]
    assert answer.finished.reason == "tool_calls"


async def test_half_a_tool_call_is_neither_a_call_nor_text(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<weather>", tools=WEATHER, max_tokens=4))
    assert answer.calls == []
    assert answer.text == "Let me look."
    assert answer.finished.reason == "length"


@pytest.mark.parametrize("stop", [["STOP"], ["P bad", "nothing"], ["TOP bad part"], ["ST", "STOP"]])
async def test_stop_string_across_tokens_is_cut_before_it(
    pool: EnginePool, chain: ModelFolder, stop: list[str]
) -> None:
    answer = await run(pool, chain, ask("<cutoff>", stop=stop))
    whole = "good part STOP bad part"
    cut = min(whole.find(s) for s in stop if s in whole)
    assert answer.text == whole[:cut]
    assert answer.finished.reason == "stop"
    assert answer.finished.stop in stop


async def test_logprobs_cover_the_text(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<hello>", top_logprobs=3))
    assert "".join(p.token for p in answer.logprobs) == answer.text
    assert [p.text_offset for p in answer.logprobs] == [0, 3, 9, 16]
    for entry in answer.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0].token == entry.token
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob


async def test_echo_scores_the_prompt(pool: EnginePool, chain: ModelFolder) -> None:
    request = Generate("r", TextPrompt("<hello>Hel"), GREEDY, max_tokens=0, top_logprobs=0, echo=True)
    answer = await run(pool, chain, request)
    assert [p.token for p in answer.logprobs] == ["<hello>", "Hel"]
    # The chain makes "Hel" the certain continuation: e^√512 against 511 ones.
    assert answer.logprobs[1].logprob > -1e-3
    assert answer.finished.usage.completion_tokens == 0


async def test_continuation_of_a_plain_prompt_keeps_its_first_space(
    pool: EnginePool, chain: ModelFolder
) -> None:
    """A chat's answer begins with a word, a continuation where the text stopped."""
    plain = Generate("r1", TextPrompt("<count>"), GREEDY, max_tokens=2)
    assert (await run(pool, chain, plain)).text == " 1 2"
    assert (await run(pool, chain, ask("<count>", "r2", max_tokens=2))).text == "1 2"
    echoed = Generate("r3", TextPrompt("<count>"), GREEDY, max_tokens=2, top_logprobs=0, echo=True)
    answer = await run(pool, chain, echoed)
    assert answer.text == "<count> 1 2"
    assert [answer.text[p.text_offset :].startswith(p.token) for p in answer.logprobs] == [True] * 3


async def test_token_prompt_outside_the_vocabulary(pool: EnginePool, chain: ModelFolder) -> None:
    with pytest.raises(InvalidValue, match="outside the vocabulary"):
        await run(pool, chain, Generate("r", TokenPrompt([3, 100000]), GREEDY))


async def test_empty_prompt(pool: EnginePool, chain: ModelFolder) -> None:
    with pytest.raises(BadRequest, match="empty"):
        await run(pool, chain, Generate("r", TextPrompt(""), GREEDY))


async def test_same_seed_same_answer_alone_or_in_company(pool: EnginePool, chain: ModelFolder) -> None:
    # So many are as likely that the chain's certainty is gone and every draw matters.
    even = dict.fromkeys(range(64), 100.0)

    async def draw(request_id: str, seed: int) -> str:
        request = ask(
            "<hello>",
            request_id,
            max_tokens=24,
            sampling=Sampling(temperature=1.0, seed=seed, logit_bias=even),
            top_logprobs=0,
        )
        return "".join(p.token for p in (await run(pool, chain, request)).logprobs)

    alone = await draw("a", 11)
    together = await asyncio.gather(*(draw(f"b{i}", seed) for i, seed in enumerate([5, 11, 7, 11])))
    assert together[1] == together[3] == alone
    assert len({together[0], together[1], together[2]}) == 3


async def test_second_turn_prefills_only_what_is_new(pool: EnginePool, chain: ModelFolder) -> None:
    long = "x" * 700
    first = [{"role": "user", "content": long + "<hello>"}]
    one = await run(pool, chain, Generate("r1", ChatPrompt(first), GREEDY))
    second = [
        *first,
        {"role": "assistant", "content": one.text},
        {"role": "user", "content": "again <hello>"},
    ]
    two = await run(pool, chain, Generate("r2", ChatPrompt(second), GREEDY))
    assert two.text == one.text
    assert two.finished.usage.cached_tokens >= 700


async def test_identical_prompt_is_answered_from_the_cache_identically(
    pool: EnginePool, chain: ModelFolder
) -> None:
    one = await run(pool, chain, ask("<hello>", "r1", top_logprobs=2))
    two = await run(pool, chain, ask("<hello>", "r2", top_logprobs=2))
    assert two.finished.usage.cached_tokens == two.finished.usage.prompt_tokens - 1
    assert [(p.token, p.logprob) for p in two.logprobs] == [(p.token, p.logprob) for p in one.logprobs]


async def test_no_request_sees_anothers_cache(pool: EnginePool, chain: ModelFolder) -> None:
    """Prompts that share beginnings, lengths and slots, all at once, against each by itself."""
    prompts = [f"{'ab' * n}{m}" for n in (1, 40, 200) for m in ("<hello>", "<cutoff>", "<ponder>")]
    together = await asyncio.gather(
        *(run(pool, chain, ask(p, f"t{i}", top_logprobs=1)) for i, p in enumerate(prompts))
    )
    again = [await run(pool, chain, ask(p, f"s{i}", top_logprobs=1)) for i, p in enumerate(prompts)]
    fresh = EnginePool(pool.maker)
    try:
        alone = [await run(fresh, chain, ask(p, f"s{i}", top_logprobs=1)) for i, p in enumerate(prompts)]
    finally:
        await fresh.close()
    for a, b, c in zip(together, again, alone, strict=True):
        assert [(p.token, p.logprob) for p in a.logprobs] == [(p.token, p.logprob) for p in c.logprobs]
        assert [(p.token, p.logprob) for p in b.logprobs] == [(p.token, p.logprob) for p in c.logprobs]
