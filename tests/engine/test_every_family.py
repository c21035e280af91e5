"""What every family of the table can do beside being cut: forks of a kept prompt, and drafts of any kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
from family_params import EXPERTS, each
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from shared_runs import as_bytes, staged
from speculating import Run, Scripted, lying, perfect, right_for
from tiny_architectures import FAMILIES, VOCAB, WITHOUT_EXPERTS, tiny

from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import Speculate
from fleetd.engine.shared_prefill.fingerprint import any_chunks
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict, ProbePlan, probe
from fleetd.engine.speculation.local_sources import LOCAL_NAMES

pytestmark = pytest.mark.usefixtures("cpu_installed")
# Of a prompt; the windows of the tiny models are 32 tokens.
BORDERS = [70, 36]
TOKENS = [(7 * i + 3) % 64 for i in range(110)]
# The same words again and again, within a window, for drafts from the text itself.
AGAIN = TOKENS[:5] * 3
DRAFTS: dict[str, Callable[[list[int]], Scripted]] = {
    "good": perfect,
    "bad": lambda whole: right_for(whole, 0),
    "adversarial": lambda whole: lying(VOCAB, 6),
}
# Keys and values alone, windows, running states, both. Samples of drafts: test_speculation_states.py.
QUICK = ["llama", "gpt_oss", "qwen3_5", "mamba2"]
IN_BF16 = sorted(set(FAMILIES) - EXPERTS)


def in_bf16(name: str) -> Any:
    """MLX multiplies with experts' matrices on a CPU in f32 only."""
    model = tiny(name, **WITHOUT_EXPERTS.get(name, {}))
    model.set_dtype(mx.bfloat16)
    return model


def prefilled(model: Any, tokens: list[int], prefix: PrefixCache) -> tuple[int, Prefiller]:
    """The tokens that were kept already, and the prompt computed on from there."""
    hit = prefix.fetch(tokens)
    cache = hit.cache or make_prompt_cache(model)
    alone = Prefiller(model, tokens, cache, hit.tokens, state_bytes=prefix.state_bytes, borders=BORDERS)
    while alone.step(512):
        pass
    return hit.tokens, alone


def check_fork(model: Any, prefix: PrefixCache, at: int, *, states: bool, exact: bool, off: float) -> None:
    """A prompt that goes on otherwise after ``at`` of the kept tokens."""
    fork = [*TOKENS[:at], 90, 91, 92]
    kept, warm = prefilled(model, fork, prefix)
    assert kept <= at
    assert kept >= max((border for border in BORDERS if border <= at), default=0)
    _, cold = prefilled(model, fork, PrefixCache(1 << 40))
    mine, whole = (model(mx.array([fork[-1:]]), cache=one.cache) for one in (warm, cold))
    # At a border, or at the beginning, chunks end where they end in a prompt that is computed from nothing.
    if exact or (states and kept in (0, *BORDERS)):
        assert as_bytes(mine) == as_bytes(whole), at
    else:
        mine, whole = mine.astype(mx.float32), whole.astype(mx.float32)
        assert mx.abs(mine - whole).max() <= off * mx.abs(whole).max(), "where chunks matter, only rounding"


def forked(model: Any, *, states: bool, exact: bool, every: int, off: float) -> None:
    prefix = PrefixCache(1 << 40)
    _, first = prefilled(model, TOKENS, prefix)
    prefix.store(TOKENS[:-1], first.cache, states=first.states)
    for at in range(1, len(TOKENS), every):
        check_fork(model, prefix, at, states=states, exact=exact, off=off)
    prefix.validate()


@pytest.mark.parametrize("name", QUICK)
def test_a_prompt_that_forks_is_answered_as_without_the_kept_one(name: str) -> None:
    model = tiny(name)
    exact = any_chunks(*staged(model), "cpu")
    forked(model, states=FAMILIES[name].keeps_state, exact=exact, every=17, off=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_prompt_that_forks_at_any_token_is_answered_as_without_the_kept_one(name: str) -> None:
    model = tiny(name)
    exact = any_chunks(*staged(model), "cpu")
    forked(model, states=FAMILIES[name].keeps_state, exact=exact, every=1, off=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", IN_BF16)
def test_a_prompt_in_bf16_that_forks_is_answered_as_without_the_kept_one(name: str) -> None:
    forked(in_bf16(name), states=FAMILIES[name].keeps_state, exact=False, every=8, off=0.05)


def verdict_of(model: Any) -> ExactnessVerdict:
    return probe(model, vocab_size=VOCAB, context_tokens=2048, plan=ProbePlan.of("cpu", 0.0))


def answered(
    model: Any,
    path: Path,
    verdict: ExactnessVerdict,
    prompt: list[int],
    *sources: Scripted,
    drafts: bool = True,
) -> Run:
    """With the sources of every worker, which draft from the text itself, besides ``sources``; or plainly."""
    run = Run(model, load_tokenizer(path), speculating.speculation(VOCAB, verdict=verdict))
    wanted = Speculate(enabled=drafts)
    run.submit("r", prompt, *sources, max_tokens=40, top_logprobs=2, speculate=wanted)
    run.finish()
    return run


def drafted(run: Run) -> dict[str, int]:
    report = run.finished("r").speculation
    return {name: source.drafted for name, source in report.sources.items()} if report is not None else {}


def check_drafts(model: Any, chain_path: Path, *, rounds: bool) -> None:
    verdict = verdict_of(model)

    def same(run: Run, plain: Run) -> bool:
        if rounds:
            return [part[0] for part in run.said("r")] == [part[0] for part in plain.said("r")]
        return run.said("r") == plain.said("r")

    plain = answered(model, chain_path, verdict, TOKENS[:8], drafts=False)
    for drafts in DRAFTS.values():
        run = answered(model, chain_path, verdict, TOKENS[:8], drafts(plain.tokens["r"]))
        assert same(run, plain)
        assert any(drafted(run).values()) is verdict.exact
    plain = answered(model, chain_path, verdict, AGAIN, drafts=False)
    run = answered(model, chain_path, verdict, AGAIN)
    assert same(run, plain)
    assert any(drafted(run).get(name) for name in LOCAL_NAMES) is verdict.exact


# Such families keep rows that can be taken back at any token, so only their sums decide.
@pytest.mark.parametrize("name", each(name for name, kind in FAMILIES.items() if not kind.keeps_state))
def test_the_table_says_if_blocks_are_other_sums(name: str) -> None:
    verdict = verdict_of(tiny(name))
    assert verdict.exact is not FAMILIES[name].other_blocks


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_drafts_of_any_kind_leave_the_plain_answer(name: str, chain_path: Path) -> None:
    """As the probe of its load has them: where blocks are other sums than single tokens, none is tried."""
    check_drafts(tiny(name), chain_path, rounds=FAMILIES[name].rounds)


@pytest.mark.long
@pytest.mark.parametrize("name", IN_BF16)
def test_drafts_in_bf16_leave_the_plain_answer(name: str, chain_path: Path) -> None:
    check_drafts(in_bf16(name), chain_path, rounds=FAMILIES[name].rounds)
