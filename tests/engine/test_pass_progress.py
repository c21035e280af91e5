"""A rank's passes as the daemon sees them through the memory that both share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fleetd import limits
from fleetd.engine.measure.pass_progress import PassProgress


class PassClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> PassClock:
    return PassClock()


@pytest.fixture
def both(clock: PassClock) -> Iterator[tuple[PassProgress, PassProgress]]:
    """The rank's and the daemon's."""
    fd = PassProgress.create()
    found = PassProgress(fd, clock), PassProgress(fd, clock)
    os.close(fd)
    yield found
    for each in found:
        each.close()


def passed(rank: PassProgress, clock: PassClock, seconds: float, tokens: int = 1) -> None:
    with rank.passing(tokens):
        clock.now += seconds


def test_nothing_under_way_is_never_late(both: tuple[PassProgress, PassProgress], clock: PassClock) -> None:
    rank, daemon = both
    passed(rank, clock, 0.1)
    clock.now += 3600
    assert (daemon.done, daemon.late_s, daemon.under_way) == (1, 0.0, False)


def test_a_first_pass_has_time_for_kernels(both: tuple[PassProgress, PassProgress], clock: PassClock) -> None:
    rank, daemon = both
    with rank.passing(1):
        clock.now += limits.RANK_FIRST_S - 1
        assert daemon.under_way
        assert daemon.late_s == 0.0
        clock.now += 2
        assert daemon.late_s == pytest.approx(1.0, abs=1e-3)


def test_a_pass_is_late_after_many_times_what_others_took(
    both: tuple[PassProgress, PassProgress], clock: PassClock
) -> None:
    rank, daemon = both
    for seconds in (0.5, 0.5, 40.0):
        passed(rank, clock, seconds)
    with rank.passing(1):
        clock.now += limits.RANK_STALL_PASSES * 0.5 - 0.1
        assert daemon.late_s == 0.0
        clock.now += 0.2
        assert daemon.late_s > 0.0


def test_a_fast_pass_is_not_late_before_the_least_time(
    both: tuple[PassProgress, PassProgress], clock: PassClock
) -> None:
    rank, daemon = both
    passed(rank, clock, 0.001)
    with rank.passing(1):
        clock.now += limits.RANK_STALL_S - 0.1
        assert daemon.late_s == 0.0


def test_a_long_pass_has_time_by_its_tokens(
    both: tuple[PassProgress, PassProgress], clock: PassClock
) -> None:
    rank, _ = both
    passed(rank, clock, 0.01)
    assert rank.allowed_s(1000) == limits.RANK_FIRST_S
    passed(rank, clock, 5.0, tokens=500)
    assert rank.allowed_s(1000) == pytest.approx(limits.RANK_STALL_PASSES * 10.0)
    assert rank.allowed_s(1) == limits.RANK_STALL_S


def test_a_pass_that_fails_is_over(both: tuple[PassProgress, PassProgress], clock: PassClock) -> None:
    rank, daemon = both
    with pytest.raises(RuntimeError), rank.passing(1):
        raise RuntimeError
    assert not daemon.under_way
    assert daemon.done == 0


def test_the_disk_has_a_place_for_what_is_shared() -> None:
    """Else the kernel ends whoever writes there first, once the disk is full: there is no error to raise."""
    fd = PassProgress.create()
    try:
        assert os.fstat(fd).st_blocks > 0
    finally:
        os.close(fd)
