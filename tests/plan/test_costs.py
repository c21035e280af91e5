"""What machines and links cost: the parts add up, whatever a card claims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.control.model_facts import ModelShape
from fleetd.plan.chip_speeds import APPLE, GB10
from fleetd.plan.costs import MEASURED_TOKENS, LinkSpeed, PrefillSpeed, cautious, modelled

speeds = st.builds(
    PrefillSpeed, st.floats(1e-6, 1.0), st.just(0.0) | st.floats(1e-10, 1e-3), st.floats(0, 1.0)
)


def cut(tokens: range, size: int) -> list[range]:
    return [range(at, min(at + size, tokens.stop)) for at in range(tokens.start, tokens.stop, size)]


@given(speeds, st.floats(0.01, 1), st.integers(0, 10**5), st.integers(1, 10**4), st.integers(1, 4096))
def test_chunks_add_up_to_the_whole(
    speed: PrefillSpeed, share: float, start: int, count: int, chunk: int
) -> None:
    tokens = range(start, start + count)
    one_by_one = sum(speed.seconds(share, part.start, len(part)) for part in cut(tokens, chunk))
    assert speed.total(share, tokens, chunk) == pytest.approx(one_by_one, rel=1e-9)


def test_nothing_takes_no_time() -> None:
    speed = PrefillSpeed(1.0, 1.0, 1.0)
    assert speed.seconds(1.0, 100, 0) == speed.total(1.0, range(5, 5), 128) == 0.0


def test_context_is_what_each_token_sees() -> None:
    """The integral: a token at place t costs ``context · t``."""
    speed = PrefillSpeed(0.0, context_s=1e-3)
    each = sum(1e-3 * (t + 0.5) for t in range(200, 300))
    assert speed.total(1.0, range(200, 300), 32) == pytest.approx(each)


@given(speeds, st.floats(0, 1e5), st.floats(1e-3, 1e4), st.integers(1, 4096))
def test_fitting_is_the_inverse_of_total(
    speed: PrefillSpeed, start: float, seconds: float, chunk: int
) -> None:
    count = speed.fitting(start, seconds, chunk)
    took = count * (speed.token_s + speed.fixed_s / chunk + speed.context_s * (start + count / 2))
    assert took == pytest.approx(seconds, rel=1e-6)


@given(st.floats(1, 1e5), st.floats(0, 1e-6), st.floats(0, 1e-3))
def test_a_measured_chunk_takes_what_was_measured(tok_s: float, context_s: float, fixed_s: float) -> None:
    speed = PrefillSpeed.measured(tok_s, context_s, fixed_s)
    explained_s = fixed_s + context_s * MEASURED_TOKENS**2 / 2
    if explained_s < MEASURED_TOKENS / tok_s / 2:
        assert speed.seconds(1.0, 0, MEASURED_TOKENS) == pytest.approx(MEASURED_TOKENS / tok_s)


@pytest.mark.parametrize(
    ("context_s", "fixed_s", "token_s", "context", "fixed"),
    [
        # A chunk of 256 tokens takes a second. What it takes besides its tokens is measured apart.
        (0.0, 0.2, 0.8, 0.0, 0.2),
        (1e-5, 0.2, 0.8 - 0.32768, 1e-5, 0.2),
        # A card that claims more than three fourths of it for that is believed so far.
        (0.0, 5.0, 0.25, 0.0, 0.75),
        (1e-4, 0.5, 0.25, 1e-4, 0.5),
        (-1.0, -1.0, 1.0, 0.0, 0.0),
    ],
)
def test_what_a_chunk_takes_besides_its_tokens(
    context_s: float, fixed_s: float, token_s: float, context: float, fixed: float
) -> None:
    found = PrefillSpeed.measured(256.0, context_s, fixed_s)
    assert (found.token_s, found.context_s, found.fixed_s) == (pytest.approx(token_s / 256), context, fixed)


def test_cautious_speeds_are_moved_away_from_their_mean() -> None:
    """One takes 1 s, the other 2 s: rates of 1 and 0.5, of which the mean is 0.75 and the sum 1.5."""
    fast, slow = cautious([PrefillSpeed(0.01), PrefillSpeed(0.02)], range(100), 100)
    assert fast.token_s == pytest.approx(0.01 * (1 - 0.1 * 0.25 / 1.5))
    assert slow.token_s == pytest.approx(0.02 * (1 + 0.1 * 0.25 / 1.5))


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e12))
def test_whatever_a_card_claims_prices_are_positive_and_finite(a: float, b: float, c: float) -> None:
    speed = PrefillSpeed.measured(a, b, c)
    assert 0 < speed.total(1.0, range(10**6), 128) < float("inf")


def test_links_carry_bytes_and_the_worse_of_two_counts() -> None:
    near, far = LinkSpeed(1e9, 1e-4), LinkSpeed(1e6, 5e-2)
    assert near.seconds(5e8) == 0.5
    assert near.and_(far) == far.and_(near) == LinkSpeed(1e6, 5e-2)
    assert LinkSpeed(0.0).seconds(10) == 10
    assert far.one_way_s == 0.025


def test_modelled_attention_is_a_small_part_of_a_short_prompt_and_a_large_one_of_a_long_prompt() -> None:
    """Llama-3.1-8B: 4·32·4096 operations per token and token of context, against 2·8e9 for the weights."""
    shape = ModelShape(weights_bytes=int(8e9 * 4.5 / 8), layers=32, hidden_width=4096)
    for chip in (GB10, APPLE[3, "Ultra"]):
        speed = modelled(chip, shape)
        short, long = (speed.context_s * n / 2 / speed.token_s for n in (1000, 64_000))
        assert short < 0.1
        assert 1 < long < 5
