"""Answers with other arithmetic in their prefill, by a tiny model that is cut as a shared prefill cuts it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tiny_architectures import tiny

from eval import rounded
from eval.rounded import TwoArithmetics, _Form
from eval.tasks import Task
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.quantised_rows import quantise_rows

pytestmark = pytest.mark.usefixtures("cpu_installed")

ONE = Task("single", 1, 100, 0.5, text="lorem ipsum dolor sit amet " * 12, answers=("x",), max_tokens=8)


@pytest.fixture
def two(chain_path: Any) -> TwoArithmetics:
    tokenizer = load_tokenizer(chain_path)
    return TwoArithmetics(Stage.of(tiny("llama", vocab_size=512)), tokenizer)


def test_alone_it_is_the_models_own_answer(two: TwoArithmetics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "_CHUNK_TOKENS", 32)
    said = two.answers(ONE)
    model = tiny("llama", vocab_size=512)
    cache, tokens = make_prompt_cache(model), two.tokenizer.encode(ONE.text)
    expected: list[int] = []
    while len(expected) < ONE.max_tokens:
        logits = model(mx.array([tokens]), cache=cache)[0, -1]
        tokens = [int(mx.argmax(logits).item())]
        expected += tokens
    assert said["alone"][0] == expected


def test_what_is_rounded_is_what_the_other_machine_computes(
    two: TwoArithmetics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By layers it is the first half of them, by tokens the first half of the prompt; routed it is all."""
    calls: list[int] = []
    run = TwoArithmetics._run

    def counted(
        self: TwoArithmetics, own: Any, tokens: Any, start: int, caches: Any, layers: int, **more: Any
    ) -> list[int]:
        calls.append(layers * len(tokens))
        return run(self, own, tokens, start, caches, layers, **more)

    monkeypatch.setattr(TwoArithmetics, "_run", counted)
    prompt, layers = two.tokenizer.encode(ONE.text), two.stage.total
    sums = []
    for form in (
        _Form(),
        _Form(layers // 2, len(prompt)),
        _Form(layers, len(prompt) // 2),
        _Form(layers, len(prompt), decodes=True),
    ):
        calls.clear()
        said = two._answer(prompt, 4, form)
        assert len(said) == 4
        sums.append(sum(calls))
    n = len(prompt) - 1
    assert sums == [0, layers // 2 * n, layers * (len(prompt) // 2), layers * (n + 4)]


@pytest.mark.parametrize("right", [0, 3, 8])
@pytest.mark.parametrize("form", [_Form(), _Form(1, 20), _Form(2, 40, decodes=True), _Form(bits=8)])
def test_a_draft_changes_no_answer(two: TwoArithmetics, form: _Form, right: int) -> None:
    prompt = two.tokenizer.encode(ONE.text)
    alone = two._answer(prompt, 8, form)
    draft = [*alone[:right], *((token + 1) % 512 for token in alone[right:])]
    assert two._answer(prompt, 8, form, draft) == alone


@pytest.mark.parametrize("bits", [8, 4])
def test_in_fewer_bits_it_is_the_answer_of_a_model_that_keeps_them(two: TwoArithmetics, bits: Any) -> None:
    model = tiny("llama", vocab_size=512)
    assert quantise_rows(model, bits).bits == bits
    cache, tokens = make_prompt_cache(model), two.tokenizer.encode(ONE.text)
    expected: list[int] = []
    while len(expected) < ONE.max_tokens:
        logits = model(mx.array([tokens]), cache=cache)[0, -1]
        tokens = [int(mx.argmax(logits).item())]
        expected += tokens
    assert two.answers(ONE)[f"{bits} bits"][0] == expected


def test_rounding_changes_keys_that_others_read() -> None:
    numbers = mx.array([1.0, 1.001, 3.14159])
    assert not mx.array_equal(rounded._rounded(numbers), numbers)
    assert rounded._rounded(numbers).dtype == numbers.dtype
