"""Speeds follow what was measured, and only from enough of it."""

from __future__ import annotations

from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.model_speeds import (
    AGED_S,
    CONFIRMED,
    DECODE_TOKENS,
    PREFILL_TOKENS,
    WEIGHT_AGED,
    ModelSpeeds,
)

RUN = {
    "prompt_tokens": 1000,
    "cached_tokens": 0,
    "completion_tokens": 101,
    "prefill_s": 2.0,
    "decode_s": 4.0,
    "now_s": 0.0,
}


def after(*runs: dict[str, Any], seed: MeasuredSpeed | None = None) -> MeasuredSpeed:
    book = ModelSpeeds()
    if seed is not None:
        book.seed("m", seed, now_s=0.0)
    for run in runs:
        book.ran("m", **{**RUN, **run})
    return book.of("m")


def test_nothing_is_known_of_a_model_that_never_ran() -> None:
    assert ModelSpeeds().of("m") == MeasuredSpeed(0.0, 0.0)


def test_the_first_run_is_taken_as_it_is() -> None:
    assert after({}) == MeasuredSpeed(500.0, 25.0)


def test_what_came_from_the_cache_was_not_computed() -> None:
    assert after({"cached_tokens": 800}).prefill_tok_s == 100.0


def test_a_load_replaces_what_was_known() -> None:
    assert after({}, seed=None) == MeasuredSpeed(500.0, 25.0)
    book = ModelSpeeds()
    book.ran("m", **RUN)
    book.seed("m", MeasuredSpeed(10.0, 1.0), now_s=0.0)
    assert book.of("m") == MeasuredSpeed(10.0, 1.0)


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({"prompt_tokens": PREFILL_TOKENS}, True),
        ({"prompt_tokens": PREFILL_TOKENS - 1}, False),
        ({"prompt_tokens": 1000, "cached_tokens": 1000 - PREFILL_TOKENS + 1}, False),
        ({"prefill_s": 0.0}, False),
    ],
)
def test_a_short_prefill_teaches_nothing(change: dict[str, Any], known: bool) -> None:
    assert (after(change).prefill_tok_s > 0) is known


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({"completion_tokens": DECODE_TOKENS}, True),
        ({"completion_tokens": DECODE_TOKENS - 1}, False),
        ({"decode_s": 0.0}, False),
    ],
)
def test_a_short_answer_teaches_nothing(change: dict[str, Any], known: bool) -> None:
    assert (after(change).decode_tok_s > 0) is known


def test_runs_move_the_figure_and_slow_ones_move_it_less() -> None:
    seed = MeasuredSpeed(1000.0, 50.0)
    slower = after({}, seed=seed)  # 500 and 25
    faster = after({"prefill_s": 2 / 3, "decode_s": 4 / 3}, seed=seed)  # 1500 and 75
    assert 0 < 1000 - slower.prefill_tok_s < faster.prefill_tok_s - 1000
    assert 0 < 50 - slower.decode_tok_s < faster.decode_tok_s - 50


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_a_steady_speed_is_found_wherever_one_begins(begin: float, truth: float) -> None:
    speed = after(*[{"prefill_s": 1000 / truth}] * 300, seed=MeasuredSpeed(begin, 1.0))
    assert speed.prefill_tok_s == pytest.approx(truth, rel=0.05)


def test_a_shared_prefill_says_nothing_of_this_machine_but_its_decode_does() -> None:
    speed = after({"prefill_s": 0.1, "shared": True}, seed=MeasuredSpeed(100.0, 1.0, 1e-6, 1e-3))
    assert (speed.prefill_tok_s, speed.prefill_context_s) == (100.0, 1e-6)
    assert speed.decode_tok_s > 1.0


def took(truth: MeasuredSpeed, cached: int, count: int) -> dict[str, Any]:
    seconds = PrefillSpeed.of(truth).total(1.0, range(cached, cached + count), MEASURED_TOKENS)
    return {"prompt_tokens": cached + count, "cached_tokens": cached, "prefill_s": seconds}


def test_a_run_as_expected_changes_nothing_however_long_its_context() -> None:
    seed = MeasuredSpeed(300.0, 25.0, 1.2e-6, 0.05)
    run = took(seed, 6000, 2000)
    assert 2000 / run["prefill_s"] < 100, "or it would not be a long one"
    speed = after(run, seed=seed)
    assert speed.prefill_tok_s == pytest.approx(300.0)
    assert speed.prefill_context_s == pytest.approx(1.2e-6)


@examples(30)
@given(st.floats(0.3, 3), st.floats(0.3, 3))
def test_context_and_the_rest_are_told_apart_by_prompts_of_different_lengths(a: float, b: float) -> None:
    truth = MeasuredSpeed(300.0, 25.0, 1e-6, 0.02)
    seed = MeasuredSpeed(a * 300.0, 25.0, b * 1e-6, 0.02)
    runs = [took(truth, cached, count) for cached, count in ((0, 300), (0, 4000), (6000, 2000))]
    found = after(*(runs * 150), seed=seed)
    for run in (took(truth, 0, 500), took(truth, 0, 8000), took(truth, 3000, 1000)):
        cached, count = run["cached_tokens"], run["prompt_tokens"] - run["cached_tokens"]
        predicted = PrefillSpeed.of(found).total(1.0, range(cached, cached + count), MEASURED_TOKENS)
        assert predicted == pytest.approx(run["prefill_s"], rel=0.1)


@given(st.floats(1, 1e5), st.floats(0, 1e-3), st.floats(0, 10), st.floats(1e-4, 1e4))
def test_no_run_makes_a_figure_nonsense(
    tok_s: float, context_s: float, fixed_s: float, took_s: float
) -> None:
    speed = after({"prefill_s": took_s}, seed=MeasuredSpeed(tok_s, 1.0, context_s, fixed_s))
    assert 0 < speed.prefill_tok_s < 1e9
    assert 0 <= speed.prefill_context_s < 1e3


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=20))
def test_the_figure_stays_within_what_was_seen(rates: list[tuple[float, float]]) -> None:
    speed = after(*[{"prefill_s": 1000 / p, "decode_s": 100 / d} for p, d in rates])
    for figure, seen in (
        (speed.prefill_tok_s, [p for p, _ in rates]),
        (speed.decode_tok_s, [d for _, d in rates]),
    ):
        assert min(seen) * 0.999 <= figure <= max(seen) * 1.001


def test_models_do_not_mix_and_do_not_pile_up() -> None:
    book = ModelSpeeds()
    for i in range(limits.CARD_MODELS):
        book.seed(f"m{i}", MeasuredSpeed(i + 1.0, 1.0), now_s=0.0)
    assert book.of("m0").prefill_tok_s == 1.0
    book.ran("m0", **RUN)  # used: no longer the oldest
    book.seed("one more", MeasuredSpeed(1.0, 1.0), now_s=0.0)
    assert book.of("m1") == MeasuredSpeed()
    assert book.of("m0").prefill_tok_s > 1.0
    assert book.of(f"m{limits.CARD_MODELS - 1}").prefill_tok_s == limits.CARD_MODELS


# ---- How much a request counts -----------------------------------------------------------------------------


def requests_until_right(book: ModelSpeeds, truth: float, now_s: float) -> int:
    """How many prompts it takes until the figure is within a quarter of the truth."""
    for count in range(100):
        if max(truth / book.of("m").prefill_tok_s, book.of("m").prefill_tok_s / truth) <= 1.25:
            return count
        book.ran("m", **{**RUN, "prefill_s": 1000 / truth, "now_s": now_s})
    raise AssertionError("it never got there")


@pytest.mark.parametrize(("doubtful", "most"), [(False, 7), (True, 3)])
def test_a_calibration_beside_other_programs_is_soon_corrected(doubtful: bool, most: int) -> None:
    book = ModelSpeeds()
    book.seed("m", MeasuredSpeed(1000.0 / 4.6, 1.0, doubt="busy" if doubtful else ""), now_s=0.0)
    assert requests_until_right(book, 1000.0, 1.0) <= most


@pytest.mark.parametrize(("tokens", "found"), [(MEASURED_TOKENS, 27.0), (MEASURED_TOKENS - 1, 17.5)])
def test_a_faster_prefill_of_a_whole_chunk_replaces_a_figure_in_doubt(tokens: int, found: float) -> None:
    run = {"prompt_tokens": tokens, "prefill_s": tokens / 27.0}
    assert after(run, seed=MeasuredSpeed(8.0, 1.0, doubt="busy")).prefill_tok_s == pytest.approx(found)
    assert after(run, seed=MeasuredSpeed(8.0, 1.0)).prefill_tok_s == pytest.approx(11.8)


def test_too_good_a_figure_in_doubt_falls_as_fast_as_it_would_rise() -> None:
    doubted, trusted = ModelSpeeds(), ModelSpeeds()
    doubted.seed("m", MeasuredSpeed(4600.0, 1.0, doubt="busy"), now_s=0.0)
    trusted.seed("m", MeasuredSpeed(4600.0, 1.0), now_s=0.0)
    for book in (doubted, trusted):
        book.ran("m", **RUN)
    assert doubted.of("m").prefill_tok_s < 0.6 * 4600 < trusted.of("m").prefill_tok_s


def test_an_old_figure_does_not_rule_for_ever() -> None:
    """A slow request may have shared the engine, so it hardly moves a new figure; an old one it does."""
    found = []
    for age_s in (0.0, AGED_S, 100 * AGED_S):
        book = ModelSpeeds()
        book.seed("m", MeasuredSpeed(1000.0, 50.0), now_s=0.0)
        book.ran("m", **{**RUN, "now_s": age_s})  # 500 and 25
        found.append((book.of("m").prefill_tok_s, book.of("m").decode_tok_s))
    assert found[0] == pytest.approx((975.0, 48.75))
    assert found[1] == pytest.approx((1000 - 500 * WEIGHT_AGED / 2, 50 - 25 * WEIGHT_AGED / 2))
    assert found[2] == pytest.approx((750.0, 37.5))


def test_requests_end_the_doubt_and_a_new_measurement_may_begin_it_again() -> None:
    book = ModelSpeeds()
    book.seed("m", MeasuredSpeed(100.0, 1.0, doubt="busy"), now_s=0.0)
    for number in range(CONFIRMED):
        assert book.of("m").doubtful, number
        # An answer from the cache and a prompt that others shared measured no prefill here.
        book.ran("m", **{**RUN, "cached_tokens": 1000})
        book.ran("m", **{**RUN, "shared": True})
        assert book.of("m").doubtful, number
        book.ran("m", **RUN)
    assert not book.of("m").doubtful
    book.seed("m", MeasuredSpeed(1e6, 1.0, doubt="busy"), now_s=0.0)
    assert book.of("m").doubtful
    book.seed("m", MeasuredSpeed(100.0, 1.0), now_s=0.0)
    assert not book.of("m").doubtful


def test_a_figure_in_doubt_replaces_none_that_is_faster() -> None:
    book = ModelSpeeds()
    book.seed("m", MeasuredSpeed(19.0, 1.0, doubt="busy"), now_s=0.0)
    book.ran("m", **{**RUN, "prompt_tokens": 650, "cached_tokens": 0, "prefill_s": 650 / 27})
    shown = book.of("m")
    assert shown.prefill_tok_s == pytest.approx(27)
    book.seed("m", MeasuredSpeed(20.0, 0.5, doubt="busy"), now_s=1.0)
    assert book.of("m") == shown
    book.seed("m", MeasuredSpeed(20.0, 1e3, doubt="busy"), now_s=1.0)
    assert book.of("m") == replace(shown, decode_tok_s=1e3)
    # One that can be believed does: the device may compute otherwise than before.
    book.seed("m", MeasuredSpeed(20.0, 1.5), now_s=1.0)
    assert book.of("m").prefill_tok_s == 20.0


def test_a_figure_in_doubt_of_what_is_unknown_is_taken() -> None:
    """Beside other programs there may be no time for a chunk, but for single tokens."""
    book = ModelSpeeds()
    book.seed("m", MeasuredSpeed(0.0, 2.0, doubt="busy"), now_s=0.0)
    assert book.of("m") == MeasuredSpeed(0.0, 2.0, doubt="busy")


def test_a_prefill_moves_the_context_s_share_and_the_rest_by_their_parts_of_the_time() -> None:
    """A chunk of 256 takes 2.56 s, of which attention is 0.328: a token takes 8.72 ms besides.

    1000 tokens behind 1000 others are expected to take 8.72 and 15 s, and took half of that.
    """
    seed = MeasuredSpeed(prefill_tok_s=100.0, prefill_context_s=1e-5)
    run = {"prompt_tokens": 2000, "cached_tokens": 1000, "prefill_s": 23.72 / 2}
    found, share = after(run, seed=seed), 15 / 23.72
    assert found.prefill_tok_s == pytest.approx(100 * (1 + 0.2 * (1 - share)))
    assert found.prefill_context_s == pytest.approx(1e-5 / (1 + 0.2 * share))
    # One that took twice as long is believed to a twentieth: it may have shared the engine.
    found = after({**run, "prefill_s": 2 * 23.72}, seed=seed)
    assert found.prefill_tok_s == pytest.approx(100 * (1 - 0.05 * 0.5 * (1 - share)))
    assert found.prefill_context_s == pytest.approx(1e-5 / (1 - 0.05 * 0.5 * share))


@pytest.mark.parametrize(
    ("took_s", "tok_s"), [(1.0, 120.0), (2.0, 100.0), (2.1, 100.0), (0.0, 100.0), (-1.0, 100.0)]
)
def test_a_part_that_was_computed_sooner_than_expected_makes_the_machine_faster(
    took_s: float, tok_s: float
) -> None:
    book = ModelSpeeds()
    book.part_ran("m", expected_s=2.0, took_s=1.0, now_s=0.0)
    assert book.of("m") == MeasuredSpeed()
    book.seed("m", MeasuredSpeed(prefill_tok_s=100.0), now_s=0.0)
    book.part_ran("m", expected_s=2.0, took_s=took_s, now_s=0.0)
    assert book.of("m").prefill_tok_s == pytest.approx(tok_s)
