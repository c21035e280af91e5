"""The planner predicts what others measured, from their single machines and their links alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.scenarios import modelled
from bench.scenarios.modelled import DS4, TOLERANCE, Prediction, ds4, ds4_speed, exo
from fleetd.plan.prefill.split import checked


@pytest.mark.parametrize("predict", [*(lambda n=n: ds4(n) for n in DS4), exo])
def test_published_speed_ups_are_predicted_within_a_tenth(predict: Callable[[], Prediction]) -> None:
    made = predict()
    assert made.error <= TOLERANCE, f"{made.name}: published {made.published}, predicted {made.predicted}"
    # What fleetd would do on the same machines: never worse than what they do, by its own prices.
    assert made.choice.best.split is not None
    checked(made.choice.best.split)
    assert made.best >= made.predicted


def test_the_published_figures_are_those_of_the_sources() -> None:
    assert [round(both / alone, 2) for alone, both in DS4.values()] == [1.38, 1.66, 1.85]
    assert round(exo().published, 1) == 2.8


@pytest.mark.parametrize("tokens", DS4)
def test_one_speed_stands_for_all_lengths(tokens: int) -> None:
    took_s = ds4_speed().total(1.0, range(tokens), modelled.DS4_CHUNK)
    assert tokens / took_s == pytest.approx(DS4[tokens][0], rel=0.04)


def test_every_prediction_is_a_row_with_a_bar_and_a_source() -> None:
    measured = modelled.measure(1)
    judged = [figure for figure in measured.figures if figure.bar is not None]
    assert len(judged) == len(DS4) + 1
    assert all(figure.passes for figure in judged)
    assert all(figure.note for figure in measured.figures)
