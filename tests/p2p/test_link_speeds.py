"""What a path sustains: a measurement beside other work does not rule, whatever comes after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.limits import MIB
from fleetd.p2p.link_speeds import (
    AGAIN_S,
    AGREE,
    RAISED,
    SLOW,
    TRIES,
    Burst,
    LinkSpeeds,
    ProbeSchedule,
    again,
)

USUAL = 2e9  # of loopback
RATES = st.floats(1e4, 1e11)


def bursts(*rates: float) -> list[Burst]:
    """A small one, and runs of the largest size."""
    return [(MIB, MIB / rates[0]), *((8 * MIB, 8 * MIB / rate) for rate in rates)]


class Path:
    """A path that is measured whenever it is due, in steps of a second; ``rate``: of a burst at a time."""

    def __init__(self, rate: Callable[[float], float]) -> None:
        self.rate = rate
        self.speeds = LinkSpeeds()
        self.schedule = ProbeSchedule()
        self.measured_s: list[float] = []

    def run(self, until_s: int, *, epoch: int = 1, idle: bool = True) -> None:
        for now in range(until_s):
            if self.schedule.wants_bursts(self.speeds, epoch, now, idle=idle):
                self.schedule.began(epoch, now, bursts=True)
                self.measured_s.append(now)
                found = self.schedule.judged(bursts(self.rate(now), self.rate(now)), USUAL)
                assert found is not None
                (count, seconds), sure = found
                self.speeds.transferred(count / seconds, now, sure=sure)

    @property
    def bytes_per_s(self) -> float:
        assert self.speeds.bytes_per_s is not None
        return self.speeds.bytes_per_s


def test_a_probe_beside_other_work_is_repeated_soon_and_the_path_recovers() -> None:
    """Both bursts took as long, so only the kind of path shows that something was wrong."""
    path = Path(lambda now: 21e6 if now < 10 else 900e6)
    path.run(1)
    assert path.bytes_per_s == pytest.approx(21e6)
    assert path.speeds.doubtful(1)
    path.run(int(AGAIN_S) + 1)
    assert path.bytes_per_s == pytest.approx(900e6)
    assert not path.speeds.doubtful(AGAIN_S + 1)
    # Known well enough, it costs no more bursts before an hour has passed.
    path.run(3000)
    assert path.measured_s == [0, AGAIN_S]


def test_nothing_is_repeated_while_the_machines_have_other_work() -> None:
    path = Path(lambda now: 21e6)
    path.run(1000, idle=False)
    assert path.measured_s == [0]


def test_a_path_that_is_as_slow_each_time_is_believed_in_the_end() -> None:
    path = Path(lambda now: 21e6)
    path.run(1000)
    assert path.measured_s == [AGAIN_S * waited for waited in (0, 1, 3, 7)]
    assert len(path.measured_s) == TRIES
    assert path.bytes_per_s == pytest.approx(21e6)
    assert not path.speeds.doubtful(1000)


def test_a_path_that_never_agrees_with_itself_is_asked_less_and_less_often() -> None:
    flip = iter(range(10**6))
    path = Path(lambda now: (100e6, 900e6)[next(flip) % 2])
    path.run(24 * 3600)
    assert len(path.measured_s) < 40
    gaps = [after - before for before, after in zip(path.measured_s, path.measured_s[1:], strict=False)]
    assert sorted(gaps) == gaps
    assert gaps[-1] == limits.LINK_SPEED_S


def test_a_new_session_measures_at_once_and_begins_to_count_anew() -> None:
    path = Path(lambda now: 21e6)
    path.run(100)
    before = len(path.measured_s)
    path.run(1, epoch=2)
    assert len(path.measured_s) == before + 1
    assert path.schedule.tries == 1


def test_an_old_figure_is_measured_again_and_counts_no_longer() -> None:
    path = Path(lambda now: 900e6 if now < 10 else 400e6)
    path.run(int(limits.LINK_SPEED_S) + 2)
    assert path.measured_s == [0, limits.LINK_SPEED_S]
    assert path.bytes_per_s == pytest.approx(400e6)


# ---- Which transfers count ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(RATES, st.floats(0, 1e5), st.booleans()), max_size=40), RATES)
def test_whatever_came_before_a_sure_transfer_raises_the_figure_to_half_of_it_at_least(
    history: list[tuple[float, float, bool]], newest: float
) -> None:
    speeds, now = LinkSpeeds(), 0.0
    for rate, passed_s, sure in history:
        now += passed_s
        speeds.transferred(rate, now, sure=sure)
    speeds.transferred(newest, now)
    found = speeds.bytes_per_s
    assert found is not None
    assert found >= newest / RAISED * 0.999
    assert found <= max([newest, *(rate for rate, _, _ in history)]) * 1.001


@given(st.lists(RATES, max_size=20), RATES)
def test_a_transfer_that_may_have_waited_only_raises(history: list[float], newest: float) -> None:
    speeds = LinkSpeeds()
    for rate in history:
        speeds.transferred(rate, 0.0)
    before = speeds.bytes_per_s
    speeds.carried(newest, 1.0)
    after = speeds.bytes_per_s
    assert after is not None
    if before is not None:
        assert after >= before if newest > before else after == before


def test_a_path_that_became_slow_is_known_to_be_after_two_measurements() -> None:
    speeds = LinkSpeeds()
    for _ in range(4):
        speeds.transferred(900e6, 0.0)
    speeds.transferred(30e6, 1.0)
    assert speeds.bytes_per_s == 900e6
    speeds.transferred(30e6, 2.0)
    assert speeds.bytes_per_s == 30e6


def test_a_doubtful_measurement_counts_only_where_there_is_no_better_one() -> None:
    speeds = LinkSpeeds()
    speeds.transferred(21e6, 0.0, sure=False)
    assert speeds.bytes_per_s == 21e6
    speeds.transferred(30e6, 1.0)
    assert (speeds.bytes_per_s, speeds.doubtful(1.0)) == (30e6, False)
    speeds.transferred(20e6, 2.0, sure=False)
    assert speeds.bytes_per_s == 30e6
    # A hand-off was far later than this promised.
    speeds.doubt()
    assert (speeds.bytes_per_s, speeds.doubtful(2.0)) == (20e6, True)


# ---- One measurement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "more"),
    [
        ([900e6], True),
        ([900e6, 900e6], False),
        ([900e6 / AGREE * 1.01, 900e6], False),
        ([900e6 / AGREE * 0.99, 900e6], True),
        ([100e6, 300e6, 850e6], True),
        ([100e6, 300e6, 850e6, 900e6], False),
        ([1e6, 10e6, 100e6, 900e6], False),
    ],
)
def test_the_largest_burst_is_repeated_until_the_best_two_agree(rates: list[float], more: bool) -> None:
    assert again(bursts(*rates)) is more


def test_no_burst_asks_for_none() -> None:
    assert not again([])
    assert ProbeSchedule().judged([], USUAL) is None


@pytest.mark.parametrize(
    ("rates", "sure"),
    [
        ((900e6, 900e6), True),
        ((900e6,), False),
        ((900e6, 300e6), False),
        ((100e6, 800e6, 900e6), True),
        ((SLOW * USUAL * 0.99,) * 2, False),
        ((SLOW * USUAL * 1.01,) * 2, True),
    ],
)
def test_bursts_that_agree_and_are_as_fast_as_such_paths_are_can_be_believed(
    rates: tuple[float, ...], sure: bool
) -> None:
    found = ProbeSchedule(tries=1).judged(bursts(*rates), USUAL)
    assert found is not None
    (count, seconds), believed = found
    assert count / seconds == pytest.approx(max(rates))
    assert believed is sure
