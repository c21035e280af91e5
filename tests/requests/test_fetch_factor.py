"""What fetches from a machine took corrects the next prediction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.plan.beginnings import KeptBeginning, from_peer
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.requests.kv_fetching.choice import FetchChoice, FetchSource, within_s
from fleetd.requests.members import Members

LINK = LinkSpeed(1e6, 0.0)


@given(bias=st.floats(0.3, 1000), expected_s=st.floats(0.1, 100))
def test_a_constant_bias_is_predicted_within_a_quarter_after_three_fetches(
    bias: float, expected_s: float
) -> None:
    members = Members(monotonic=lambda: 0.0)
    took_s = bias * expected_s
    for _ in range(3):
        members.fetched("a", expected_s=expected_s, took_s=took_s)
    assert took_s / (members.fetch_factor("a") * expected_s) == pytest.approx(1, abs=0.25)
    assert members.fetch_factor("b") == 1.0


def test_a_slow_machine_costs_more_before_a_prompt_is_placed_and_when_it_is_fetched() -> None:
    kept, speed = KeptBeginning(0, 10_000, 10_000_000, 1e9), PrefillSpeed(1e-2)
    once, twice = (from_peer(kept, 0, None, LINK, "a", speed, 1, factor) for factor in (1.0, 2.0))
    assert once is not None
    assert twice is not None
    assert twice.seconds - once.seconds == pytest.approx(limits.FETCH_FIXED_S + 10.0, rel=0.01)
    plain, slow = (FetchSource("a", "a", LINK, 4, factor=factor) for factor in (1.0, 3.0))
    assert slow.seconds(10**6) == 3 * plain.seconds(10**6)
    assert slow.figures_s(10**6, 4) == plain.seconds(10**6)


def test_what_came_is_checked_before_it_is_of_use_and_that_has_a_price() -> None:
    kept, speed = KeptBeginning(0, 10_000, 1000, 1e9), PrefillSpeed(1e-2)
    rows, states = (from_peer(kept, 0, None, LINK, "a", speed, n) for n in (0, 1))
    assert rows is not None
    assert states is not None
    # 16 tokens, or both blocks between two snapshots.
    assert rows.seconds == pytest.approx(limits.FETCH_FIXED_S + 0.16, abs=0.01)
    assert states.seconds == pytest.approx(limits.FETCH_FIXED_S + 5.12, abs=0.01)


def test_a_fetch_may_take_a_few_times_as_long_as_planned_and_no_longer_than_computing() -> None:
    def most_s(planned_s: float, computed_s: float, spent_s: float = 0.0) -> float:
        return within_s(FetchChoice(FetchSource("a", "a", LINK, 2), planned_s), [1.0, computed_s], spent_s)

    assert most_s(1.0, 100.0) == limits.FETCH_LATE
    assert most_s(10.0, 12.0, 1.0) == 11.0
    assert most_s(0.1, 0.2, 1.0) == limits.FETCH_BLOCK_S


def test_a_machine_that_is_silent_again_and_again_is_not_asked_for_a_while() -> None:
    members = Members(monotonic=lambda: 0.0)
    members.unanswered("a")
    assert not members.left_out("a", "fetch")
    members.answered("a")
    members.unanswered("a")
    assert not members.left_out("a", "fetch")
    members.unanswered("a")
    assert members.left_out("a", "fetch")
    assert not members.left_out("a", "answer"), "it may do everything else well"
