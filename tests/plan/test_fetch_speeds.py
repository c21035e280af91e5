"""What the last fetches from a machine took predicts the next one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.limits import MIB
from fleetd.plan.costs import LinkSpeed
from fleetd.plan.fetch_speeds import FetchSpeed, FetchSpeeds

LINK = LinkSpeed(1000 * MIB, 0.001)
MEMORY, DISK = 1.0, 0.0


class Way:
    """What fetches from one machine really take, and what is predicted of them."""

    def __init__(self) -> None:
        self.speeds = FetchSpeeds()
        self.now_s = 0.0

    def fetch(self, really: FetchSpeed, n_bytes: int, cached: float = MEMORY, node: str = "a") -> None:
        opening_s, took_s = really.opening_s, really.seconds(n_bytes)
        self.speeds.fetched(node, cached, n_bytes, opening_s=opening_s, took_s=took_s, now_s=self.now_s)

    def predicted(
        self, cached: float = MEMORY, node: str = "a", link: LinkSpeed = LINK, disk: float = 500 * MIB
    ) -> FetchSpeed:
        return self.speeds.speed(node, link, disk, cached, self.now_s)


def same(found: FetchSpeed, expected: FetchSpeed) -> bool:
    return found.opening_s == pytest.approx(expected.opening_s) and found.bytes_per_s == pytest.approx(
        expected.bytes_per_s
    )


def test_before_the_first_fetch_the_figures_of_link_and_disk_count() -> None:
    assert same(Way().predicted(), FetchSpeed(limits.FETCH_FIXED_S + 0.004, 500 * MIB))
    assert same(Way().predicted(disk=0.0), FetchSpeed(limits.FETCH_FIXED_S + 0.004, 200 * MIB))
    assert same(Way().predicted(link=LinkSpeed(100 * MIB)), FetchSpeed(limits.FETCH_FIXED_S, 100 * MIB))
    assert Way().predicted(link=LinkSpeed(0.0)).bytes_per_s == 0.0


def test_a_fetch_that_came_at_once_says_nothing_of_the_rate_and_old_ones_say_nothing_at_all() -> None:
    way, figures = Way(), FetchSpeed(limits.FETCH_FIXED_S + 0.004, 500 * MIB)
    # A daemon that has run for a day.
    way.now_s = 86_400.0
    way.speeds.fetched("a", MEMORY, 8 * MIB, opening_s=2.0, took_s=2.0, now_s=way.now_s)
    assert same(way.predicted(), FetchSpeed(2.0, figures.bytes_per_s))
    way.fetch(FetchSpeed(2.0, 100 * MIB), 8 * MIB)
    way.now_s += limits.FETCH_SPEED_S - 1
    assert same(way.predicted(), FetchSpeed(2.0, 100 * MIB))
    way.now_s += 2
    assert same(way.predicted(), figures)


@given(
    opening_s=st.floats(0, 10),
    rate=st.floats(MIB, 1400 * MIB),
    first=st.integers(MIB, 1000 * MIB),
    later=st.integers(1, 10_000 * MIB),
)
def test_one_fetch_of_any_size_predicts_one_of_any_other(
    opening_s: float, rate: float, first: int, later: int
) -> None:
    way, really = Way(), FetchSpeed(opening_s, rate)
    way.fetch(really, first)
    assert way.predicted().seconds(later) == pytest.approx(really.seconds(later), rel=1e-3)


def test_memory_and_disk_are_measured_apart_and_mixed_by_their_shares() -> None:
    way, memory, disk = Way(), FetchSpeed(0.1, 100 * MIB), FetchSpeed(0.5, 20 * MIB)
    for really, cached in ((memory, 1.0), (disk, 0.0), (memory, 0.95), (disk, 0.05)):
        way.fetch(really, 10 * MIB, cached)
    assert same(way.predicted(MEMORY), memory)
    assert same(way.predicted(DISK), disk)
    half = (memory.seconds(10 * MIB) + disk.seconds(10 * MIB)) / 2
    assert way.predicted(0.5).seconds(10 * MIB) == pytest.approx(half)
    way.fetch(FetchSpeed(9.0, MIB), 10 * MIB, cached=0.5)
    assert same(way.predicted(MEMORY), memory), "it measures neither"


def test_each_machine_has_speeds_of_its_own() -> None:
    way = Way()
    way.fetch(FetchSpeed(2.0, MIB), 10 * MIB, node="a")
    assert same(way.predicted(node="b"), Way().predicted())


def test_two_odd_fetches_of_five_change_nothing() -> None:
    way, really = Way(), FetchSpeed(0.1, 100 * MIB)
    for number in range(5):
        way.fetch(FetchSpeed(3.0, MIB) if number in (1, 4) else really, 100 * MIB)
    assert same(way.predicted(), really)


def test_noise_is_predicted_within_a_quarter_nine_times_of_ten() -> None:
    draw, errors = random.Random(4), []
    for _ in range(200):
        way = Way()
        for number in range(8):
            really = FetchSpeed(0.1 * draw.lognormvariate(0, 0.1), 100 * MIB * draw.lognormvariate(0, 0.1))
            if number >= 2:
                took_s = really.seconds(90 * MIB)
                errors.append(abs(took_s / way.predicted().seconds(90 * MIB) - 1))
            way.fetch(really, 90 * MIB)
    assert sorted(errors)[len(errors) * 9 // 10] < 0.25


def test_what_is_old_is_forgotten_so_that_a_machine_that_was_slow_is_asked_again() -> None:
    way = Way()
    way.fetch(FetchSpeed(5.0, MIB), 10 * MIB)
    way.now_s = limits.FETCH_SPEED_S - 1
    assert way.predicted().bytes_per_s == pytest.approx(MIB)
    way.now_s = limits.FETCH_SPEED_S
    assert same(way.predicted(), Way().predicted())


def test_a_few_bytes_say_nothing_of_the_rate() -> None:
    way = Way()
    way.fetch(FetchSpeed(0.2, 1000.0), 1000)
    assert same(way.predicted(), FetchSpeed(0.2, 500 * MIB))


def test_a_link_that_has_become_clearly_slower_counts_before_the_next_fetch() -> None:
    way = Way()
    way.fetch(FetchSpeed(0.1, 90 * MIB), 90 * MIB)
    assert way.predicted(link=LinkSpeed(80 * MIB)).bytes_per_s == pytest.approx(90 * MIB), "noise"
    assert way.predicted(link=LinkSpeed(10 * MIB)).bytes_per_s == pytest.approx(15 * MIB)
