"""Drafts for models with running states: a wrong draft undoes its pass, what was right is computed again."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
import tiny_architectures
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import GREEDY, Run, Scripted, guessing, lying, perfect, right_for

from fleetd.engine.layers.stage import code_of
from fleetd.engine.protocol import Cancel, Sampling
from fleetd.engine.sampling.sampler import make_processors, make_sampler
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.speculation.controller import RISK, RISK_PER_TOKEN, Controller
from fleetd.engine.speculation.exactness_probe import ProbePlan, probe
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.verify_row import Chosen, VerifyRow

pytestmark = pytest.mark.usefixtures("cpu_installed")
REPO = Path(__file__).parents[2]
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(40)]
# Gated delta with attention beside it, short convolutions, state-space layers with attention.
SAMPLE = ["qwen3_5", "lfm2", "jamba"]
STATES = sorted(name for name, family in tiny_architectures.FAMILIES.items() if family.keeps_state)
PENALISED = Sampling(temperature=0.8, seed=9, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 2})


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def model_of() -> Callable[[str], Any]:
    """A model of the sample; what answers leave in it is nothing."""
    return functools.cache(tiny_architectures.tiny)


@pytest.fixture(params=SAMPLE)
def model(request: pytest.FixtureRequest, model_of: Callable[[str], Any]) -> Any:
    return model_of(request.param)


def sampled(cases: Collection[Any], everywhere: Collection[Any]) -> Any:
    """For ``parametrize``: all cases with the first model, some of them with the others."""
    return pytest.mark.parametrize(
        ("model", "case"),
        [
            pytest.param(name, case, marks=() if case in quick else pytest.mark.long)
            for name in SAMPLE
            for quick in [cases if name == SAMPLE[0] else everywhere]
            for case in cases
        ],
        indirect=["model"],
    )


@pytest.fixture
def qwen(model_of: Callable[[str], Any]) -> Any:
    return model_of("qwen3_5")


def row(model: Any, sampling: Sampling) -> VerifyRow:
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT[:-1]]), cache=cache)
    processors = make_processors(sampling, prompt_tokens=len(PROMPT))
    return VerifyRow(model, list(PROMPT), cache, make_sampler(sampling), processors)


def same(a: Chosen, b: Chosen) -> bool:
    return a.token == b.token and bytes(memoryview(a.logprobs)) == bytes(memoryview(b.logprobs))


def left_behind(cache: list[Any], tokens: int) -> list[bytes]:
    """The running states, and the rows of so many tokens."""
    found: list[bytes] = []
    for part in all_parts(cache):
        arrays = (
            part.cache
            if isinstance(part, ArraysCache)
            else [a[:, :, :tokens] for a in part.keys_and_values()]
        )
        found += [bytes(memoryview(mx.contiguous(array))) for array in arrays if array is not None]
    return found


@sampled([(0, GREEDY), (1, GREEDY), (3, PENALISED), (15, GREEDY)], everywhere=[(1, GREEDY), (3, PENALISED)])
def test_blocks_choose_what_single_steps_choose(model: Any, case: tuple[int, Sampling]) -> None:
    """With so many right drafts before a wrong one; tokens, log-probabilities, states, keys and values."""
    right, sampling = case
    single = row(model, sampling)
    expected = [single.step() for _ in range(32)]
    truth = [one.token for one in expected]
    blocks, found, again = row(model, sampling), [], 0
    while len(found) < 20:
        drafts = truth[len(found) : len(found) + 8 - blocks.pending // 2]
        drafts = drafts[:right] + [(t + 1) % VOCAB for t in drafts[right:]]
        if len(drafts) + 1 + blocks.pending > 16:
            drafts = []
        got = blocks.advance(drafts)
        assert len(got) == min(right, len(drafts)) + 1
        found += got
        again = max(again, blocks.pending)
        assert blocks.tokens == PROMPT + truth[: len(found)]
        assert rollback.held(blocks.cache) == blocks.held == len(blocks.tokens) - 1 - blocks.pending
    assert all(same(a, b) for a, b in zip(found, expected, strict=False))
    assert (again > 0) == (right < 8)
    blocks.settle()
    assert blocks.pending == 0
    single = row(model, sampling)
    for _ in found:
        single.step()
    held = len(blocks.tokens) - 1
    assert blocks.held == held
    assert left_behind(blocks.cache, held) == left_behind(single.cache, held)


def test_a_step_begun_ahead_computes_what_is_pending(qwen: Any) -> None:
    plain = row(qwen, GREEDY)
    truth = [plain.step().token for _ in range(12)]
    blocks = row(qwen, GREEDY)
    found = [c.token for c in blocks.advance([*truth[:2], (truth[2] + 1) % VOCAB])]
    assert blocks.pending == 3
    found.append(blocks.step(ahead=True).token)
    assert blocks.under_way
    assert blocks.pending == 0
    found += [blocks.step(ahead=i < 3).token for i in range(4)]
    assert found == truth[: len(found)]


@pytest.mark.parametrize("kept", range(7))
def test_a_row_cut_short_keeps_the_tokens_before_its_last_pass(qwen: Any, kept: int) -> None:
    plain = row(qwen, GREEDY)
    truth = [plain.step().token for _ in range(9)]
    blocks = row(qwen, GREEDY)
    blocks.step()
    blocks.advance(truth[1:6])
    tokens, cache = blocks.taken(len(PROMPT) + 1 + kept)
    # Its last token was chosen and not computed.
    whole = len(PROMPT) + 6
    expected = whole if kept >= 5 else len(PROMPT)
    assert tokens == (PROMPT + truth)[:expected]
    single = row(qwen, GREEDY)
    for _ in range(expected - len(PROMPT) + 1):
        single.step()
    assert left_behind(cache, expected) == left_behind(single.cache, expected)


# ---- a whole answer --------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[list[int]], list[Scripted]]] = {
    "perfect": lambda whole: [perfect(whole)],
    "two right": lambda whole: [right_for(whole, 2)],
    "always wrong": lambda whole: [right_for(whole, 0)],
    "all at once": lambda whole: [right_for(whole, 2), guessing(VOCAB, 5), lying(VOCAB, 6)],
}


def ran(model: Any, tokenizer: Any, speculation: Any, *sources: Any, **fields: Any) -> Run:
    run = Run(model, tokenizer, speculation)
    run.submit("r", PROMPT, *sources, **{"max_tokens": 40, "top_logprobs": 2, **fields})
    run.finish()
    return run


@pytest.fixture(scope="module")
def plainly(tokenizer: Any) -> Callable[[Any], Run]:
    """A model's answer without drafts; of the models that are kept through all tests of this module."""
    runs: dict[int, Run] = {}

    def of(model: Any) -> Run:
        if id(model) not in runs:
            runs[id(model)] = ran(model, tokenizer, None)
        return runs[id(model)]

    return of


@sampled(SOURCES, everywhere=["two right", "all at once"])
def test_any_source_gives_the_plain_answer(
    model: Any, tokenizer: Any, plainly: Callable[[Any], Run], case: str
) -> None:
    plain = plainly(model)
    sources = SOURCES[case](plain.tokens["r"])
    run = ran(model, tokenizer, speculating.speculation(VOCAB), *sources)
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["scripted"].drafted > 20


@pytest.mark.parametrize("limit", [1, 5, 16, 17, 33])
def test_max_tokens_anywhere_in_a_block(
    qwen: Any, tokenizer: Any, plainly: Callable[[Any], Run], limit: int
) -> None:
    whole = plainly(qwen).tokens["r"]
    plain = ran(qwen, tokenizer, None, max_tokens=limit)
    run = ran(qwen, tokenizer, speculating.speculation(VOCAB), right_for(whole, 4), max_tokens=limit)
    assert run.said("r") == plain.said("r")


def test_what_an_answer_computed_serves_the_next_prompt(
    model: Any, tokenizer: Any, plainly: Callable[[Any], Run]
) -> None:
    whole = plainly(model).tokens["r"]
    plain, run = Run(model, tokenizer), Run(model, tokenizer, speculating.speculation(VOCAB))
    plain.submit("a", PROMPT, max_tokens=30)
    run.submit("a", PROMPT, right_for(whole, 3), max_tokens=30)
    for side in (plain, run):
        side.finish()
        side.submit("b", [*whole[: len(PROMPT) + 31], 5, 6], max_tokens=20)
        side.finish()
    assert run.said("b")[0] == plain.said("b")[0]
    # All but what its last pass had to leave.
    assert run.finished("b").usage.cached_tokens >= len(PROMPT) + 30 - 16


def test_several_answers_join_and_stay_the_same(qwen: Any, tokenizer: Any) -> None:
    """Out of blocks into a batch, whatever is pending then."""
    dice = random.Random(3)
    prompts = {name: [dice.randrange(64) for _ in range(30 + 7 * i)] for i, name in enumerate("abc")}
    plain = Run(qwen, tokenizer)
    for name, prompt in prompts.items():
        plain.submit(name, prompt, max_tokens=30)
    plain.finish()
    for right in (1, 4):
        run = Run(qwen, tokenizer, speculating.speculation(VOCAB))
        for turns, (name, prompt) in enumerate(prompts.items()):
            run.submit(name, prompt, right_for(plain.tokens[name], right), max_tokens=30)
            for _ in range(3 + 2 * turns):
                run.turn()
        run.finish()
        for name in prompts:
            assert run.said(name) == plain.said(name)


def test_a_cancelled_answer_leaves_a_sound_state(qwen: Any, tokenizer: Any) -> None:
    plain = ran(qwen, tokenizer, None, max_tokens=24)
    whole = plain.tokens["r"]
    for turns in (1, 2, 3, 5):
        run = Run(qwen, tokenizer, speculating.speculation(VOCAB))
        run.submit("r", PROMPT, right_for(whole, 3), max_tokens=40)
        for _ in range(turns):
            run.turn()
        run.scheduler.tell(Cancel("r"))
        run.finish()
        run.submit("again", PROMPT, max_tokens=24, top_logprobs=2)
        run.finish()
        # All but how much of the prompt was known.
        assert run.said("again")[:-1] == plain.said("r")[:-1]


# ---- what decides ----------------------------------------------------------------------------------------


def test_the_probe_finds_blocks_exact_or_says_why_not() -> None:
    plan = ProbePlan.of("cpu", 0.0)
    exact = probe(tiny_architectures.tiny("qwen3_5"), vocab_size=VOCAB, context_tokens=2048, plan=plan)
    assert exact.exact
    assert exact.again
    assert exact.width == 16
    assert exact.text.endswith("what was right beside a wrong draft is computed again")
    # Its blocks are computed by other sums than its single steps.
    other = probe(tiny_architectures.tiny("falcon_h1"), vocab_size=VOCAB, context_tokens=2048, plan=plan)
    assert not other.exact
    assert other.text.startswith("declined: blocks of 4 tokens give other logits")
    plain = probe(tiny_architectures.tiny("llama"), vocab_size=VOCAB, context_tokens=2048, plan=plan)
    assert not plain.again


@pytest.mark.long
@pytest.mark.parametrize("name", STATES)
def test_the_page_of_models_says_which_blocks_are_exact(name: str) -> None:
    model = tiny_architectures.tiny(name)
    found = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=ProbePlan.of("cpu", 0.0))
    assert found.again or not found.exact
    page = (REPO / "docs" / "models.md").read_text()
    code = code_of(model)
    (line,) = [line for line in page.splitlines() if re.match(rf"\| `{code}`(,.*)? \| yes", line)]
    # What else it says is of the state that is kept, not of the blocks' logits.
    blocks, *_ = line.split(" | ")[4].split(", ")
    assert blocks == ("again" if found.exact else "no")


class OtherStates:
    """A device on which blocks leave another running state behind than single steps, and the same logits."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model(tokens, cache=cache)
        if 2 <= tokens.shape[1] <= 16:
            state = next(part for part in all_parts(cache) if isinstance(part, ArraysCache))
            state[1] = state[1] * (1 + 1e-6)
        return logits


def test_a_state_that_differs_is_found_where_logits_are_alike(qwen: Any) -> None:
    plan = ProbePlan((30,), (2,), 2, every=True)
    verdict = probe(OtherStates(qwen), vocab_size=VOCAB, context_tokens=2048, plan=plan)
    assert not verdict.exact
    assert "give other keys, values or states" in verdict.text


def test_long_contexts_are_made_up_beside_states(qwen: Any) -> None:
    plan = ProbePlan((30, 1020), (2, 4), 4, every=False)
    verdict = probe(qwen, vocab_size=VOCAB, context_tokens=2048, plan=plan)
    assert verdict.exact
    assert verdict.context == 1024


def test_a_mark_brings_back_every_part_of_a_layer() -> None:
    state, rows = ArraysCache(2), KVCache()
    cache = [CacheList(state, rows), ArraysCache(1), KVCache()]
    state[0], state[1] = mx.array([[1.0]]), mx.array([[2.0]])
    rows.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    cache[2].update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    assert rollback.room(cache) == ANY
    assert rollback.needs_mark(cache)
    marked = rollback.mark(cache)
    for _ in range(2):
        state[0] = mx.array([[5.0]])
        cache[1][0] = mx.array([[7.0]])
        for layer in (rows, cache[2]):
            layer.update_and_fetch(mx.zeros((1, 1, 2, 4)), mx.zeros((1, 1, 2, 4)))
        rollback.return_to(cache, marked, 2)
        assert state[0].item() == 1.0
        assert cache[1][0] is None
        assert (rows.offset, cache[2].offset, rollback.held(cache)) == (3, 3, 3)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.95])
def test_what_is_computed_again_is_in_the_price(acceptance: float) -> None:
    """A played answer of 300 tokens: never more than the bearable loss, and a gain where drafts are right."""
    curve = {n: 1 + 0.1 * (n - 1) for n in range(1, 17)}
    dice = random.Random(round(100 * acceptance))
    controller = Controller(Costs(curve), 15, again=True)
    done, spent, again = 0, 0.0, 0
    while done < 300:
        draft = controller.choose({"s": list(range(done, done + 15))}, 15 - again)
        right = 0
        while right < len(draft.tokens) and dice.random() < acceptance:
            right += 1
        took = curve[again + 1 + len(draft.tokens)]
        last = -1 if right < len(draft.tokens) else done + right
        emitted = [*range(done, done + right), last]
        controller.verified(draft, emitted, took, again=again)
        again = again + 1 + right if right < len(draft.tokens) else 0
        spent += took
        done += right + 1
    assert spent <= done + RISK + RISK_PER_TOKEN * done + 1.0
    if acceptance > 0.9:
        assert spent < 0.6 * done
