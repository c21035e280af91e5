"""What every family of the table can do beside being cut: forks of a kept prompt, and drafts of any kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
from mlx_lm.models.cache import make_prompt_cache
from shared_runs import as_bytes, staged
from speculating import Run, Scripted, lying, perfect, right_for
from tiny_architectures import FAMILIES, VOCAB, tiny

from fleetd.engine.loading import load_tokenizer
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix_cache import PrefixCache
from fleetd.engine.shared_prefill.fingerprint import any_chunks
from fleetd.engine.speculation.exactness_probe import ProbePlan, probe

# The quick run has samples of both in test_checkpoints.py and test_speculation_states.py.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cpu_installed")]
# Once their windows are full, the last bit of log-probabilities differs after wide blocks. Tokens do not.
ROUNDED = {"baichuan_m1"}
# Of a prompt; the windows of the tiny models are 32 tokens.
BORDERS = [70, 36]
TOKENS = [(7 * i + 3) % 64 for i in range(110)]
DRAFTS: dict[str, Callable[[list[int]], Scripted]] = {
    "good": perfect,
    "bad": lambda whole: right_for(whole, 0),
    "adversarial": lambda whole: lying(VOCAB, 6),
}


def prefilled(model: Any, tokens: list[int], prefix: PrefixCache) -> tuple[int, Prefiller]:
    """The tokens that were kept already, and the prompt computed on from there."""
    hit = prefix.fetch(tokens)
    cache = hit.cache or make_prompt_cache(model)
    alone = Prefiller(model, tokens, cache, hit.tokens, state_bytes=prefix.state_bytes, borders=BORDERS)
    while alone.step(512):
        pass
    return hit.tokens, alone


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_prompt_that_forks_at_any_token_is_answered_as_without_the_kept_one(name: str) -> None:
    model, prefix = tiny(name), PrefixCache(1 << 40)
    stage, layout = staged(model)
    exact = any_chunks(stage, layout, "cpu")
    _, first = prefilled(model, TOKENS, prefix)
    prefix.store(TOKENS[:-1], first.cache, states=first.states)
    for at in range(1, len(TOKENS), 8):
        fork = [*TOKENS[:at], 90, 91, 92]
        kept, warm = prefilled(model, fork, prefix)
        assert kept <= at
        assert kept >= max((border for border in BORDERS if border <= at), default=0)
        _, cold = prefilled(model, fork, PrefixCache(1 << 40))
        answers = [model(mx.array([fork[-1:]]), cache=one.cache) for one in (warm, cold)]
        if exact:
            assert as_bytes(answers[0]) == as_bytes(answers[1])
        else:
            assert mx.allclose(*answers, rtol=1e-3, atol=1e-3), "where chunks matter, more than rounding"
    prefix.validate()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_good_bad_and_adversarial_drafts_leave_the_plain_answer(name: str, chain_path: Path) -> None:
    """As the probe of its load has them: where blocks are other sums than single tokens, none is tried."""
    model, tokenizer = tiny(name), load_tokenizer(chain_path)
    verdict = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=ProbePlan.of("cpu", 0.0))

    def answered(speculation: Any, *sources: Scripted) -> Run:
        run = Run(model, tokenizer, speculation)
        run.submit("r", TOKENS[:8], *sources, max_tokens=40, top_logprobs=2)
        run.finish()
        return run

    plain = answered(None)
    for drafts in DRAFTS.values():
        run = answered(speculating.speculation(VOCAB, verdict=verdict), drafts(plain.tokens["r"]))
        if name in ROUNDED:
            assert [part[0] for part in run.said("r")] == [part[0] for part in plain.said("r")]
        else:
            assert run.said("r") == plain.said("r")
        report = run.finished("r").speculation
        tried = report is not None and any(source.drafted for source in report.sources.values())
        assert tried is verdict.exact
