"""What shared prefills teach about machines."""

from __future__ import annotations

import pytest

from fleetd import limits
from fleetd.plan.speed_corrections import CHANGED, HALF_S, LEAST_S, MOST, SpeedCorrections

TOKEN_S = 1e-3


def ran(paces: SpeedCorrections, took_s: float, *, expected_s: float = 4.0, node: str = "a") -> None:
    paces.ran(node, "m", TOKEN_S, 100.0, expected_s=expected_s, took_s=took_s)


def factor(paces: SpeedCorrections, node: str = "a", model: str = "m", token_s: float = TOKEN_S) -> float:
    return paces.factor(node, model, token_s, 100.0)


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
    assert paces.factor("a", "m", TOKEN_S, 100.0 + HALF_S) == pytest.approx(1.5)
    assert paces.factor("a", "m", TOKEN_S, 100.0 + 20 * HALF_S) == pytest.approx(1.0, abs=1e-3)


def test_what_was_learned_of_other_figures_is_void() -> None:
    paces = SpeedCorrections()
    ran(paces, 12.0)
    assert factor(paces, token_s=TOKEN_S * CHANGED * 1.01) == 1.0
    assert factor(paces, token_s=TOKEN_S / CHANGED / 1.01) == 1.0
    assert factor(paces, token_s=TOKEN_S * 1.1) == pytest.approx(2.0)


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
