"""A shortened prompt is read as text if others make that clearly sooner, and else at its own places."""

from __future__ import annotations

import pytest

from fleetd.plan.prefill.options import PrefillOption
from fleetd.plan.prefill.split import Split
from fleetd.plan.prompt_forms import FormChoice, sooner_form
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import RoutePrice
from fleetd.plan.ways import Way

SPLIT = Split("layers", (0, 2, 4), 4, 0, 1024, 256)
PRICE = RoutePrice(0.0, 0.0, 0.0, 0.0, 0.0)


def alone(seconds: float) -> Way:
    return Way(THIS_NODE, "this", PRICE, PrefillOption("local", predicted_s=seconds))


def helped(seconds: float) -> Way:
    option = PrefillOption("layers", ("s",), ("studio",), SPLIT, predicted_s=seconds)
    return Way(THIS_NODE, "this", PRICE, option)


def elsewhere(seconds: float) -> Way:
    return Way("s", "studio", PRICE, PrefillOption("local", predicted_s=seconds))


@pytest.mark.parametrize(
    ("text", "where"), [(helped(4.0), "layers with studio"), (elsewhere(4.0), "on studio")]
)
def test_text_is_taken_if_others_make_it_sooner(text: Way, where: str) -> None:
    choice = sooner_form(alone(10.0), text)
    assert choice.chosen == "text"
    assert choice.passed is not None
    assert (choice.passed.first_token_s, choice.passed.code) == (10.0, "slower")
    assert choice.passed.reason == (
        "One machine would read what is kept at its own places in 10.00 s. "
        f"It is read as text in 4.00 s ({where})."
    )


def test_a_text_that_is_sooner_by_too_little_is_told_and_not_taken() -> None:
    choice = sooner_form(alone(10.0), helped(9.5))
    assert choice.chosen == "sparse"
    assert choice.passed is not None
    assert (choice.passed.first_token_s, choice.passed.code) == (9.5, "margin")
    assert "That is 5 % less" in choice.passed.reason
    assert "10 % would do" in choice.passed.reason


@pytest.mark.parametrize(
    ("sparse", "text"),
    [
        (alone(10.0), alone(10.0)),
        (alone(10.0), elsewhere(11.0)),
        (None, helped(4.0)),
        (alone(10.0), None),
        (alone(0.0), helped(0.0)),
    ],
)
def test_nothing_is_told_of_text_that_is_no_sooner_or_unknown(sparse: Way | None, text: Way | None) -> None:
    assert sooner_form(sparse, text) == FormChoice("sparse")
