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
from fleetd.engine.speculation.controller import NO_DRAFT, Beside, Controller, Draft, SourceStats
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


# ---- By hand: two machines, and passes that cost the same whatever their width -----------------------------

LEVEL = {1: 1.0, 16: 1.0}
SEVEN = (1, 2, 3, 4, 5, 6, 7)


class NotedGain(AheadGain):
    """Notes what flights were held against, and what came late."""

    def __init__(self, factor: float) -> None:
        super().__init__(GroupFlights(GainEvidence(alone=8 * factor, promised=8.0)))
        self.flown: list[tuple[float, float]] = []
        self.late: list[float] = []

    def flew(self, alone: float, ahead: float) -> None:
        self.flown.append((alone, ahead))

    def delayed(self, steps: float) -> None:
        self.late.append(steps)


def surely(
    ahead: AheadGain | None = None,
    *,
    curve: dict[int, float] = LEVEL,
    always: bool = False,
    again: bool = False,
) -> Controller:
    """Passes have four tokens at most; nine of ten drafts are right, which is well known."""
    controller = Controller(Costs(curve), 3, always=always, ahead=ahead, again=again)
    controller.records["s"] = SourceStats(_right=9e5, _judged=1e6, bearable=1e6)
    controller._bearable = 1e6
    return controller


# A block alone brings 1 + 0.9 + 0.81 + 0.729 = 3.44 tokens in a step. Two bring 5.70 tokens; the second one
# counts with a chance of 0.656 and takes half a step more, so that they are 1.25 times as fast.
@pytest.mark.parametrize(("factor", "ahead"), [(0.9, False), (0.95, True)])
def test_blocks_go_ahead_if_what_they_promise_has_come_true(factor: float, ahead: bool) -> None:
    found = surely(NotedGain(factor)).choose({"s": SEVEN}, 15, 2)
    assert found == (Draft("s", SEVEN, 4) if ahead else Draft("s", SEVEN[:3]))


@pytest.mark.parametrize(
    ("tokens", "room", "machines", "slowest", "found"),
    [
        # One machine takes all of a step: the second block comes a step later.
        (SEVEN, 15, 2, 1.0, Draft("s", SEVEN[:3])),
        # It takes what the other one takes, and that is known.
        (SEVEN, 15, 2, 0.5, Draft("s", SEVEN, 4)),
        # Three tokens fill no second block.
        (SEVEN[:3], 15, 2, 0.0, Draft("s", SEVEN[:3])),
        (SEVEN, 3, 2, 0.0, Draft("s", SEVEN[:3])),
        # No more than a block for each machine.
        ((*SEVEN, 8, 9, 10), 15, 2, 0.0, Draft("s", SEVEN, 4)),
        ((), 15, 2, 0.0, NO_DRAFT),
    ],
)
def test_no_block_goes_ahead_that_brings_no_token_sooner(
    tokens: tuple[int, ...], room: int, machines: int, slowest: float, found: Draft
) -> None:
    # As many tokens came ahead as were promised.
    assert surely(NotedGain(1.0)).choose({"s": tokens}, room, machines, slowest=slowest) == found


def test_if_drafts_are_always_verified_they_are_cut_evenly() -> None:
    assert surely(always=True).choose({"s": SEVEN}, 15, 2) == Draft("s", SEVEN, 4)
    assert surely(always=True).choose({"s": SEVEN[:4]}, 15, 2) == Draft("s", SEVEN[:4], 3)
    assert surely(always=True).choose({"s": SEVEN}, 15) == Draft("s", SEVEN[:3])
    longest = surely(always=True).choose({"a": (1,), "b": (2, 3), "c": (4, 5)}, 15)
    assert longest == Draft("b", (2, 3))


def test_without_evidence_what_is_expected_to_be_faster_is_sent() -> None:
    assert surely().choose({"s": SEVEN}, 15, 2) == Draft("s", SEVEN, 4)
    assert surely().choose({"s": SEVEN}, 15, 2, slowest=1.0) == Draft("s", SEVEN[:3])
    # There is room for five, and a pass over more than two costs too much.
    assert surely().choose({"s": SEVEN}, 5, 2) == Draft("s", SEVEN[:5], 4)
    steep = {1: 1.0, 2: 1.0, 3: 3.0, 16: 30.0}
    assert surely(curve=steep).choose({"s": SEVEN}, 15, 2) == Draft("s", SEVEN[:3], 2)
    # Of a source no more is judged than a block.
    controller = surely()
    controller.choose({"s": SEVEN}, 15, 2)
    assert controller._guesses == {"s": (SEVEN[:3], 0)}
    # The second source is a new one, and right less often.
    assert controller.choose({"s": SEVEN[:3], "new": SEVEN}, 15).source == "s"


def test_blocks_of_one_token_go_ahead_if_no_wider_pass_pays() -> None:
    """Two at a time the seven drafts and the token before bring 5.70 tokens in 3.35 steps."""
    steep = {1: 1.0, 2: 3.0, 16: 45.0}
    assert surely(NotedGain(0.69), curve=steep).choose({"s": SEVEN}, 15, 2) == Draft("s", (1,), 1)
    assert surely(NotedGain(0.66), curve=steep).choose({"s": SEVEN}, 15, 2) == NO_DRAFT


# A pass of two tokens costs 0.2 steps more, one of three 0.4, one of four 0.6. More than one draft may take
# half of what can be borne.
@pytest.mark.parametrize("bound", ["answer", "source"])
@pytest.mark.parametrize(
    ("bearable", "again", "drafts"),
    [
        (0.19, False, 0),
        (0.21, False, 1),
        (0.79, False, 1),
        (0.81, False, 2),
        (1.19, False, 2),
        (1.21, False, 3),
        # And what was right of a wrong draft is computed again in a pass that is wider by one.
        (0.39, True, 0),
        (0.41, True, 1),
        (1.19, True, 1),
        (1.21, True, 2),
    ],
)
def test_a_pass_risks_no_more_than_the_answer_and_its_source_can_bear(
    bound: str, bearable: float, again: bool, drafts: int
) -> None:
    controller = surely(curve={1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6, 16: 4.0}, again=again)
    if bound == "answer":
        controller._bearable = bearable
    else:
        controller.records["s"].bearable = bearable
    assert len(controller.choose({"s": SEVEN}, 15).tokens) == drafts


# Half of the drafts are right: of w of them and the token before, so many tokens come.
@pytest.mark.parametrize(
    ("width", "blocks", "drafts", "slowest", "drafting", "gain"),
    [
        (2, 1, 7, 0.0, 0.0, 1.5),
        (2, 1, 7, 0.75, 0.0, 1.5),
        (2, 1, 1, 0.0, 0.5, 1.5 / 1.5),
        # The second block counts with a chance of a fourth, and comes half a step after the first.
        (2, 2, 3, 0.0, 0.0, 1.875 / (1 + 0.25 / 2)),
        # It has one token.
        (2, 2, 2, 0.0, 0.0, 1.75 / (1 + 0.25 / 2)),
        (2, 2, 3, 0.0, 0.5, 1.875 / (1.125 + 0.5)),
        # Four blocks of one token, of which two are under way at a time.
        (1, 2, 3, 0.0, 0.0, 1.875 / (1 + 0.875 / 2)),
        # A machine that takes three fourths of a step gives a block as often. With two blocks it is half a
        # step late behind a wrong draft, of which there is one in 15 of 16 cases.
        (2, 2, 3, 0.75, 0.0, 1.875 / (1 + 0.25 * 0.75 + 15 / 16 / 2)),
        (1, 3, 2, 0.5, 0.0, 1.75 / (1 + 0.75 / 2 + 7 / 8 / 2)),
        (1, 3, 2, 0.25, 0.0, 1.75 / (1 + 0.75 / 3)),
    ],
)
def test_the_gain_of_blocks_by_hand(
    width: int, blocks: int, drafts: int, slowest: float, drafting: float, gain: float
) -> None:
    controller = Controller(Costs(LEVEL), 3)
    controller._slowest = slowest
    assert controller._gain(0.5, width, blocks, drafts, drafting) == pytest.approx(gain)
    # A pass of two tokens takes half a step more; behind a wrong draft the next one has to be as wide.
    dear = Controller(Costs({1: 1.0, 2: 1.5, 16: 8.5}), 3, again=True)
    assert dear._gain(0.5, 2, 1, 7) == pytest.approx(1.5 / (1.5 + 0.5 * 0.5))
    assert dear._gain(0.5, 2, 2, 3, 0.5) == pytest.approx(1.875 / (1.75 * 1.125 + 0.5))


def test_blocks_ahead_that_would_cost_more_than_can_be_borne_are_not_sent() -> None:
    controller = surely(NotedGain(1.0))
    controller._bearable = 0.21
    assert controller.choose({"s": SEVEN}, 15, 2).block == 4
    # A block behind a dropped one is expected to be 0.1 late: half of what can be borne.
    controller._bearable = 0.19
    assert controller.choose({"s": SEVEN}, 15, 2) == Draft("s", SEVEN[:3])
    # It is known by now to be 0.3 late.
    ahead = NotedGain(1.0)
    ahead.own.late = 0.3
    for bearable, block in ((0.59, 0), (0.61, 4)):
        controller = surely(ahead)
        controller._bearable = bearable
        assert controller.choose({"s": SEVEN}, 15, 2).block == block
    # If a machine takes 0.6 of a step it is 0.2 late; a third block is 0.1 later than the second.
    # With too little for that, three blocks of two tokens are left: they may take all that can be borne.
    cases = ((0.39, 0.6, 2, 0), (0.41, 0.6, 2, 4), (0.39, 0.0, 3, 2), (0.41, 0.0, 3, 4))
    for bearable, slowest, machines, block in cases:
        controller = surely()
        controller._bearable = bearable
        found = controller.choose({"s": (*SEVEN, 8, 9, 10, 11)}, 15, machines, slowest=slowest)
        assert (found.block, len(found.tokens)) == (block, block * machines - 1 if block else 3)


def test_a_flight_is_held_against_blocks_alone_once_its_last_block_is_there() -> None:
    ahead = NotedGain(1.0)
    controller = surely(ahead, curve={1: 2.0, 16: 2.0})
    assert controller.choose({"s": SEVEN}, 15, 2).block == 4
    assert controller._flight is not None
    assert (controller._flight.width, controller._flight.guess) == (4, 8)
    controller.verified(Draft("s", (1, 2, 3, 4)), [1, 2, 3, 4], 2.0, beside=Beside.BLOCKS, left=1)
    assert ahead.flown == []
    # Two more tokens may come than were guessed at first: a block of four, and two.
    going = controller.choose({"s": (5, 6, 7, 8, 9)}, 15, 2, going=True)
    assert going.tokens == (5, 6, 7, 8, 9)
    assert (controller._flight.width, controller._flight.guess) == (4, 10)
    # Nothing more is guessed: what is under way stays.
    assert controller.choose({}, 15, 2, going=True) == NO_DRAFT
    assert (controller._flight.width, controller._flight.guess) == (4, 10)
    controller.verified(Draft("s", (5, 6, 7, 8)), [5, 6, 7, 8], 1.0, beside=Beside.BLOCKS, left=1)
    controller.verified(Draft("s", (9,)), [9, 10], 0.5, beside=Beside.BLOCKS)
    # Blocks alone of four, four and two tokens take three steps.
    assert ahead.flown == [(3.0, 1.75)]
    # What comes after it is of no flight.
    controller.verified(Draft("s", (11,)), [11], 1.0, beside=Beside.BLOCKS)
    assert len(ahead.flown) == 1


def test_a_flight_that_a_prompt_came_between_is_not_counted() -> None:
    ahead = NotedGain(1.0)
    controller = surely(ahead)
    controller.choose({"s": SEVEN}, 15, 2)
    bearable = controller._bearable
    controller.verified(Draft("s", (1, 2, 3, 4)), [1, 2], 9.0, beside=Beside.PROMPT)
    assert (ahead.flown, ahead.late, controller.saved_s) == ([], [], 0.0)
    assert controller._bearable == pytest.approx(bearable)
    # Nor is one whose blocks were all dropped.
    for machines, proposals in ((1, {"s": SEVEN}), (2, {"s": SEVEN[:1]}), (2, {})):
        controller.choose({"s": SEVEN}, 15, 2)
        controller.choose(proposals, 15, machines)
        controller.verified(NO_DRAFT, [1], 1.0)
        assert ahead.flown == []
    # Without evidence no flight is counted.
    controller = surely()
    controller.choose({"s": SEVEN}, 15, 2)
    assert controller.choose({"s": SEVEN}, 15, 2, going=True).block == 4
    controller.verified(Draft("s", (1, 2, 3)), [1], 1.0, beside=Beside.DROPPED)


def test_a_block_behind_one_that_was_dropped_is_late_by_what_it_takes_more_than_alone() -> None:
    ahead, curve = NotedGain(1.0), {1: 2.0, 3: 3.0, 16: 8.0}
    controller = surely(ahead, curve=curve)
    controller.verified(Draft("s", (1, 2)), [1, 2, 3], 4.5, beside=Beside.DROPPED)
    assert ahead.late == [0.75]
    # Its time says nothing of what a pass costs.
    assert controller.costs.curve == {1: 1.0, 3: 1.5, 16: 4.0}
    controller.verified(Draft("s", (4,)), [4, 5], 4.5, beside=Beside.BLOCKS)
    assert ahead.late == [0.75]
