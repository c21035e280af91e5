"""A Keep through a real worker: from a chat's messages to what was prefilled of them."""

from __future__ import annotations

import pytest
from asking import GREEDY, run

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Accepted, ChatPrompt, Generate, Keep
from fleetd.engine.sparse_prefill.sparse import TAIL_TOKENS
from fleetd.models.folder import ModelFolder


@pytest.mark.one_loop
async def test_a_worker_follows_a_keep_or_says_why_not(pool: EnginePool, chain: ModelFolder) -> None:
    messages = [
        {"role": "system", "content": "s" * 50},
        {"role": "user", "content": "x" * 700 + "<hello>"},
    ]
    kept = Keep({1: [(0, 20), (690, 707)]})
    request = Generate("r1", ChatPrompt(messages), GREEDY, keep=kept)
    answer = await run(pool, chain, request)
    assert answer.text == "Hello there, world!"
    (accepted,) = [e for e in answer.events if isinstance(e, Accepted)]
    # Every character of these is a token.
    whole = len("system: " + 50 * "s" + "user: ") + 701
    assert (accepted.prompt_tokens, accepted.kept) == (whole, whole - 670)
    assert answer.finished.usage.prompt_tokens == whole
    picture = [{"role": "user", "content": [{"type": "text", "text": "<hello>"}]}]
    other = await run(pool, chain, Generate("r2", ChatPrompt(picture), GREEDY, keep=Keep({0: []})))
    (accepted,) = [e for e in other.events if isinstance(e, Accepted)]
    assert accepted.kept == 0
    assert "plain text" in accepted.dense_reason
    engine = pool.engine(chain)
    assert engine is not None
    assert (engine.facts.sparse, engine.facts.shape.sparse_tail) == ("", TAIL_TOKENS)
