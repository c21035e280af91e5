"""What parts of prompts teach about machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.speed_corrections import (
    CHANGED,
    HALF_S,
    LEAST_S,
    MOST,
    CorrectedWork,
    PromptWork,
    SpeedCorrections,
)

TOKEN_S = 1e-3


def of(node: str = "a", model: str = "m", work: PromptWork = "prefill") -> CorrectedWork:
    return CorrectedWork(node, model, work)


def ran(paces: SpeedCorrections, took_s: float, *, expected_s: float = 4.0, node: str = "a") -> None:
    paces.ran(of(node), TOKEN_S, 100.0, expected_s=expected_s, took_s=took_s)


def factor(
    paces: SpeedCorrections,
    node: str = "a",
    model: str = "m",
    token_s: float = TOKEN_S,
    work: PromptWork = "prefill",
) -> float:
    return paces.factor(of(node, model, work), token_s, 100.0)


def test_nothing_is_known_at_first() -> None:
    assert factor(SpeedCorrections()) == 1.0


def test_a_machine_that_takes_longer_is_soon_expected_to() -> None:
    paces = SpeedCorrections()
    for _ in range(5):
        ran(paces, 6.0)
    assert factor(paces) == pytest.approx(1.5, rel=0.02)
    assert factor(paces, model="other") == factor(paces, node="b") == 1.0


def test_one_that_is_faster_than_measured_gets_more() -> None:
    paces = SpeedCorrections()
    ran(paces, 2.0)
    assert factor(paces) == pytest.approx(0.75)


def test_a_machine_that_was_slow_for_a_while_gets_another_chance() -> None:
    paces = SpeedCorrections()
    ran(paces, 12.0)
    assert factor(paces) == pytest.approx(2.0)
    assert paces.factor(of(), TOKEN_S, 100.0 + HALF_S) == pytest.approx(1.5)
    assert paces.factor(of(), TOKEN_S, 100.0 + 20 * HALF_S) == pytest.approx(1.0, abs=1e-3)


def test_what_was_learned_of_other_figures_is_void() -> None:
    paces = SpeedCorrections()
    ran(paces, 12.0)
    assert factor(paces, token_s=TOKEN_S * CHANGED * 1.01) == 1.0
    assert factor(paces, token_s=TOKEN_S / CHANGED / 1.01) == 1.0
    # A machine that corrected its own figure a little is not corrected for that twice.
    assert factor(paces, token_s=TOKEN_S * 1.1) == pytest.approx(2.0 / 1.1)


@pytest.mark.parametrize(("took_s", "most"), [(1e9, MOST), (1e-9, 1 / MOST)])
def test_what_a_machine_claims_of_itself_goes_only_so_far(took_s: float, most: float) -> None:
    paces = SpeedCorrections()
    for _ in range(20):
        ran(paces, took_s)
    assert factor(paces) == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize(("expected_s", "took_s"), [(LEAST_S / 2, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_what_is_too_short_or_senseless_teaches_nothing(expected_s: float, took_s: float) -> None:
    paces = SpeedCorrections()
    ran(paces, took_s, expected_s=expected_s)
    assert factor(paces) == 1.0


def test_machines_and_models_that_are_long_gone_are_forgotten() -> None:
    paces = SpeedCorrections()
    for number in range(limits.SPEED_CORRECTIONS + 1):
        ran(paces, 8.0, node=str(number))
    assert factor(paces, node="0") == 1.0
    assert factor(paces, node="1") == 1.5


def test_prefill_and_scoring_by_the_same_model_do_not_correct_each_other() -> None:
    paces = SpeedCorrections()
    ran(paces, 12.0)
    assert factor(paces, work="score") == 1.0
    paces.ran(of(work="score"), TOKEN_S, 100.0, expected_s=4.0, took_s=2.0)
    assert (factor(paces), factor(paces, work="score")) == (2.0, 0.75)


# ---- A calibration beside other programs -------------------------------------------------------------------


def shares(paces: SpeedCorrections, figures: dict[str, float], now_s: float) -> dict[str, float]:
    """What the two machines are taken to need for a token."""
    return {node: token_s * paces.factor(of(node), token_s, now_s) for node, token_s in figures.items()}


@given(st.floats(1.0, 8.0), st.floats(0, 60))
def test_an_equal_machine_that_seemed_faster_is_within_a_quarter_after_five_shared_prompts(
    wrong: float, between_s: float
) -> None:
    """The home was calibrated beside other programs, so its equal seemed ``wrong`` times as fast."""
    paces, own, now_s = SpeedCorrections(), ModelSpeeds(), 0.0
    own.seed("m", MeasuredSpeed(1000.0 / wrong, 1.0), now_s=now_s)
    for _ in range(5):
        figures = {"home": PrefillSpeed.of(own.of("m")).token_s, "equal": TOKEN_S}
        taken = shares(paces, figures, now_s)
        # Parts that would end at the same time by what is known; a token really takes both TOKEN_S.
        rates = {node: 1 / token_s for node, token_s in taken.items()}
        for node, rate in rates.items():
            tokens = 10_000 * rate / sum(rates.values())
            expected_s, took_s = tokens * figures[node], tokens * TOKEN_S
            paces.ran(of(node), figures[node], now_s, expected_s=expected_s, took_s=took_s)
            if node == "home":
                own.part_ran("m", expected_s=expected_s, took_s=took_s, now_s=now_s)
        now_s += between_s
    taken = shares(paces, {"home": PrefillSpeed.of(own.of("m")).token_s, "equal": TOKEN_S}, now_s)
    assert taken["home"] / taken["equal"] <= 1.25
    # What was learned of the home outlives the correction, which fades.
    assert PrefillSpeed.of(own.of("m")).token_s <= 1.8 * TOKEN_S


@given(st.floats(1 / 8, 8.0))
def test_a_helper_whose_own_figure_is_wrong_is_within_a_quarter_too(wrong: float) -> None:
    """It knows nothing of these prompts, so only what is learned here corrects it."""
    paces, figure = SpeedCorrections(), TOKEN_S * wrong
    for _ in range(5):
        expected_s = 1000 * figure
        paces.ran(of(), figure, 100.0, expected_s=expected_s, took_s=1000 * TOKEN_S)
    taken = figure * paces.factor(of(), figure, 100.0)
    assert 1 / 1.25 <= taken / TOKEN_S <= 1.25


def test_a_part_that_others_slowed_does_not_make_this_machine_slow_for_good() -> None:
    own = ModelSpeeds()
    own.seed("m", MeasuredSpeed(1000.0, 1.0), now_s=0.0)
    known = own.of("m")
    own.part_ran("m", expected_s=1.0, took_s=5.0, now_s=0.0)
    own.part_ran("m", expected_s=1.0, took_s=0.0, now_s=0.0)
    own.part_ran("never ran", expected_s=1.0, took_s=0.5, now_s=0.0)
    assert own.of("m") == known
    assert own.of("never ran").prefill_tok_s == 0


def test_the_first_work_of_each_length_teaches_nothing_where_it_compiles_kernels() -> None:
    """An H100's host took 50 s for a kernel: what comes after that is as fast as was measured at load."""
    paces = SpeedCorrections()
    for took_s, expected_s, known in [
        (54.0, 4.0, 1.0),
        (4.0, 4.0, 1.0),
        (70.0, 16.0, 1.0),
        (32.0, 16.0, 1.5),
    ]:
        paces.ran(of(), TOKEN_S, 100.0, expected_s=expected_s, took_s=took_s, compiles=True)
        assert factor(paces) == known
    # Of other work nothing was computed yet.
    paces.ran(of(work="score"), TOKEN_S, 100.0, expected_s=4.0, took_s=54.0, compiles=True)
    assert factor(paces, work="score") == 1.0
    ran(paces, 54.0, node="other device")
    assert factor(paces, "other device") > 4


def test_what_was_compiled_is_remembered_of_a_bounded_number_of_machines() -> None:
    paces = SpeedCorrections()
    for number in range(limits.SPEED_CORRECTIONS + 1):
        paces.ran(of(str(number)), TOKEN_S, 100.0, expected_s=4.0, took_s=54.0, compiles=True)
    assert len(paces._compiled) == limits.SPEED_CORRECTIONS
