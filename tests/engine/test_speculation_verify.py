"""Blocks against single steps, row by row; taking tokens back; the probe that decides on relying on it."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
import speculating
import tiny_architectures
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.sample_utils import greedy_sampler

from fleetd.engine.protocol import Sampling
from fleetd.engine.sampling.sampler import make_processors, make_sampler
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.speculation import exactness_probe as probing
from fleetd.engine.speculation.exactness_probe import ProbePlan, probe
from fleetd.engine.speculation.verify_row import Chosen, VerifyRow

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
SAMPLED = Sampling(temperature=1.0, seed=7, top_p=0.95)
PENALISED = Sampling(temperature=0.8, seed=9, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 2})


@pytest.fixture(params=["float32", "int8"])
def llama(request: pytest.FixtureRequest) -> Any:
    made = tiny_architectures.tiny("llama")
    return tiny_architectures.in_int8(made) if request.param == "int8" else made


def row(model: Any, sampling: Sampling, cache: list[Any] | None = None) -> VerifyRow:
    cache = make_prompt_cache(model) if cache is None else cache
    model(mx.array([PROMPT[:-1]]), cache=cache)
    processors = make_processors(sampling, prompt_tokens=len(PROMPT))
    return VerifyRow(model, list(PROMPT), cache, make_sampler(sampling), processors)


def plain(row: VerifyRow, tokens: int) -> list[Chosen]:
    return [one for _ in range(tokens) for one in row.advance([])]


def same(a: Chosen, b: Chosen) -> bool:
    return a.token == b.token and bytes(memoryview(a.logprobs)) == bytes(memoryview(b.logprobs))


def rows_of(cache: list[Any], tokens: int) -> bytes:
    return b"".join(
        bytes(memoryview(mx.contiguous(part[:, :, :tokens])))
        for layer in cache
        for part in layer.keys_and_values()
    )


@pytest.mark.parametrize(
    ("sampling", "right"),
    [
        pytest.param(sampling, right, marks=() if right in quick else pytest.mark.long)
        for sampling, quick in (
            (speculating.GREEDY, (0, 1, 3, 15)),
            (SAMPLED, (1,)),
            (PENALISED, (3,)),
        )
        for right in (0, 1, 3, 15)
    ],
)
def test_blocks_choose_what_single_steps_choose(llama: Any, sampling: Sampling, right: int) -> None:
    """With so many right drafts before a wrong one; tokens, log-probabilities, keys and values."""
    single = row(llama, sampling)
    expected = plain(single, 40)
    truth = [one.token for one in expected]
    blocks, found = row(llama, sampling), []
    while len(found) < 24:
        rest = truth[len(found) : len(found) + 15]
        drafts = rest[:right] + [(t + 1) % VOCAB for t in rest[right:]]
        got = blocks.advance(drafts)
        assert len(got) == min(right, len(drafts)) + 1
        found += got
        assert blocks.tokens == PROMPT + truth[: len(found)]
        assert rollback.held(blocks.cache) == len(blocks.tokens) - 1
    assert all(same(a, b) for a, b in zip(found, expected, strict=False))
    held = len(blocks.tokens) - 1
    assert rows_of(blocks.cache, held) == rows_of(single.cache, held)


def test_a_row_cut_short_keeps_what_it_computed(llama: Any) -> None:
    truth = [one.token for one in plain(row(llama, speculating.GREEDY), 9)]
    blocks = row(llama, speculating.GREEDY)
    blocks.advance(truth[:8])
    tokens, cache = blocks.taken(len(PROMPT) + 4)
    assert tokens == PROMPT + truth[:4]
    assert rollback.held(cache) == len(tokens)
    # The last token of all was chosen and not computed.
    blocks = row(llama, speculating.GREEDY)
    blocks.advance(truth[:8])
    tokens, cache = blocks.taken(len(PROMPT) + 9)
    assert tokens == PROMPT + truth[:8]
    assert rollback.held(cache) == len(tokens)
    assert all(layer.keys.shape[2] == len(tokens) for layer in cache)


def test_a_quantised_cache_takes_tokens_back(llama: Any) -> None:
    def quantised() -> list[Any]:
        return [QuantizedKVCache(group_size=32, bits=8) for _ in llama.layers]

    expected = plain(row(llama, speculating.GREEDY, quantised()), 12)
    truth = [one.token for one in expected]
    blocks, found = row(llama, speculating.GREEDY, quantised()), []
    assert rollback.room(blocks.cache) == ANY
    while len(found) < 12:
        rest = truth[len(found) : len(found) + 5]
        found += blocks.advance([*rest[:2], *[(t + 1) % VOCAB for t in rest[2:]]])
    assert [one.token for one in found[:12]] == truth


def test_a_window_takes_tokens_back_until_it_moves() -> None:
    model = tiny_architectures.tiny("gemma3_text")
    cache = make_prompt_cache(model)
    window = min(layer.max_size for layer in cache if isinstance(layer, RotatingKVCache))
    assert rollback.room(cache) == window
    model(mx.array([PROMPT[:20]]), cache=cache)
    assert rollback.room(cache) == window - 20
    model(mx.array([PROMPT[20:32]]), cache=cache)
    assert rollback.room(cache) == 0


def test_what_cannot_be_taken_back_is_declined_by_name() -> None:
    assert rollback.room([KVCache(), ChunkedKVCache(8)]) == 0
    assert "ChunkedKVCache" in rollback.declined([KVCache(), ChunkedKVCache(8)])
    assert rollback.declined([KVCache(), RotatingKVCache(8)]) == ""
    assert rollback.room([]) == 0


def test_a_private_cache_leaves_the_other_as_it_is(llama: Any) -> None:
    first = row(llama, speculating.GREEDY)
    before = rows_of(first.cache, 39)
    twin = copy_on_write(first.cache)
    llama(mx.array([[1, 2, 3]]), cache=twin)
    rollback.take_back(twin, 10)
    llama(mx.array([[4] * 20]), cache=twin)
    assert rollback.held(first.cache) == 39
    assert rows_of(first.cache, 39) == before


# ---- the probe -------------------------------------------------------------------------------------------

PLAN = ProbePlan((31, 100), (2, 3, 4, 8, 16), 4, every=False)


def ask(model: Any, plan: ProbePlan = PLAN) -> Any:
    readings = itertools.count()  # every pass takes as long as any other
    return probe(model, vocab_size=VOCAB, context_tokens=2048, plan=plan, clock=lambda: 1e-6 * next(readings))


def test_exact_arithmetic_is_found_to_be_exact(llama: Any) -> None:
    verdict = ask(llama)
    assert verdict.exact
    assert verdict.width == 16
    assert verdict.text.startswith("exact: blocks of up to 16 tokens, contexts of up to 100")
    assert verdict.context == 104
    assert set(verdict.seconds) == {1, 2, 3, 4, 8, 16}
    assert ask(llama, ProbePlan.of("cpu", 0.0)).context == ANY


class Inexact:
    """A device whose blocks from a width on, and contexts from a length on, add in another order."""

    def __init__(self, model: Any, width: int, context: int = 0, where: str = "logits") -> None:
        self._model, self._width, self._context, self._where = model, width, context, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        other = self._width <= tokens.shape[1] <= 16 and rollback.held(cache) >= self._context
        logits = self._model(tokens, cache=cache)
        if other and self._where == "logits":
            # The smallest change that there is, in one number.
            bits = logits.view(mx.uint32)
            bits[..., 0, 3] = bits[..., 0, 3] ^ 1
            return bits.view(mx.float32)
        if other:
            layer = cache[-1]
            layer.values[..., layer.offset - tokens.shape[1], 0] += 1e-6
        return logits


@pytest.fixture
def _held_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    held = rollback.held
    monkeypatch.setattr(rollback, "held", lambda cache: getattr(cache[0], "_idx", 0) or held(cache))


@pytest.mark.usefixtures("_held_in_batches")
@pytest.mark.parametrize("where", ["logits", "values"])
def test_an_inexact_device_is_declined(llama: Any, where: str) -> None:
    verdict = ask(Inexact(llama, 2, where=where))
    assert not verdict.exact
    assert verdict.text.startswith("declined: blocks of 2 tokens give other")
    assert speculating.speculation(VOCAB, verdict=verdict).new_drafts(_request()) is None


@pytest.mark.usefixtures("_held_in_batches")
@pytest.mark.parametrize("where", ["logits", "values"])
def test_widths_that_are_exact_are_used(llama: Any, where: str) -> None:
    verdict = ask(Inexact(llama, 5, where=where))
    assert verdict.width == 4
    assert verdict.text.startswith("exact: blocks of up to 4 tokens")
    assert "blocks of 8 tokens" in verdict.text
    drafting = speculating.speculation(VOCAB, verdict=verdict).new_drafts(_request())
    assert drafting is not None
    assert drafting.controller.most == 3


@pytest.mark.usefixtures("_held_in_batches")
def test_a_kernel_that_changes_with_the_context_is_found_there(llama: Any) -> None:
    verdict = ask(Inexact(llama, 2, context=90))
    assert verdict.text.startswith("declined: blocks of 2 tokens give other logits at 100 tokens")


def test_a_cache_that_cannot_go_back_is_declined_without_computing(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "make_prompt_cache", lambda model: [ChunkedKVCache(8)])
    assert ask(llama).text == "declined: a ChunkedKVCache cannot take tokens back"


def test_a_slow_model_is_probed_with_less() -> None:
    quick, slow = ProbePlan.of("cpu", 0.01), ProbePlan.of("cpu", 5.0)
    assert len(quick.contexts) * len(quick.widths) > len(slow.contexts) * len(slow.widths)
    # Kernels that are chosen by size are all tried, however long it takes.
    assert ProbePlan.of("metal", 5.0).widths == tuple(range(2, 17))


def test_a_short_context_and_a_window_are_probed_within_it() -> None:
    model = tiny_architectures.tiny("gemma3_text")
    verdict = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=PLAN)
    assert verdict.text.startswith(("exact", "declined"))
    assert verdict.context <= tiny_architectures.WINDOW


@pytest.mark.usefixtures("cpu_installed")
def test_a_verdict_says_within_which_window_it_holds() -> None:
    """No draft is tried behind a full window."""
    window = tiny_architectures.WINDOW
    model = tiny_architectures.tiny("gemma3_text")
    verdict = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=ProbePlan.of("cpu", 0.0))
    assert verdict.exact
    assert verdict.text.endswith(f"; only while the text fits {window} tokens")
    assert verdict.context <= window


def _request() -> Any:
    from fleetd.engine.protocol import Generate, TokenPrompt

    return Generate("r", TokenPrompt([1]))


assert greedy_sampler is make_sampler(speculating.GREEDY)
