"""The cost curve and who decides how much is drafted: pure, so every answer here is simulated."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from examples import examples
from family_params import in_turn
from hypothesis import given
from hypothesis import strategies as st

from fleetd.engine.speculation.controller import (
    MARGIN,
    NO_DRAFT,
    RISK_PER_TOKEN,
    SPARED,
    Beside,
    Controller,
    Draft,
    SourceStats,
)
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.source_history import TRIAL_SHARE, SourceHistory

FLAT = {1: 1.0, 4: 1.05, 16: 1.5}
STEEP = {1: 1.0, 2: 1.9, 4: 3.7, 16: 15.0}


def answer(
    curve: dict[int, float], acceptance: float, tokens: int = 2000, seed: int = 1, most: int = 15
) -> tuple[Controller, float]:
    """Decode an answer of which each draft is right with that chance; its seconds per token."""
    dice, truth = random.Random(seed), Costs(curve)
    controller = Controller(Costs(curve), most)
    seconds, on_tokens = 0.0, 0
    while on_tokens < tokens:
        drafts = [on_tokens + i + 1 if dice.random() < acceptance else -1 for i in range(most)]
        draft = controller.choose({"s": drafts}, most)
        right = 0
        while right < len(draft.tokens) and draft.tokens[right] == on_tokens + right + 1:
            right += 1
        emitted = [on_tokens + i + 1 for i in range(right + 1)]
        took = truth.ratio(1 + len(draft.tokens))
        controller.verified(draft, emitted, took)
        on_tokens += len(emitted)
        seconds += took
    return controller, seconds / on_tokens


def best(curve: dict[int, float], a: float) -> float:
    costs = Costs(curve)
    return min(costs.ratio(k + 1) * (1 - a) / (1 - a ** (k + 1)) for k in range(16))


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("curve", [FLAT, STEEP])
def test_it_comes_near_the_best_fixed_width(curve: dict[int, float], acceptance: float) -> None:
    _, per_token = answer(curve, acceptance)
    assert per_token <= min(1.02, 1.2 * best(curve, acceptance))


@examples(40)
@given(
    st.floats(0, 0.97),
    st.floats(0, 0.5),
    st.floats(0, 1.2),
    st.integers(0, 1000),
)
def test_it_never_loses_much(acceptance: float, first: float, each: float, seed: int) -> None:
    curve = {1: 1.0, 2: 1 + first} | {n: 1 + first + each * (n - 2) for n in (4, 8, 16)}
    _, per_token = answer(curve, acceptance, seed=seed)
    assert per_token <= 1.02


# Passes of n tokens in plain steps: a CPU, a GPU, one that computes the rows one by one, and two between.
DEVICES = {
    "cpu": {1: 1.0, 2: 1.01, 4: 1.04, 8: 1.11, 16: 1.23},
    "gpu": {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 16: 8.0},
    "row by row": STEEP,
    "flat": FLAT,
    "dear at once": {1: 1.0, 2: 1.15, 4: 1.3, 8: 1.6, 16: 2.4},
}


def times_plain(curve: dict[int, float], tokens: int, seed: int, understated: float) -> float:
    """The speed of one answer over plain decoding, on a machine whose passes seem to take now a little more,
    now a little less, and now and then three times as long, and that was taken for quicker than it is."""
    dice, truth = random.Random(seed), Costs(curve)
    controller = Controller(Costs({n: 1 + understated * (ratio - 1) for n, ratio in curve.items()}), 15)
    # How often there is a draft, and how good; some are good only until the middle of the answer.
    offered, acceptance = dice.choice([0.1, 0.3, 0.6, 1.0]), dice.choice([0, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
    turns = dice.random() < 0.3
    seconds, done = 0.0, 0
    while done < tokens:
        good = 0.0 if turns and done > tokens / 2 else acceptance
        length = dice.choice([2, 4, 8, 15]) if dice.random() < offered else 0
        proposed = [done + i + 1 if dice.random() < good else -1 for i in range(length)]
        draft = controller.choose({"s": proposed}, min(15, tokens - done - 1))
        right = next((i for i, token in enumerate(draft.tokens) if token < 0), len(draft.tokens))
        took = truth.ratio(1 + len(draft.tokens))
        seen = took * dice.lognormvariate(0, 0.05) * (3 if dice.random() < 0.01 else 1)
        controller.verified(draft, [done + i + 1 for i in range(right + 1)], seen)
        seconds, done = seconds + took, done + right + 1
    return done / seconds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "understated"), in_turn([50, 128], [0.7, 1.0]))
def test_hardly_any_answer_is_slower_than_without_drafts(
    device: str, tokens: int, understated: float
) -> None:
    found = sorted(times_plain(DEVICES[device], tokens, seed, understated) for seed in range(200))
    assert found[len(found) // 10] >= 0.98
    assert found[0] >= 0.965


def test_a_plain_step_that_was_held_up_does_not_make_all_passes_look_quick() -> None:
    costs = Costs(FLAT)
    costs.add_pass(1, 50.0)
    assert costs.step_s < 1.2


def test_drafts_that_are_never_right_are_soon_left_alone() -> None:
    controller, per_token = answer(FLAT, 0.0)
    assert controller.records["s"].passes <= 20
    assert per_token <= 1.005


def test_a_source_that_gets_good_is_used_again_without_having_been_tried() -> None:
    controller = Controller(Costs(FLAT), 15)
    for i in range(200):
        draft = controller.choose({"s": [-1] * 5}, 15)
        controller.verified(draft, [i], 1.05 if draft.tokens else 1.0)
    assert controller.choose({"s": [-1] * 5}, 15) == Draft()
    before = controller.records["s"].passes
    for i in range(200, 260):
        controller.on_tokens([i])
        controller.choose({"s": [i + 1, i + 2, i + 3]}, 15)
        if controller.choose({"s": [i + 1, i + 2, i + 3]}, 15).tokens:
            break
    else:
        pytest.fail("it never came back")
    assert controller.records["s"].passes == before


def test_the_better_source_is_taken() -> None:
    controller = Controller(Costs(FLAT), 15)
    for i in range(40):
        proposals = {"bad": [-1] * 15, "good": [i, i + 1, i + 2, i + 3]}
        draft = controller.choose(proposals, 15)
        controller.verified(Draft(), [i], 1.0)
    assert draft.source == "good"


def test_passes_that_lose_time_though_they_should_not_are_ended() -> None:
    """The curve says that wide passes are cheap, and each of them takes far longer."""
    controller = Controller(Costs({1: 1.0, 16: 1.0}), 15)
    seconds, tokens, i = 0.0, 0, 0
    while tokens < 3000:
        draft = controller.choose({"s": [i, -1]}, 15)
        emitted = [i, i + 1] if draft.tokens else [i]
        took = 4.0 if draft.tokens else 1.0
        controller.verified(draft, emitted, took)
        seconds, tokens, i = seconds + took, tokens + len(emitted), i + len(emitted)
    assert seconds / tokens <= 1.02


def test_always_verifies_what_there_is() -> None:
    controller = Controller(Costs(STEEP), 15, always=True)
    for _ in range(50):
        draft = controller.choose({"s": [-1] * 4}, 3)
        assert draft == Draft("s", (-1, -1, -1))
        controller.verified(draft, [1], 9.0)


def test_no_room_no_drafts() -> None:
    for always in (False, True):
        controller = Controller(Costs(FLAT), 15, always=always)
        for room in (0, -1):
            assert controller.choose({"s": [1, 2, 3]}, room) == Draft()


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(1e-6, 1e3)), max_size=200))
def test_the_curve_never_falls_whatever_is_measured(passes: list[tuple[int, float]]) -> None:
    costs = Costs(FLAT)
    for width, seconds in passes:
        costs.add_pass(width, seconds)
        curve = [costs.ratio(n) for n in range(1, 20)]
        assert curve[0] == 1.0
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(curve))
        assert costs.step_s > 0


def test_one_pass_that_was_held_up_does_not_stop_drafts_for_good() -> None:
    costs = Costs(FLAT)
    for _ in range(5):
        costs.add_pass(2, 50.0)
    assert costs.ratio(2) > 2
    for _ in range(2000):
        costs.add_pass(1, 1.0)
    assert costs.ratio(2) < 1.1


def test_a_wider_pass_than_was_measured_is_expected_to_cost_more() -> None:
    costs = Costs({1: 1.0, 4: 1.3})
    assert costs.ratio(8) == pytest.approx(1.7)
    assert Costs({1: 2.0}).ratio(2) == pytest.approx(1.05)


def test_passes_move_the_curve_by_a_fifth_of_what_they_were_off() -> None:
    # Wider passes never take less, and between two widths it is a straight line.
    costs = Costs({1: 2.0, 3: 1.8, 5: 4.0})
    assert [costs.ratio(width) for width in (1, 2, 3, 4, 5, 7)] == [1.0, 1.0, 1.0, 1.5, 2.0, 3.0]
    # A width that was not measured before: 6 seconds instead of 3 are believed to a fifth.
    costs.add_pass(4, 6.0)
    assert costs.curve == {1: 1.0, 3: 1.0, 4: pytest.approx(1.8), 5: 2.0}
    # No more than thrice the time is believed, and what is wider costs no less then.
    costs.add_pass(4, 100.0)
    assert costs.curve == {1: 1.0, 3: 1.0, 4: pytest.approx(2.52), 5: pytest.approx(2.52)}
    costs.add_pass(3, 100.0)
    assert costs.ratio(3) == pytest.approx(1.4)
    # No less than a third either, and what is narrower costs no more; nothing less than a plain step.
    for expected, narrower in ((2.184, 1.4), (1.8928, 1.4), (1.6404, 1.4), (1.4217, 1.4), (1.2321, 1.2321)):
        costs.add_pass(4, 0.0)
        assert (costs.ratio(4), costs.ratio(3)) == (
            pytest.approx(expected, 1e-4),
            pytest.approx(narrower, 1e-4),
        )
    for _ in range(9):
        costs.add_pass(4, 0.0)
    assert costs.curve == {1: 1.0, 3: 1.0, 4: 1.0, 5: pytest.approx(2.52)}
    # A plain step is believed to half as much again, and takes the curve back a little.
    costs.add_pass(1, 100.0)
    assert costs.step_s == pytest.approx(2.2)
    assert costs.curve == {1: 1.0, 3: 1.0, 4: pytest.approx(1 + 0.0025), 5: pytest.approx(2.52 - 0.0026)}
    costs.add_pass(1, 0.0)
    assert costs.step_s == pytest.approx(2.2 * (1 - 0.2 / 3))
    assert Costs({1: 0.0}).step_s > 0


def sure(controller: Controller, acceptance: float, source: str = "s") -> Controller:
    """As after so many drafts that its sources' acceptance is known, and losses can be borne."""
    controller.records[source] = SourceStats(_right=acceptance * 1e6, _judged=1e6, bearable=1e6)
    controller._bearable = 1e6
    return controller


def test_a_wider_pass_has_to_promise_clearly_more_than_a_plain_step() -> None:
    """One draft at acceptance a brings 1 + a tokens; the pass takes 1.5 plain steps."""
    curve = {1: 1.0, 2: 1.5, 16: 22.5}
    for acceptance, width in (
        (0.5 * MARGIN, 0),
        (1.5 * MARGIN - 1 - 0.001, 0),
        (1.5 * MARGIN - 1 + 0.001, 1),
    ):
        controller = sure(Controller(Costs(curve), 15), acceptance)
        assert len(controller.choose({"s": [5]}, 15).tokens) == width


@pytest.mark.parametrize(("most", "room", "length"), [(3, 15, 15), (15, 3, 15), (15, 15, 3)])
def test_no_draft_is_longer_than_a_pass_its_room_and_what_was_proposed(
    most: int, room: int, length: int
) -> None:
    for always in (False, True):
        controller = sure(Controller(Costs({1: 1.0, 16: 1.0}), most, always), 0.98)
        assert controller.choose({"s": list(range(length))}, room) == Draft("s", (0, 1, 2))


def test_what_is_computed_again_is_in_the_price_at_its_chance() -> None:
    """With a = 0.5 two drafts bring 1.75 tokens, in 1.4 steps, and 0.4 more as often as one is wrong."""
    curve = {1: 1.0, 2: 1.2, 3: 1.4, 16: 14.0}
    controller = sure(Controller(Costs(curve), 15, again=True), 0.5)
    promise = controller.promise(Draft("s", (1, 2)))
    assert promise.tokens == pytest.approx(1.75)
    assert promise.seconds == pytest.approx(1.4 + 0.75 * 0.4)
    assert sure(Controller(Costs(curve), 15), 0.5).promise(Draft("s", (1, 2))).seconds == pytest.approx(1.4)


def test_a_pass_is_entered_with_all_that_it_computed() -> None:
    """Also what it computed a second time; and what was right of a draft is one less than what came."""
    seen: list[tuple[int, float]] = []

    class NotedCosts(Costs):
        def add_pass(self, tokens: int, seconds: float) -> None:
            seen.append((tokens, seconds))

    controller = Controller(NotedCosts(FLAT), 15)
    controller.verified(Draft("s", (1, 2, 3)), [1, 2, 9], 1.1, again=2)
    controller.verified(Draft(), [4], 1.0)
    assert seen == [(6, 1.1), (1, 1.0)]
    record = controller.records["s"]
    assert (record.drafted, record.accepted, record.passes) == (3, 2, 1)
    assert (controller.passes, controller.tokens) == (2, 4)


@pytest.mark.parametrize(("again", "lost"), [(0, 0.0), (2, 0.3)])
def test_a_step_that_drafts_made_wider_counts_against_them_and_a_plain_one_does_not(
    again: int, lost: float
) -> None:
    controller = Controller(Costs({1: 1.0, 16: 1.0}), 15)
    bearable = controller._bearable
    controller.verified(Draft(), [4], 1.3, again=again)
    assert controller.saved_s == pytest.approx(-lost, abs=0.02)
    assert controller._bearable == pytest.approx(bearable + RISK_PER_TOKEN - lost, abs=0.02)


def test_a_source_that_takes_time_is_asked_only_if_that_pays_beside_what_is_free() -> None:
    costs = Costs({1: 1.0, 2: 1.1, 16: 2.0})
    controller = Controller(costs, most=4)
    controller._bearable = 10.0
    controller.records["mtp"] = SourceStats(bearable=10.0)
    assert controller.wanted("mtp", DraftPrice(0.0, 0.05), NO_DRAFT, 8) >= 1
    assert controller.wanted("mtp", DraftPrice(0.0, 5.0), NO_DRAFT, 8) == 0
    assert controller.wanted("mtp", DraftPrice(0.0, 0.05), NO_DRAFT, 0) == 0
    # A draft that costs nothing and is as good is not beaten.
    controller.records["lookup"] = SourceStats(_right=30.0, _judged=30.0)
    assert controller.wanted("mtp", DraftPrice(0.0, 0.05), Draft("lookup", (1, 2, 3)), 8) == 0


def test_what_drafting_took_is_lost_time_and_no_cost_of_the_pass() -> None:
    controller = Controller(Costs({1: 1.0, 2: 1.0, 16: 1.0}), most=4)
    before = controller._bearable
    controller.drafted("mtp", 0.5)
    controller.verified(Draft("mtp", (7, 8)), [7, 8, 9], 1.5)
    assert controller.costs.ratio(3) == 1.0
    assert controller.saved_s == pytest.approx(1.5)
    controller.drafted("mtp", 0.5)
    controller.verified(NO_DRAFT, [1], 1.5)
    assert controller.costs.step_s == pytest.approx(1.0)
    assert controller.saved_s == pytest.approx(1.0)
    assert controller._bearable == pytest.approx(before + 1.0 + 4 * RISK_PER_TOKEN)


# ---- Accounts, by hand ------------------------------------------------------------------------------------


def two_seconds(curve: dict[int, float] | None = None) -> Controller:
    """A plain step takes 2 seconds; so does every pass, unless ``curve`` says otherwise."""
    return Controller(Costs(curve or {1: 2.0, 16: 2.0}), 15)


def test_what_a_draft_has_saved_is_for_its_source_and_the_answer() -> None:
    controller = two_seconds()
    controller.verified(Draft("s", (1, 2)), [1, 2, 3], 2.5, beside=Beside.BLOCKS)
    # Three steps instead of one of 2.5 seconds: 1.75 of them are saved.
    assert controller.saved_s == 3.5
    for bearable in (controller._bearable, controller.records["s"].bearable):
        assert bearable == pytest.approx(0.25 + 3 * RISK_PER_TOKEN + 1.75)
    assert controller.history.sources["s"].account == 1.75
    # In rounds of several answers others waited meanwhile: what the batch would have given is told.
    controller.verified(Draft("s", (4,)), [4, 5], 2.0, 0.5, beside=Beside.BLOCKS)
    assert controller.saved_s == 4.0
    assert controller.records["s"].bearable == pytest.approx(0.25 + 5 * RISK_PER_TOKEN + 2.75)
    # Beside a prompt it is not known what the pass took.
    controller.verified(Draft("s", (6,)), [6, 7], 9.0, beside=Beside.PROMPT)
    assert controller.saved_s == 4.0


def test_what_another_source_took_is_its_own_loss() -> None:
    controller = two_seconds()
    controller.drafted("s", 0.5)
    controller.drafted("other", 0.25)
    controller.drafted("other", 0.75)
    controller.verified(Draft("s", (1, 2)), [1, 2, 3], 3.0, beside=Beside.BLOCKS)
    # The pass and the draft of its own took 2 of the 3 seconds.
    assert controller.records["s"].bearable == pytest.approx(0.25 + 3 * RISK_PER_TOKEN + 2.0)
    assert controller.records["other"].bearable == pytest.approx(0.25 + 3 * RISK_PER_TOKEN - 0.5)
    assert controller._bearable == pytest.approx(0.25 + 3 * RISK_PER_TOKEN + 1.5)
    # A plain step loses what was drafted in vain, and no more.
    controller.drafted("other", 1.0)
    controller.verified(NO_DRAFT, [4], 9.0)
    assert controller._bearable == pytest.approx(0.25 + 4 * RISK_PER_TOKEN + 1.0)
    assert controller.saved_s == 2.0


def test_a_priced_draft_is_held_against_what_would_have_been_verified_without_it() -> None:
    controller = sure(sure(two_seconds(), 0.5, "lookup"), 0.9, "mtp")
    controller.records["mtp"].bearable = 10.0
    # The free draft brings 1.5 tokens in 2 seconds.
    assert controller.wanted("mtp", DraftPrice(0.0, 0.1), Draft("lookup", (7,)), 8) > 1
    controller.drafted("mtp", 0.2)
    controller.verified(Draft("mtp", (1, 2)), [1, 2, 3], 2.2, beside=Beside.BLOCKS)
    bearable = 10.0 + 3 * RISK_PER_TOKEN + (3 * 2 / 1.5 - 2.2) / 2
    assert controller.records["mtp"].bearable == pytest.approx(bearable)
    # A draft that took nothing is held against plain steps.
    controller.verified(Draft("mtp", (4,)), [4, 5], 2.0, beside=Beside.BLOCKS)
    assert controller.records["mtp"].bearable == pytest.approx(bearable + 2 * RISK_PER_TOKEN + 1)


def test_a_wrong_draft_costs_no_less_than_its_pass_is_known_to() -> None:
    controller = two_seconds({1: 2.0, 3: 3.0})
    # It seemed to take half a second. A third of what was expected is believed to a fifth: 1.5 becomes 1.3.
    controller.drafted("s", 0.1)
    controller.verified(Draft("s", (1, 2)), [9], 0.6)
    assert controller.costs.ratio(3) == pytest.approx(1.3)
    assert controller.saved_s == pytest.approx(2.0 - 2.6 - 0.1)
    # What takes longer than that is lost as it was seen.
    controller = two_seconds({1: 2.0, 3: 3.0})
    controller.verified(Draft("s", (1, 2)), [9], 9.0)
    assert controller.saved_s == 2.0 - 9.0
    # One that was right gains what it was seen to gain.
    controller = two_seconds({1: 2.0, 3: 3.0})
    controller.verified(Draft("s", (1, 2)), [1, 9], 0.5)
    assert controller.saved_s == 3.5


def test_a_guess_is_judged_once_it_is_wrong_or_has_come() -> None:
    controller = Controller(Costs(FLAT), 15)
    controller.choose({"s": (1, 2, 3), "t": (1, 2), "u": (9,)}, 15)
    controller.on_tokens([1])
    assert controller.history.sources["u"].judged == 1
    assert controller.history.sources.get("s", SourceHistory()).judged == 0
    controller.on_tokens([2])
    controller.on_tokens([8])
    # Evidence was 1.8 of 3 tokens; it keeps 88 %.
    record = controller.records["s"]
    assert (record._right, record._judged) == (
        pytest.approx(1.8 * 0.88 + 2),
        pytest.approx(3 * 0.88 + 3),
    )
    record = controller.records["t"]
    assert (record._right, record._judged) == (
        pytest.approx(1.8 * 0.88 + 2),
        pytest.approx(3 * 0.88 + 2),
    )
    judged = {name: source.judged for name, source in controller.history.sources.items()}
    assert judged == {"s": 3, "t": 2, "u": 1}
    assert controller._guesses == {}


@pytest.mark.parametrize(
    ("account", "tokens", "acceptance", "bearable"),
    [
        # It has saved a step in earlier answers, and begins as a new source if it was right less often.
        (3.0, 0, 0.6, 1.0),
        # What is granted for each token is more by then.
        (3.0, 100, 0.6, 0.25 + 1.2),
        # It has not: half of its drafts were right, and it may lose a fourth of a step.
        (0.5, 0, 0.5, 0.5),
        (0.0, 0, 0.5, 0.25),
    ],
)
def test_a_source_begins_an_answer_with_what_it_has_earned(
    account: float, tokens: int, acceptance: float, bearable: float
) -> None:
    past = SourceHistory(right=20.0, weight=40.0, judged=40, account=account)
    found = SourceStats.after(past, tokens)
    assert found.acceptance == pytest.approx(acceptance)
    assert found._judged == 8.0
    assert found.bearable == pytest.approx(bearable)
    # However right it was, some chance is left that it is wrong.
    assert SourceStats.after(SourceHistory(right=40.0, weight=40.0), 0).acceptance == 0.98


@pytest.mark.parametrize(
    ("begin_s", "allowance", "bearable", "beside", "count"),
    [
        # A step takes 2 seconds. A trial of one token costs 0.1 steps in the pass and 0.3 for the draft.
        (0.0, 0.41, 1.0, NO_DRAFT, 1),
        (0.0, 0.39, 1.0, NO_DRAFT, 0),
        (0.0, 1.0, 0.39, NO_DRAFT, 0),
        # It has to read states before.
        (0.4, 0.61, 1.0, NO_DRAFT, 1),
        (0.4, 0.59, 1.0, NO_DRAFT, 0),
        # Something else drafts.
        (0.0, 1.0, 1.0, Draft("lookup", (1,)), 0),
    ],
)
def test_a_source_that_was_never_right_is_tried_if_trials_may_cost_so_much(
    begin_s: float, allowance: float, bearable: float, beside: Draft, count: int
) -> None:
    controller, price = two_seconds({1: 2.0, 2: 2.2, 16: 4.0}), DraftPrice(0.0, 0.6)
    past = controller.history.source("mtp")
    past.right, past.weight, past.judged, past.allowance = 0.0, 30.0, 30, allowance
    controller.records["mtp"] = SourceStats(_right=0.0, _judged=8.0, bearable=bearable)
    controller._bearable = 1.0
    assert controller.wanted("mtp", price, beside, 8, begin_s) == count
    # What it may take before is a fourth of what could be borne besides, or of what is left for trials.
    spare = SPARED * (min(bearable, allowance if count else 1.0) - 0.4)
    assert controller.spare_s("mtp", price, 1) == pytest.approx(max(0.0, 2 * spare))
    # What a trial took is no more there for the next one.
    for taken in (0.3 * count, 0.0):
        left = min(1.0, past.allowance + TRIAL_SHARE) - taken
        controller.drafted("mtp", 0.6)
        controller.verified(NO_DRAFT, [1], 2.6)
        assert past.allowance == pytest.approx(left)


def test_a_source_that_was_right_in_other_answers_is_asked_for_one_token_where_it_seems_wrong() -> None:
    controller = Controller(Costs({1: 1.0, 2: 1.1, 16: 2.0}), 4)
    past = controller.history.source("mtp")
    past.right, past.weight, past.judged = 27.0, 30.0, 30
    record = controller.records["mtp"] = SourceStats(_right=0.0, _judged=8.0, bearable=0.41)
    controller._bearable = 1.0
    price = DraftPrice(0.0, 0.3)
    # It was tried before, and nothing came of that.
    controller._trying.add("mtp")
    assert controller.wanted("mtp", price, NO_DRAFT, 8) == 1
    assert controller._trying == set()
    record.bearable = 0.39
    assert controller.wanted("mtp", price, NO_DRAFT, 8) == 0
    # Too few were judged to say so.
    record.bearable, past.judged = 0.41, 7
    assert controller.wanted("mtp", price, NO_DRAFT, 8) == 0


def test_seconds_to_spare_are_steps_of_this_device() -> None:
    controller = two_seconds({1: 2.0, 2: 2.2, 16: 4.0})
    controller._bearable, controller.records["mtp"] = 1.0, SourceStats(bearable=5.0)
    # A pass of two tokens costs 0.1 steps more, and a draft of 0.6 seconds 0.3: 0.6 of a step could be lost.
    assert controller.spare_s("mtp", DraftPrice(0.0, 0.6), 1) == pytest.approx(SPARED * 0.6 * 2)
    assert controller.spare_s("mtp", DraftPrice(0.0, 2.0), 1) == 0.0
    assert Controller(Costs(FLAT), 15, always=True).spare_s("mtp", DraftPrice(9.0, 9.0), 1) == math.inf


def test_a_source_is_asked_for_as_many_tokens_as_bring_most() -> None:
    """Nine of ten are right, passes cost the same, and a token costs 0.05 steps: four bring 4.1 in 1.2."""
    price = DraftPrice(0.0, 0.05)
    assert sure(Controller(Costs({1: 1.0, 16: 1.0}), 4), 0.9, "mtp").wanted("mtp", price, NO_DRAFT, 8) == 4
    assert sure(Controller(Costs({1: 1.0, 16: 1.0}), 4), 0.9, "mtp").wanted("mtp", price, NO_DRAFT, 2) == 2
    # One that is right half of the time brings 1.5 in 1.42, which is clearly more than a step, or in 1.45.
    half = sure(Controller(Costs({1: 1.0, 16: 1.0}), 1), 0.5, "mtp")
    assert half.wanted("mtp", DraftPrice(0.0, 0.42), NO_DRAFT, 8) == 1
    assert half.wanted("mtp", DraftPrice(0.0, 0.45), NO_DRAFT, 8) == 0
    # Nothing is drafted that has as many tokens as the draft that there is, however bad that is.
    poor = sure(sure(Controller(Costs({1: 1.0, 16: 1.0}), 4), 0.9, "mtp"), 0.1, "lookup")
    assert poor.wanted("mtp", price, Draft("lookup", (1, 2, 3)), 3) == 0
    assert poor.wanted("mtp", price, Draft("lookup", (1, 2, 3)), 8) == 4
    always = Controller(Costs(STEEP), 4, always=True)
    assert always.wanted("mtp", price, NO_DRAFT, 8) == 4
    assert always.wanted("mtp", DraftPrice(0.0, 9.0), NO_DRAFT, 3) == 3
    assert always.wanted("mtp", price, Draft("lookup", (1, 2)), 3) == 3
    assert always.wanted("mtp", price, Draft("lookup", (1, 2, 3)), 3) == 0


@pytest.mark.parametrize(("begin_s", "count"), [(0.9, 4), (1.1, 1), (1.9, 1), (2.1, 0)])
def test_what_a_source_takes_before_its_first_token_has_to_be_bearable(begin_s: float, count: int) -> None:
    """A step takes 2 seconds, and one could be lost; more than one draft may take half of that."""
    controller = sure(Controller(Costs({1: 2.0, 16: 2.0}), 4), 0.9, "mtp")
    controller._bearable = 1.0
    assert controller.wanted("mtp", DraftPrice(0.0, 0.0), NO_DRAFT, 8, begin_s) == count


@pytest.mark.parametrize(
    ("own", "most", "price", "gain"),
    [
        # Two of them bring 1 + 1/2 + 1/4 tokens and take 0.1 steps each.
        (4, 4, DraftPrice(0.0, 0.2), 1.75 / 1.2),
        (4, 1, DraftPrice(0.0, 0.2), 1.5 / 1.1),
        (1, 9, DraftPrice(0.0, 0.2), 1.5 / 1.1),
        (4, 9, None, 1.9375),
        (4, 0, None, 0.0),
    ],
)
def test_what_drafts_pay_if_anything_could_be_borne(
    own: int, most: int, price: DraftPrice | None, gain: float
) -> None:
    controller = Controller(Costs({1: 2.0, 16: 2.0}), own)
    assert controller._pays(0.5, price, most) == pytest.approx(gain)


def test_what_a_pass_promises_is_in_seconds_with_what_the_draft_takes() -> None:
    controller = sure(two_seconds({1: 2.0, 2: 3.0, 3: 4.0}), 0.5)
    promise = controller.promise(Draft("s", (1, 2)), 0.25)
    assert (promise.tokens, promise.seconds) == (pytest.approx(1.75), pytest.approx(4.25))
    assert controller.promise(NO_DRAFT, 0.25).seconds == pytest.approx(2.25)
    assert "" not in controller.records
