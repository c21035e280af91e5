"""Smart prefill of long prompts: the sum of timed chunks, the planner's figures, and rows of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_architectures import tiny

from bench import __main__ as command
from bench import results
from bench.children.chunk_times import timed
from bench.figures import Figure
from bench.harness.samples import Samples
from bench.harness.smart_chats import Shortened
from bench.scenarios import smart_long, smart_two
from bench.scenarios.smart_formula import TimedChunk, as_measured, depths, expected, fitted, whole_s
from bench.scenarios.smart_long import OF_16K, OF_32K, SmartRun, gains
from bench.scenarios.smart_two import TwoPhases, by_whom
from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import Trace, TraceStep
from fleetd.engine.layers import prefill
from fleetd.engine.measure.chunk_size import PacedChunks
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.scoring import Scorer

# About what the target takes on two cores, and the default model as a scorer there.
SPEED = PrefillSpeed(0.04, 3.2e-6)
SCORER = Scorer("", "this", PrefillSpeed(0.002, 1e-7), context_tokens=8192)


def chunks(tokens: int, count: int = 9, size: int = 32, speed: PrefillSpeed = SPEED) -> list[TimedChunk]:
    starts = depths(tokens, count, 256)
    return [TimedChunk(start, size, speed.seconds(1.0, start, size)) for start in starts]


# ---- From chunks to a prompt -----------------------------------------------------------------------------


def test_chunks_are_spread_from_the_beginning_of_a_prompt_to_its_end() -> None:
    assert depths(16_000, 9, 256) == [0, 1968, 3936, 5904, 7872, 9840, 11_808, 13_776, 15_744]


@pytest.mark.parametrize("tokens", [2_200, 16_000, 32_000])
def test_timed_chunks_come_to_what_the_whole_prompt_takes(tokens: int) -> None:
    """What a token takes is a line over the tokens before it, and trapezoids under a line are exact."""
    assert whole_s(chunks(tokens), tokens) == pytest.approx(SPEED.total(1.0, range(tokens), 32), rel=1e-3)


def test_a_curve_that_bends_is_followed_by_more_chunks() -> None:
    def bent(count: int) -> float:
        starts = depths(16_000, count, 256)
        found = [TimedChunk(start, 32, 32 * (0.04 + 1e-10 * (start + 16) ** 2)) for start in starts]
        return whole_s(found, 16_000) / (16_000 * 0.04 + 1e-10 * 16_000**3 / 3)

    assert bent(9) == pytest.approx(1, abs=0.01)
    assert abs(bent(9) - 1) < abs(bent(4) - 1)


def test_the_order_of_chunks_changes_nothing() -> None:
    assert whole_s(chunks(16_000)[::-1], 16_000) == whole_s(chunks(16_000), 16_000)


def test_the_planner_s_speed_is_the_line_through_the_chunks() -> None:
    found = fitted(chunks(32_000))
    assert (found.token_s, found.context_s) == pytest.approx((SPEED.token_s, SPEED.context_s))
    # Noise may have it fall, and no speed may.
    falling = [TimedChunk(0, 32, 1.0), TimedChunk(1000, 32, 0.9)]
    assert fitted(falling).context_s == 0


def test_the_plan_has_the_pace_at_which_the_prompt_was_scored() -> None:
    scorer = as_measured(SCORER, 16_000, 40.0)
    plan = expected(SPEED, scorer, 16_000, 0.2)
    assert plan.score_s == pytest.approx(40.0)
    assert plan.prefill_s == pytest.approx(SPEED.total(1.0, range(3200), 256))
    assert plan.dense_s == pytest.approx(SPEED.total(1.0, range(16_000), 256))
    # Passes of a long prompt do not see each other: it takes about as many times as long as it is longer.
    assert expected(SPEED, scorer, 128_000, 0.2).score_s == pytest.approx(8 * 40, rel=0.1)


# ---- Rows of one machine ---------------------------------------------------------------------------------


def smart_run(
    first_s: float, score_s: float = 30.0, tokens: int = 16_000, predicted_s: float = 180.0
) -> SmartRun:
    trace = Trace(chosen=OptionView("smart", ["this"], predicted_s), prefill_s=first_s - 1)
    return SmartRun(first_s, Shortened("sparse", score_s, tokens, tokens // 5), trace)


def by_title(figures: Any) -> dict[str, Figure]:
    return {figure.title: figure for figure in figures}


def test_a_prompt_that_was_read_whole_is_shown_beside_the_sum_of_its_chunks() -> None:
    whole = SPEED.total(1.0, range(16_000), 32)
    rest = SPEED.total(1.0, range(3200), 256)
    rows = by_title(gains(OF_16K, [smart_run(30 + rest)], SCORER, chunks(16_000), 1.04 * whole))
    sooner = rows["sooner by, 16,000 tokens"]
    assert sooner.value == pytest.approx(1.04 * whole / (30 + rest))
    assert sooner.passes
    off = rows["first token, all of 16,000 tokens (dense: of 9 timed chunks), off the measured one by"]
    assert off.value == pytest.approx(1 - 1 / 1.04, abs=1e-3)
    formula = rows["of what the formula allows, 16,000 tokens"]
    assert formula.value == pytest.approx(1)
    assert formula.passes
    assert not [title for title in rows if "modelled" in title]


@pytest.mark.parametrize(("lost_s", "passes"), [(5.0, True), (12.0, False)])
def test_time_that_the_formula_does_not_know_falls_short_from_a_twentieth_on(
    lost_s: float, passes: bool
) -> None:
    rest = SPEED.total(1.0, range(3200), 256)
    found = gains(OF_16K, [smart_run(30 + rest + lost_s)], SCORER, chunks(16_000), 1000.0)
    assert by_title(found)["of what the formula allows, 16,000 tokens"].passes is passes


def test_a_prompt_of_which_only_chunks_were_timed_says_so_in_every_row_that_rests_on_it() -> None:
    run = smart_run(390.0, 60.0, 32_000)
    rows = by_title(gains(OF_32K, [run], SCORER, chunks(32_000), 0.0))
    of_32k = [title for title in rows if "32,000" in title]
    assert len(of_32k) == 4
    assert all("(dense: of 9 timed chunks)" in title for title in of_32k)
    assert rows["sooner by, 32,000 tokens (dense: of 9 timed chunks)"].bar == OF_32K.sooner


def test_longer_prompts_are_modelled_and_called_so() -> None:
    run = smart_run(390.0, 60.0, 32_000)
    rows = by_title(gains(OF_32K, [run], SCORER, chunks(32_000), 0.0))
    modelled = [rows[f"sooner by, {tokens} tokens, modelled"] for tokens in ("64,000", "128,000")]
    plan = expected(SPEED, as_measured(SCORER, 32_000, 60.0), 128_000, 0.2)
    assert modelled[1].value == pytest.approx(plan.dense_s / plan.predicted_s)
    assert modelled[0].value < modelled[1].value
    assert all(row.bar is None and "shortened" in row.note for row in modelled)


@pytest.mark.parametrize(("score_s", "passes"), [(36.0, True), (44.0, False)])
def test_the_scorer_s_share_of_the_time_has_a_bar(score_s: float, passes: bool) -> None:
    rows = by_title(smart_long._scoring([smart_run(200.0, score_s)], "16,000 tokens", OF_16K.share))
    assert rows["the scorer's share of the time, 16,000 tokens"].passes is passes
    assert rows["the daemon's own prediction, off by, 16,000 tokens"].value == pytest.approx(1 - 180 / 199)
    assert rows["share of the tokens that is kept, 16,000 tokens"].note == "form: sparse"


# ---- Rows of two machines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("two", "of_product", "passes"),
    [
        # Both halves as fast again as alone: what is gained is the product.
        (TwoPhases(90.0, 25.0, 0.2, ""), 200 / 90 / (150 / 65), True),
        # Only one machine scores: half of the gain stands still.
        (TwoPhases(125.0, 50.0, 0.2, ""), 200 / 125 / 2, False),
    ],
)
def test_gains_of_both_ways_multiply_if_both_machines_do_both(
    two: TwoPhases, of_product: float, passes: bool
) -> None:
    seen = Samples()
    smart_two.note(seen, TwoPhases(200.0, 50.0, 0.2, ""), two)
    rows = by_title(smart_two.gains(seen, "16,000 tokens", "both"))
    row = rows["gain of both, of the product of smart prefill's and shared prefill's, 16,000 tokens"]
    assert row.value == pytest.approx(of_product)
    assert row.passes is passes


def test_a_trace_tells_who_scored_and_who_read() -> None:
    steps = [TraceStep("scored", "home"), TraceStep("scored", "helper"), TraceStep("computed", "home")]
    assert by_whom(Trace(steps=steps)) == "scored by home and helper, read by home"
    assert by_whom(Trace()) == "scored by nobody, read by nobody"


# ---- The child -------------------------------------------------------------------------------------------


def ticking(step_s: float = 0.5) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: step_s * next(ticks)


@pytest.mark.parametrize("start", [0, 300])
def test_chunks_are_computed_behind_rows_that_nobody_computed(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, before = prefill.read, list[int]()

    def noted(model: Any, tokens: Any, cache: list[Any], room: int) -> None:
        before.append(cache[0].offset)
        read(model, tokens, cache, room)

    monkeypatch.setattr(prefill, "read", noted)
    found = timed(tiny("llama"), 64, PacedChunks(), start=start, count=2, chunk=32, clock=ticking())
    assert found == [(start, 32, 0.5), (start + 32, 32, 0.5)]
    assert before == [start, start + 32]


def test_a_chunk_is_as_long_as_a_worker_at_that_pace_would_have_it() -> None:
    paced = PacedChunks()
    # The first one takes a second for each of its tokens: from then on the smallest.
    first, second = timed(tiny("llama"), 64, paced, start=64, count=2, clock=ticking(200.0))
    assert first[1] > second[1] == 32


def test_a_model_without_rows_to_make_up_is_refused() -> None:
    with pytest.raises(ValueError, match="made up"):
        timed(tiny("mamba2"), 64, PacedChunks(), start=64, count=1, chunk=32)


# ---- By name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smart-16k", "smart-32k", "smart-two"])
def test_a_look_at_long_prompts_takes_short_ones_and_is_no_measurement(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[int]()

    def taken(tokens: int) -> Iterator[Figure]:
        asked.append(tokens)
        yield Figure("of", "count", [float(tokens)])

    monkeypatch.setattr(smart_long, "_figures", lambda runs, prompt, **sizes: taken(prompt.tokens))
    monkeypatch.setattr(smart_two, "_figures", lambda runs, length, layers: taken(length))
    monkeypatch.setattr(smart_two, "why_no_cores", lambda: "")
    # How fast the machine is just now is no part of this.
    monkeypatch.setattr(command.host, "loop_s", lambda: 0.1)
    kept = tmp_path / command.KEPT
    for quick in (True, False):
        assert command._run(name, quick, 1, kept)
        assert results.load(kept)[name].quick is quick
    assert asked[0] < 4_000 < 16_000 <= asked[1]
    # And what was measured is not replaced by a look.
    assert command._run(name, True, 0, kept)
    assert not results.load(kept)[name].quick


def test_the_scorer_is_the_default_model_as_the_daemon_measured_it() -> None:
    engine = {"model": "smollm2-135m", "speed": {"prefill_tok_s": 500.0}, "shape": {"context_tokens": 8192}}
    found = smart_long.scorer_of(SimpleNamespace(status=lambda: {"engines": [engine]}))  # type: ignore[arg-type]
    assert found.context_tokens == 8192
    assert found.speed == PrefillSpeed.measured(500.0)
    with pytest.raises(RuntimeError, match="has not been measured"):
        smart_long.scorer_of(SimpleNamespace(status=lambda: {"engines": []}))  # type: ignore[arg-type]
