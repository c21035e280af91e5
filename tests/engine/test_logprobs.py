"""Log-probabilities are those of log_softmax, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.engine.answer import logprobs
from fleetd.engine.answer.logprobs import IMPOSSIBLE, Logprobs, PromptLogprobs

pytestmark = pytest.mark.usefixtures("cpu_installed")

ROWS = st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def texts() -> Iterator[None]:
    """Each token's text is its number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "token_bytes", lambda _, token: f"<{token}>".encode())
        yield


def log_softmax(logits: Any) -> Any:
    row = np.array(logits, dtype=np.float64)
    top = row.max()
    return row - top - np.log(np.exp(row - top).sum())


def as_mlx_lm_makes_them(logits: mx.array) -> mx.array:  # (1, V) -> (V,)
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@given(ROWS, st.integers(0, 11), st.integers(0, 14))
def test_a_token_s_figures_are_those_of_log_softmax(
    dtype: mx.Dtype, logits: list[float], token: int, top: int
) -> None:
    row = mx.array([logits]).astype(dtype)
    exact = log_softmax(row[0].astype(mx.float32).tolist())
    token %= len(logits)
    entry = Logprobs(None, top).of(token, as_mlx_lm_makes_them(row), 7)
    # What the model's own type rounds off of a token far below the likeliest is lost.
    rounding = {mx.float32: 1e-6, mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
    room = 1e-4 + 2 * rounding * max(1.0, -exact.min())
    assert abs(entry.logprob - exact[token]) <= room
    assert (entry.token, entry.raw, entry.text_offset) == (f"<{token}>", f"<{token}>".encode(), 7)
    assert len(entry.top) == min(top, len(logits))
    values = [each.logprob for each in entry.top]
    assert values == sorted(values, reverse=True)
    assert all(
        abs(value - best) <= room for value, best in zip(values, sorted(exact, reverse=True), strict=False)
    )
    if top >= len(logits):
        assert sum(np.exp(values)) == pytest.approx(1, abs=1e-3)
        assert {each.token: each.logprob for each in entry.top}[entry.token] == entry.logprob


def test_a_wide_bf16_row_sums_to_one() -> None:
    """Its log-probabilities as they are made in bf16 sum to 1.04."""
    row = (mx.random.normal((1, 50_000), key=mx.random.key(0)) * 3).astype(mx.bfloat16)
    exact = log_softmax(row[0].astype(mx.float32).tolist())
    best = int(exact.argmax())
    entry = Logprobs(None, 5).of(best, as_mlx_lm_makes_them(row), 0)
    assert entry.logprob == pytest.approx(exact[best], abs=5e-3)
    assert [each.logprob for each in entry.top] == pytest.approx(sorted(exact)[:-6:-1], abs=5e-3)


def test_what_cannot_happen_is_a_finite_figure_and_comes_last() -> None:
    row = mx.array([[0.0, -np.inf, 1.0]])
    entry = Logprobs(None, 3).of(1, as_mlx_lm_makes_them(row), 0)
    assert entry.logprob == IMPOSSIBLE
    assert [each.token for each in entry.top] == ["<2>", "<0>", "<1>"]
    assert entry.top[-1].logprob == IMPOSSIBLE


def test_equal_probabilities_are_listed_by_token() -> None:
    entry = Logprobs(None, 4).of(0, as_mlx_lm_makes_them(mx.zeros((1, 4))), 0)
    assert [each.token for each in entry.top] == ["<0>", "<1>", "<2>", "<3>"]


@given(st.lists(ROWS.map(lambda row: (row * 6)[:6]), min_size=1, max_size=6), st.integers(1, 6))
def test_a_prompt_s_tokens_have_what_the_row_before_says_however_it_is_cut(
    rows: list[list[float]], cut: int
) -> None:
    tokens = [(7 * n) % 6 for n in range(len(rows) + 1)]
    scored = PromptLogprobs(Logprobs(None, 2), tokens)
    exact = mx.array(rows)
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    for start in range(0, len(rows), cut):
        scored.add(exact[start : start + cut])
    assert [entry.token for entry in scored.entries] == [f"<{token}>" for token in tokens]
    assert scored.entries[0].logprob == 0.0
    assert [entry.text_offset for entry in scored.entries] == [3 * n for n in range(len(tokens))]
    for token, row, entry in zip(tokens[1:], rows, scored.entries[1:], strict=True):
        assert entry.logprob == pytest.approx(log_softmax(row)[token], abs=1e-4)
