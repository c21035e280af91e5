"""A prompt gives the same cache and the same scores however it is cut into chunks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from mlx_lm.models.cache import make_prompt_cache
from tiny_architectures import in_int8

from fleetd.engine.layers.prefill import SCORED_TOKENS, Prefiller
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.sequence_state import growth, rollback
from fleetd.engine.sequence_state.copies import copy_on_write

pytestmark = pytest.mark.usefixtures("cpu_installed")


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(request: pytest.FixtureRequest) -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    made = tiny_models.smollm2()
    if request.param == "int8":
        made = in_int8(made)
    mx.set_default_device(before)
    return made


def prefill(
    model: Any, tokens: list[int], chunk: int, *, scored: bool = False
) -> tuple[Prefiller, list[Any]]:
    rows: list[Any] = []
    score = (lambda r: rows.extend(np.array(r))) if scored else None
    prefiller = Prefiller(model, tokens, make_prompt_cache(model), score=score)
    steps = []
    while (n := prefiller.step(chunk)) > 0:
        steps.append(n)
    assert sum(steps) == prefiller.done == len(tokens) - 1
    assert prefiller.remaining == 0
    return prefiller, rows


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_any_chunks_give_the_cache_of_one_shot(model: Any, chunk: int) -> None:
    tokens = tiny_models.prompt(60 if chunk == 1 else 300)
    one, _ = prefill(model, tokens, 10_000)
    many, _ = prefill(model, tokens, chunk)
    for a, b in zip(one.cache, many.cache, strict=True):
        assert a.offset == b.offset == len(tokens) - 1
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            assert mx.array_equal(x, y)


def test_scores_are_the_models_own_log_probabilities(model: Any) -> None:
    tokens = tiny_models.prompt(SCORED_TOKENS * 2 + 10)
    logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for chunk in (5, SCORED_TOKENS, 10_000):
        scored, rows = prefill(model, tokens, chunk, scored=True)
        assert np.array_equal(np.stack(rows), expected)
        plain, _ = prefill(model, tokens, chunk)
        for a, b in zip(scored.cache, plain.cache, strict=True):
            assert mx.array_equal(a.keys_and_values()[0], b.keys_and_values()[0])


def test_scoring_never_holds_more_than_a_few_rows_of_the_vocabulary(model: Any) -> None:
    sizes: list[int] = []
    tokens = tiny_models.prompt(500)
    prefiller = Prefiller(model, tokens, make_prompt_cache(model), score=lambda r: sizes.append(r.shape[0]))
    while prefiller.step(10_000):
        pass
    assert max(sizes) <= SCORED_TOKENS
    assert sum(sizes) == 499


def test_continues_from_a_cached_beginning(model: Any) -> None:
    tokens = tiny_models.prompt(100)
    whole, _ = prefill(model, tokens, 10_000)
    start, _ = prefill(model, tokens[:41], 10_000)
    rest = Prefiller(model, tokens, start.cache, done=40)
    assert rest.step(1000) == 59
    for a, b in zip(whole.cache, rest.cache, strict=True):
        assert mx.array_equal(a.keys_and_values()[1], b.keys_and_values()[1])


def rooms(model: Any, tokens: list[int], cache: list[Any], done: int) -> list[int]:
    """Tokens that the cache has room for after each chunk."""
    prefiller = Prefiller(model, tokens, cache, done)
    found = []
    while prefiller.step(64):
        assert len({layer.keys.shape[2] for layer in cache}) == 1
        found.append(cache[0].keys.shape[2])
    return found


@pytest.mark.parametrize("done", [0, 40])
def test_the_first_chunk_makes_room_for_the_whole_prompt(
    model: Any, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tiny_models.prompt(700)

    def beginning() -> list[Any]:
        """As the prefix cache gives it, without room to grow."""
        if not done:
            return make_prompt_cache(model)
        return rollback.compact(prefill(model, tokens[: done + 1], 64)[0].cache)

    at_once, in_steps = beginning(), beginning()
    assert set(rooms(model, tokens, at_once, done)) == {done + growth.in_steps(699 - done)}
    monkeypatch.setattr(growth, "at_once", lambda cache, tokens: nullcontext())
    assert len(set(rooms(model, tokens, in_steps, done))) > 2
    for a, b in zip(at_once, in_steps, strict=True):
        assert a.offset == b.offset == 699
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            assert mx.array_equal(x, y)


def test_what_is_kept_of_a_prompt_counts_no_more_room_than_a_step(model: Any) -> None:
    tokens = tiny_models.prompt(700)
    read, _ = prefill(model, tokens, 64)
    one = sum(layer.nbytes for layer in read.cache) / 768
    prefix = PrefixCache(1 << 30)
    prefix.store(tokens[:-1], read.cache)
    assert prefix.nbytes == 768 * one
    # What goes on from there grows as ever.
    longer = copy_on_write(read.cache)
    for more in (768 - 699, 1):
        model(mx.array([[5] * more]), cache=longer)
    assert {layer.keys.shape[2] for layer in longer} == {768 + growth.STEP}


def test_a_prompt_of_one_token_has_nothing_to_prefill(model: Any) -> None:
    assert Prefiller(model, [3], make_prompt_cache(model)).step(64) == 0
