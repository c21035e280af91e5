"""What a sequence takes is known before it is there: a price for any number of tokens is what caches hold."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny_architectures import VOCAB, tiny

from fleetd.control.model_facts import StateSizes
from fleetd.engine.load.model_reading import warm_up
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.errors import OutOfMemory

pytestmark = pytest.mark.usefixtures("on_cpu")
# Windows in some layers, in every second one, and running states beside rows.
MODELS = ["gemma3_text", "gpt_oss", "qwen3_5"]


def held_bytes(model: Any, tokens: int) -> int:
    """Of a prompt of so many tokens, the last of which is decoded."""
    cache = make_prompt_cache(model)
    ids = [token % VOCAB for token in range(tokens)]
    for start in range(0, tokens - 1, KVCache.step):
        model(mx.array([ids[start : min(start + KVCache.step, tokens - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    model(mx.array([ids[-1:]]), cache=cache)
    return sum(int(part.nbytes) for part in all_parts(cache))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [10, 32, pytest.param(5000, marks=pytest.mark.long), 600])
def test_the_price_of_tokens_is_what_caches_hold(name: str, tokens: int) -> None:
    model = tiny(name)
    with_room = -(-tokens // KVCache.step) * KVCache.step
    assert warm_up(model).of(with_room) == held_bytes(model, tokens)


def test_windows_are_priced_as_windows() -> None:
    sizes = warm_up(tiny("gemma3_text"))
    assert sizes.window == 32
    assert sizes.token_bytes > 0
    assert sizes.of(5000) == 5000 * sizes.token_bytes + 32 * sizes.window_bytes
    # So a long prompt is not refused for rows that no cache will hold.
    KvBudget(sizes.of(5000), sizes).check_alone(5000)
    assert KvBudget(sizes.of(5000), sizes).capacity_tokens == 5000
    with pytest.raises(OutOfMemory, match="5001 tokens"):
        KvBudget(sizes.of(5000), sizes).check_alone(5001)


@given(
    st.builds(
        StateSizes, st.integers(1, 10**6), st.integers(0, 10**8), st.integers(0, 10**6), st.integers(0, 5000)
    ),
    st.integers(0, 10**11),
)
def test_as_many_tokens_fit_as_are_priced_within_the_memory(sizes: StateSizes, n_bytes: int) -> None:
    tokens = sizes.fitting(n_bytes)
    if not tokens:
        assert sizes.of(1) > n_bytes
    else:
        assert sizes.of(tokens) <= n_bytes < sizes.of(tokens + 1)
