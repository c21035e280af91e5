"""Whether blocks go ahead of each other: pure, so every machine and every text here is made up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from family_params import in_turn

from fleetd.engine.speculation.ahead import (
    CLEAR,
    OFF,
    REST,
    AheadFlight,
    AheadGain,
    GainEvidence,
    GroupFlights,
)
from fleetd.engine.speculation.controller import Beside, Controller, Draft
from fleetd.engine.speculation.pass_costs import Costs

# What a flight takes ahead, of what it takes one block at a time.
FAST, SLOW = 0.6, 1.8
PROMISE = 1.4


def decided(
    gain: AheadGain,
    flights: Iterator[float],
    count: int,
    seed: int = 1,
    noise: float = 0.0,
    promise: float = PROMISE,
) -> float:
    """The speed of so many flights over that of one block at a time. ``flights``: what each takes ahead, in
    plain steps; 1 is what it would take alone. ``noise``: of each measurement."""
    dice = random.Random(seed)
    steps = 0.0
    for took in itertools.islice(flights, count):
        if not gain.next(promise):
            steps += 1
            continue
        steps += took
        gain.flew(1.0, took * dice.lognormvariate(0, noise) * (10 if noise and dice.random() < 0.02 else 1))
    return count / steps


def group_of(took: float, flights: int = 40) -> GroupFlights:
    """What a group's answers have left for the next one, on a machine and in texts of this kind."""
    found = GroupFlights()
    decided(AheadGain(found), itertools.repeat(took), flights)
    return found


def test_an_answer_begins_one_block_at_a_time_unless_much_is_promised() -> None:
    assert not AheadGain(GroupFlights()).next(1.2)
    assert AheadGain(GroupFlights()).next(2.0)


def test_what_promises_nothing_is_never_tried() -> None:
    gain = AheadGain(GroupFlights())
    assert not any(gain.next(1.0) for _ in range(200))


def test_blocks_go_ahead_soon_if_that_is_faster() -> None:
    assert decided(AheadGain(GroupFlights()), itertools.repeat(FAST), 40) >= 1.4
    assert decided(AheadGain(group_of(FAST)), itertools.repeat(FAST), 12) >= 1.5


def test_if_it_is_slower_it_is_hardly_tried() -> None:
    assert decided(AheadGain(GroupFlights()), itertools.repeat(SLOW), 100) >= 0.96
    assert decided(AheadGain(group_of(SLOW)), itertools.repeat(SLOW), 100) >= 0.98


def test_text_that_promises_much_is_still_tried_at_once_on_a_machine_that_gives_half_of_it() -> None:
    group = group_of(1.0)
    assert not AheadGain(group).next(1.2)
    assert AheadGain(group).next(2.0)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_costs_little_and_hides_no_gain(noise: float) -> None:
    slow = sorted(decided(AheadGain(GroupFlights()), itertools.repeat(1.3), 60, n, noise) for n in range(100))
    assert slow[10] >= 0.96
    fast = sorted(
        decided(AheadGain(GroupFlights()), itertools.repeat(FAST), 60, n, noise) for n in range(100)
    )
    assert fast[10] >= 1.3


def test_an_answer_that_changes_its_kind_of_text_half_way_is_followed() -> None:
    gain = AheadGain(GroupFlights())
    assert decided(gain, itertools.repeat(FAST), 60, promise=1.7) >= 1.4
    assert decided(gain, itertools.repeat(1.3), 60, promise=1.2) >= 0.97
    assert decided(gain, itertools.repeat(FAST), 60, promise=1.7) >= 1.4


@pytest.mark.parametrize("each", [1, 4])
def test_text_that_alternates_is_no_slower(each: int) -> None:
    def alternating() -> Iterator[float]:
        for which in itertools.cycle((0.7, 1.3)):
            yield from itertools.repeat(which, each)

    assert decided(AheadGain(GroupFlights()), alternating(), 120) >= 0.97


def test_an_answer_of_another_kind_than_those_before_it_soon_goes_by_what_it_finds() -> None:
    assert decided(AheadGain(group_of(FAST)), itertools.repeat(1.3), 60) >= 0.95
    assert decided(AheadGain(group_of(1.2)), itertools.repeat(FAST), 60, promise=1.8) >= 1.3


def test_answers_remember_for_the_next_one() -> None:
    assert AheadGain(group_of(FAST)).own.factor * PROMISE > CLEAR
    assert AheadGain(group_of(SLOW)).own.factor * PROMISE < CLEAR


def test_one_flight_that_was_held_up_counts_for_little() -> None:
    gain = AheadGain(group_of(FAST))
    assert gain.next(PROMISE)
    before = gain.own.promised
    gain.flew(1.0, 50.0)
    assert gain.own.promised <= before + OFF * PROMISE


def test_a_block_that_waited_for_one_that_was_dropped_counts_against_flights() -> None:
    gain = AheadGain(group_of(FAST))
    before, late = gain.own.factor, gain.own.late
    gain.delayed(0.5)
    assert gain.own.factor < before
    assert gain.own.late > late


def test_a_flight_is_held_against_blocks_alone_that_give_the_same_tokens() -> None:
    flight = AheadFlight(4, 32, lambda width: 1 + 0.1 * (width - 1))
    flight.took(3, 1.0)
    assert flight.alone == pytest.approx(1.3)
    flight.goes_on(6, 10)
    flight.took(6, 2.0)
    assert (flight.alone, flight.seconds) == (pytest.approx(1.3 + 1.5), 3.0)


def test_behind_the_last_draft_a_block_alone_is_no_wider_than_what_is_left() -> None:
    flight = AheadFlight(4, 6, lambda width: 1 + 0.1 * (width - 1))
    flight.took(6, 1.0)
    assert flight.alone == pytest.approx(1.3 + 1.1)


def test_what_may_still_come_of_a_flight_counts_from_the_tokens_it_has_given() -> None:
    flight = AheadFlight(4, 32, lambda width: 1 + 0.1 * (width - 1))
    flight.took(4, 1.0)
    flight.goes_on(6, 3)
    flight.took(3, 1.0)
    assert flight.alone == pytest.approx(1.3 + 1.2)


def test_tokens_that_nobody_guessed_would_have_come_one_by_one() -> None:
    flight = AheadFlight(4, 2, lambda width: 1 + 0.1 * (width - 1))
    flight.took(4, 1.0)
    assert flight.alone == pytest.approx(1.1 + 1 + 1)


def test_a_new_answer_weighs_what_was_found_by_no_more_than_eight_steps() -> None:
    assert GainEvidence(24.0, 32.0, 0.3).remembered() == GainEvidence(6.0, 8.0, 0.3)
    assert GainEvidence(1.0, 4.0, 0.3).remembered() == GainEvidence(1.0, 4.0, 0.3)


@pytest.mark.parametrize(
    ("steps", "lost", "late"), [(1.1, 1.1, 0.1 + 0.1 * 1.0), (50.0, 2.0, 0.1 + 0.1 * 1.9), (-3.0, 0.0, 0.09)]
)
def test_a_late_block_moves_what_is_expected_by_a_tenth_and_counts_for_two_steps_at_most(
    steps: float, lost: float, late: float
) -> None:
    gain = AheadGain(GroupFlights())
    gain.delayed(steps)
    for evidence in (gain.own, gain.group.evidence):
        assert (evidence.alone, evidence.promised) == (1.6, pytest.approx(2.0 + lost))
        assert evidence.late == pytest.approx(late)


def test_each_flight_that_lost_doubles_the_pause_until_blocks_ahead_pay() -> None:
    gain, rests = AheadGain(GroupFlights()), []
    for _ in range(6):
        gain.flew(1.0, 1.5)
        rests.append(gain.group.rest)
    assert rests == [4, 8, 16, 32, 64, 64]
    # One that gained ends the pauses, as twice the speed is promised and 0.8 of that is known to come.
    gain = AheadGain(GroupFlights(rest=64))
    assert gain.next(2.0)
    gain.flew(1.0, 0.6)
    assert gain.own.factor < 1
    assert gain.group.rest == REST


# ---- With the controller -----------------------------------------------------------------------------------

CURVE = {1: 1.0, 4: 1.4, 8: 1.9, 16: 3.0}
MOST = 15


def answer(acceptance: float, later: float, seed: int, ahead: AheadGain | None, tokens: int = 400) -> float:
    """Plain steps per token of an answer of which each draft is right with that chance. ``later``: what a
    block takes that follows another, of what it takes alone. ``ahead``: None sends one block at a time."""
    costs, machines = Costs(CURVE), 2 if ahead is not None else 1
    controller = Controller(Costs(CURVE), MOST, ahead=ahead)
    dice, done, steps, late = random.Random(seed), 0, 0.0, False
    while done < tokens:
        known = [done + i + 1 if dice.random() < acceptance else -1 for i in range(2 * MOST + 1)]
        draft = controller.choose({"s": known}, len(known), machines)
        right = next((i for i, token in enumerate(draft.tokens) if token < 0), len(draft.tokens))
        width = draft.block or 1 + len(draft.tokens)
        # A block gives a token for each of its own, unless a draft is wrong.
        given = [min(width, right + 1 - first) for first in range(0, right + 1, width)]
        blocks = -(-(1 + len(draft.tokens)) // width)
        for number, count in enumerate(given):
            took = costs.ratio(width) * (later if number else 1.0) + 0.3 * late
            beside = Beside.DROPPED if late else Beside.NOTHING
            controller.verified(
                draft if blocks == 1 else part_of(draft, width, number),
                range(done + 1, done + count + 1),
                took,
                beside=Beside.BLOCKS if blocks > 1 else beside,
                left=len(given) - number - 1,
            )
            late, steps, done = False, steps + took, done + count
        late = blocks > len(given)
    return steps / done


def part_of(draft: Draft, width: int, number: int) -> Draft:
    """The drafts that are held against one of its blocks."""
    return Draft(draft.source, draft.tokens[number * width : (number + 1) * width])


@pytest.mark.parametrize(("acceptance", "later"), in_turn([0.3, 0.7, 0.9, 0.97], [0.4, 0.6, 1.0, 1.6]))
def test_no_kind_of_text_is_clearly_slower_than_one_block_at_a_time(acceptance: float, later: float) -> None:
    group = GroupFlights()
    ahead = [answer(acceptance, later, seed, AheadGain(group)) for seed in range(10)]
    alone = [answer(acceptance, later, seed, None) for seed in range(10)]
    assert sum(alone) / sum(ahead) >= 0.97


def test_good_drafts_gain_from_a_second_machine() -> None:
    group = GroupFlights()
    ahead = [answer(0.97, 0.4, seed, AheadGain(group)) for seed in range(10)]
    alone = [answer(0.97, 0.4, seed, None) for seed in range(10)]
    assert sum(alone) / sum(ahead) >= 1.1
