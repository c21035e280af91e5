"""Until when a member of a group has to be further with its layers."""

from __future__ import annotations

import math

from fleetd import limits
from fleetd.engine.protocol import WAITING
from fleetd.requests.groups.load_deadline import LoadDeadline
from fleetd.requests.groups.messages import StageTold

ALL = 1 << 40


def given_up_s(deadline: LoadDeadline, told: list[StageTold], every_s: float) -> float:
    """When a member that says this, a word every so often, would be given up; infinite if it is not."""
    for number, each in enumerate(told, 1):
        if deadline.due_s <= number * every_s:
            return deadline.due_s
        deadline.told(each, number * every_s)
    return math.inf


def test_a_member_that_says_nothing_of_its_layers_is_given_up() -> None:
    assert LoadDeadline(3.0, 10.0).due_s == 10.0 + limits.GROUP_LOAD_S
    # Of layers that take an hour to load, more is waited for.
    assert LoadDeadline(3600.0, 10.0).due_s == 10.0 + limits.LOAD_LATE * 3600.0


def test_one_that_repeats_itself_is_given_up() -> None:
    same = [StageTold("reading", 5, ALL)] * 1000
    assert given_up_s(LoadDeadline(3.0, 0.0), same, 1.0) == 1.0 + limits.GROUP_LOAD_S


def test_a_load_that_never_ends_is_given_up_however_steadily_it_goes_on() -> None:
    further = [StageTold("reading", done, ALL) for done in range(10_000)]
    assert given_up_s(LoadDeadline(3.0, 0.0), further, 60.0) == limits.ENGINE_LOAD_S
    named = [StageTold(f"stage {number}") for number in range(10_000)]
    assert given_up_s(LoadDeadline(3.0, 0.0), named, 60.0) == limits.ENGINE_LOAD_S
    # What alternates with it does not give it more time.
    turns = [StageTold("copying" if n % 2 else f"stage {n}", n, ALL) for n in range(10_000)]
    given_up = given_up_s(LoadDeadline(3.0, 0.0), turns, 60.0)
    assert limits.ENGINE_LOAD_S <= given_up <= 2 * limits.ENGINE_LOAD_S + 60.0


def test_a_slow_load_that_goes_on_is_waited_for() -> None:
    """Two terabytes at half a gigabyte a second."""
    load_s = 4000.0
    further = [StageTold("reading", second, 4000) for second in range(0, 4000, 100)]
    assert given_up_s(LoadDeadline(load_s, 0.0), further, 100.0) == math.inf


def test_what_is_fetched_may_take_days_while_bytes_come() -> None:
    deadline = LoadDeadline(3.0, 0.0)
    fetched = [StageTold("downloading", done, ALL) for done in range(10_000)]
    assert given_up_s(deadline, fetched, 60.0) == math.inf
    assert deadline.due_s == 600_000.0 + limits.GROUP_LOAD_S


def test_another_model_may_load_first() -> None:
    deadline = LoadDeadline(3.0, 0.0)
    deadline.told(StageTold(f"{WAITING}tiny to load"), 5.0)
    assert deadline.due_s == 5.0 + limits.ENGINE_LOAD_S
    # The load itself has as long as if there had been none.
    deadline.told(StageTold("reading", 1, ALL), 805.0)
    assert deadline.due_s == 805.0 + limits.GROUP_LOAD_S
