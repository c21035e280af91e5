"""When numbers are alike: other rounding is, other numbers are not (liars: test_sharing_faults)."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.engine.sequence_state.agreement import alike, same

T = limits.SHARE_SPOT_TOKENS


def rows(seed: int = 1) -> mx.array:
    """(1, heads, T, width)."""
    return mx.random.normal((1, 2, T, 8), key=mx.random.key(seed))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_bytes_are_compared_in_every_dtype(dtype: mx.Dtype) -> None:
    ours = rows().astype(dtype)
    assert same(ours, ours + 0)
    assert not same(ours, ours * 1.01)
    # Numbers that are equal but not the same bytes are not the same.
    zeros = mx.zeros((1, 2, T, 8), dtype)
    assert alike(zeros, -zeros)
    assert not same(zeros, -zeros)


def test_rounding_is_alike_and_noise_is_not() -> None:
    ours = rows()
    assert alike(ours, ours)
    assert alike(ours.astype(mx.bfloat16), ours)
    assert alike(ours, ours + 0.1 * rows(2))
    assert not alike(ours, ours + 0.5 * rows(2))
    assert not alike(ours, rows(2))
    assert not alike(ours, mx.zeros_like(ours))
    assert not alike(ours, 2 * ours)


@given(st.integers(0, T))
def test_some_tokens_may_be_quite_other_but_not_many(others: int) -> None:
    """An expert more or less changes a token altogether."""
    ours, theirs = rows(), rows()
    theirs[:, :, :others] = rows(2)[:, :, :others]
    assert alike(ours, theirs) is (4 * others <= T)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_never_alike(value: float) -> None:
    ours, theirs = rows(), rows()
    theirs[0, 1, 3, 2] = value
    assert not alike(ours, theirs)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_tokens_all_count(count: int) -> None:
    ours, theirs = rows()[:, :, :count], rows()[:, :, :count]
    assert alike(ours, theirs)
    theirs[:, :, 0] = 0
    assert not alike(ours, theirs)


def test_hidden_states_are_compared_by_token_as_well() -> None:
    ours = mx.random.normal((1, T, 8), key=mx.random.key(1))
    theirs = mx.array(ours)
    theirs[:, : T // 4] = 0
    assert alike(ours, theirs)
    theirs[:, : T // 2] = 0
    assert not alike(ours, theirs)
