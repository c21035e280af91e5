"""What drafts gain and lose over many answers of a worker, in simulated time: no clock, no mlx."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from fleetd.engine.speculation.controller import (
    NO_DRAFT,
    RISK_PER_TOKEN,
    Controller,
    SourceStats,
)
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.hidden_source import LEAST_ROWS, HiddenSource, WorkerDrafter
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.source_history import (
    CARRIED,
    PRIOR,
    TRIAL_SHARE,
    DraftHistory,
    SourceHistory,
)
from fleetd.engine.speculation.sources import Context, HiddenRows
from fleetd.engine.speculation.speculation import SequenceDrafts

# Passes of n tokens in plain steps.
DEVICES = {
    "cpu": {1: 1.0, 2: 1.01, 4: 1.04, 8: 1.11, 16: 1.23},
    "cpu, quantised": {1: 1.0, 2: 1.23, 3: 1.28, 4: 1.4, 8: 2.15, 16: 5.0},
    "gpu": {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 16: 8.0},
}
MOST = 15
TOKENS = 96
# Plain steps that reading a hidden state takes, and the prompt's that are not read yet.
ROW, PROMPT = 0.002, 60

# The chance that a token is guessed, by the number of the answer and of the token.
Process = Callable[[int, int], float]


@dataclass
class HeadedWorker:
    """A head that takes ``price`` plain steps a token, on a device whose passes seem to take now a
    little more, now a little less, and now and then three times as long."""

    device: str
    price: float
    history: DraftHistory = field(default_factory=DraftHistory)
    asked: int = 0

    def __post_init__(self) -> None:
        self.truth, self.costs = Costs(DEVICES[self.device]), Costs(DEVICES[self.device])

    def answer(self, hits: list[bool], dice: random.Random) -> float:
        """Plain steps that it takes, if ``hits`` says of each token whether the head guesses it."""
        controller = Controller(self.costs, MOST, history=self.history)
        price = DraftPrice(0.0, self.price)
        steps, done, read = 0.0, 0, -PROMPT
        while done < len(hits):
            room, due, drafting, draft = min(MOST, len(hits) - done - 1), done - read, 0.0, NO_DRAFT
            count = controller.wanted("mtp", price, NO_DRAFT, room, ROW * min(due, 32) if due > 32 else 0.0)
            if count:
                self.asked += count
                if due > 32:
                    most = controller.spare_s("mtp", price, count) / ROW
                    drafting = ROW * min(due, max(32, most))
                drafting += self.price * count * dice.lognormvariate(0, 0.1)
                read = done
                guessed = [done + i if hits[done + i] else -1 for i in range(count)]
                controller.drafted("mtp", drafting)
                draft = controller.choose({"mtp": guessed}, room)
            right = next((i for i, t in enumerate(draft.tokens) if t < 0), len(draft.tokens))
            took = self.truth.ratio(1 + len(draft.tokens))
            seen = took * dice.lognormvariate(0, 0.05) * (3 if dice.random() < 0.01 else 1)
            controller.verified(draft, [done + i for i in range(right + 1)], seen + drafting)
            steps, done = steps + took + drafting, done + right + 1
        return steps

    def times_plain(self, process: Process, answers: int = 30, seed: int = 1) -> list[float]:
        dice = random.Random(seed)
        found = []
        for answer in range(answers):
            hits = [dice.random() < process(answer, token) for token in range(TOKENS)]
            found.append(TOKENS / self.answer(hits, dice))
        return found


def p10(found: list[float]) -> float:
    return sorted(found)[len(found) // 10]


def best(device: str, price: float, a: float) -> float:
    """Times plain, if the acceptance and all costs are known: the best number of drafts, always."""
    costs = Costs(DEVICES[device])
    return max((1 - a ** (k + 1)) / (1 - a) / (costs.ratio(k + 1) + price * k) for k in range(MOST + 1))


def always(chance: float) -> Process:
    return lambda answer, token: chance


PROCESSES: dict[str, Process] = {
    **{f"always {chance}": always(chance) for chance in (0.0, 0.1, 0.33, 0.6, 0.9)},
    "good until the middle": lambda answer, token: 0.9 if token < TOKENS // 2 else 0.0,
    "good from the middle on": lambda answer, token: 0.0 if token < TOKENS // 2 else 0.9,
    "every second answer": lambda answer, token: 0.9 * (answer % 2),
    "good at first": lambda answer, token: 0.9 if answer < 10 else 0.0,
    "good later": lambda answer, token: 0.9 if answer >= 10 else 0.0,
}


@pytest.mark.parametrize(
    ("process", "device", "price"),
    [
        # Every process on every device at one price or the other; all of them in the long run.
        pytest.param(process, device, price, marks=() if (i + j + k) % 2 else pytest.mark.long)
        for i, process in enumerate(PROCESSES)
        for j, device in enumerate(DEVICES)
        for k, price in enumerate([0.05, 0.3])
    ],
)
def test_hardly_any_answer_is_slower_than_without_the_head(process: str, device: str, price: float) -> None:
    found = HeadedWorker(device, price).times_plain(PROCESSES[process])
    assert p10(found) >= 0.98
    assert min(found) >= 0.93


@pytest.mark.parametrize("price", [0.05, 0.3])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chance", [0.6, 0.75, 0.9])
def test_a_head_that_pays_comes_near_the_best(chance: float, device: str, price: float) -> None:
    if (most := best(device, price, chance)) < 1.15:
        assert (device, price, chance) == ("cpu, quantised", 0.3, 0.6)
        return
    found = HeadedWorker(device, price).times_plain(always(chance), answers=40)[10:]
    assert len(found) / sum(1 / each for each in found) >= 0.8 * most


# ---- One source ------------------------------------------------------------------------------------------

COSTS = {1: 1.0, 2: 1.1, 16: 2.0}
PRICE = DraftPrice(0.0, 0.3)


def after(history: DraftHistory, right: int, wrong: int, account: float = 0.0) -> DraftHistory:
    """``history`` once so many tokens of the head were judged."""
    history.sources["mtp"] = SourceHistory(right, right + wrong, judged=right + wrong, account=account)
    return history


def tried(history: DraftHistory, answers: int, *, right: bool) -> list[int]:
    """The tokens, counted over all answers, at which a head was asked that is always right, or never."""
    asked, costs = [], Costs(COSTS)
    for answer in range(answers):
        controller = Controller(costs, 4, history=history)
        for token in range(TOKENS):
            draft, took = NO_DRAFT, 1.0
            if controller.wanted("mtp", PRICE, NO_DRAFT, 8):
                asked.append(answer * TOKENS + token)
                controller.drafted("mtp", PRICE.seconds(1))
                draft = controller.choose({"mtp": [token if right else -1]}, 8)
                took = costs.ratio(1 + len(draft.tokens)) + PRICE.seconds(1)
            controller.verified(draft, [token, token + 1] if right and draft.tokens else [token], took)
    return asked


def test_what_does_not_pay_is_tried_for_half_a_percent_of_the_time() -> None:
    history = after(DraftHistory(), 0, 30)
    asked = tried(history, 20, right=False)
    # A trial loses the drafting: a draft that is hardly ever right is judged without being verified.
    assert asked
    assert len(asked) * PRICE.seconds(1) <= 20 * TOKENS * TRIAL_SHARE + CARRIED
    assert all(later - sooner >= 50 for sooner, later in itertools.pairwise(asked))


def test_a_head_that_has_become_right_is_soon_asked_always() -> None:
    asked = tried(after(DraftHistory(), 0, 30), 4, right=True)
    assert len([token for token in asked if token >= 3 * TOKENS]) > TOKENS // 3


def test_an_answer_begins_with_what_earlier_ones_found() -> None:
    costs = Costs(COSTS)
    assert Controller(costs, 4, history=after(DraftHistory(), 28, 2, CARRIED)).wanted(
        "mtp", PRICE, NO_DRAFT, 8
    )
    # A new source has to wait until the answer can bear its first draft.
    assert not Controller(costs, 4).wanted("mtp", PRICE, NO_DRAFT, 8)
    assert not Controller(costs, 4, history=after(DraftHistory(), 5, 25)).wanted("mtp", PRICE, NO_DRAFT, 8)


def test_a_source_that_is_right_in_parts_begins_as_a_new_one_while_it_saves_time() -> None:
    poor = SourceHistory(right=6.0, weight=30.0, judged=30)
    assert poor.remembered() == (pytest.approx(1.6), 8.0)
    poor.gained(2 * CARRIED)
    assert poor.remembered() == (pytest.approx(8 * PRIOR), 8.0)


def test_what_one_source_has_saved_is_not_another_one_s_to_lose() -> None:
    controller = Controller(Costs({1: 1.0, 16: 1.0}), 15)
    controller.verified(NO_DRAFT, [0], 1.0)
    for turn in range(1, 41, 4):
        draft = controller.choose({"lookup": [turn, turn + 1, turn + 2]}, 15)
        controller.verified(draft, [turn, turn + 1, turn + 2, turn + 3], 1.0)
    assert controller._bearable > 20
    # It takes a plain step a token: less than the answer could bear, more than its own account.
    assert controller.wanted("mtp", DraftPrice(0.0, 0.95), NO_DRAFT, 8) == 0
    assert controller.wanted("mtp", DraftPrice(0.0, 0.05), NO_DRAFT, 8) > 0


def test_it_says_why_a_source_is_off() -> None:
    controller = Controller(Costs(COSTS), 4, history=after(DraftHistory(), 10, 20))
    assert controller.off("mtp", PRICE) == "off: pays less than it costs (right in 33 %)"
    assert Controller(Costs(COSTS), 4, always=True, history=controller.history).off("mtp", PRICE) == ""
    # At no cost it would pay.
    assert controller.off("mtp") == ""
    assert Controller(Costs(COSTS), 4).off("mtp", PRICE) == ""
    assert Controller(Costs(COSTS), 4, history=after(DraftHistory(), 1, 2)).off("mtp", PRICE) == ""


def test_states_are_noted_shortly_before_a_trial_and_while_drafts_pay() -> None:
    def notes(history: DraftHistory) -> bool:
        return Controller(Costs(COSTS), 4, history=history).notes("mtp", PRICE)

    assert notes(DraftHistory())
    history = after(DraftHistory(), 0, 30)
    assert not notes(history)
    history.sources["mtp"].allowance = 0.1 + PRICE.seconds(1) - 32 * TRIAL_SHARE
    assert notes(history)
    assert notes(after(DraftHistory(), 29, 1))
    # One that would cost more than a step is never tried.
    history.sources["mtp"].allowance = CARRIED
    assert Controller(Costs(COSTS), 4, history=history).notes("mtp", DraftPrice(0.0, 0.9))
    assert not Controller(Costs(COSTS), 4, history=history).notes("mtp", DraftPrice(0.0, 0.91))
    # It may be right in this answer alone, or in all others.
    history.sources["mtp"].allowance = 0.0
    for past, right in ((history, 8.0), (after(DraftHistory(), 29, 1), 0.0)):
        controller = Controller(Costs(COSTS), 4, history=past)
        controller.records["mtp"] = SourceStats(_right=right, _judged=8.0)
        assert controller.notes("mtp", PRICE)
    assert Controller(Costs(COSTS), 4, always=True, history=history).notes("mtp", PRICE)


def test_a_source_that_took_time_for_nothing_is_charged_alone() -> None:
    controller = Controller(Costs(COSTS), 4)
    controller.wanted("mtp", PRICE, NO_DRAFT, 8)
    controller.drafted("mtp", 0.5)
    begun = controller.records["mtp"].bearable
    controller.choose({"lookup": [7]}, 8)
    free = controller.records["lookup"].bearable
    controller.verified(NO_DRAFT, [1], 1.5)
    assert controller.records["mtp"].bearable == pytest.approx(begun + RISK_PER_TOKEN - 0.5)
    assert controller.records["lookup"].bearable == pytest.approx(free + RISK_PER_TOKEN)


# ---- A machine that was held up --------------------------------------------------------------------------


class RightWorker(WorkerDrafter):
    """A drafter that is always right."""

    text = "mtp"

    def source(self) -> RightSource:
        return RightSource(self)


class RightSource(HiddenSource):
    """A new answer has hidden states of its prompt that are not read yet."""

    name: ClassVar[str] = "mtp"
    hidden_layers = ()
    asked = 0

    def due_rows(self, text: int) -> int:
        return 0 if self.asked else LEAST_ROWS

    def note(self, hidden: HiddenRows) -> None:
        """It needs none."""

    def propose(self, context: Context) -> list[int]:
        self.asked += 1
        self.spent_s = self.worker.price.seconds(context.width)
        self.guess = len(context.tokens)
        return [len(context.tokens) + i for i in range(context.width)]

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("what", ["price", "reading"])
def test_drafts_that_were_held_up_are_made_again(what: str, times: int) -> None:
    """One draft, or all for a while, took a hundred times as long as drafts take; so did reading a prompt."""
    worker, costs, history = RightWorker(DraftPrice(0.0, 0.1)), Costs(DEVICES["cpu"]), DraftHistory()
    worker.reading = DraftPrice(0.0, ROW)
    price: DraftPrice = getattr(worker, what)
    held_up_s = 100 * price.seconds(1)
    for _ in range(times):
        price.took(1, held_up_s)
    asked = []
    for _ in range(20):
        source, text = worker.source(), list(range(10))
        drafts = SequenceDrafts([], None, Controller(costs, MOST, history=history), 1 << 20, priced=[source])
        while len(text) < 10 + TOKENS:
            draft = drafts.next_draft(text, lambda: MOST)
            new = [len(text) + i for i in range(len(draft.tokens) + 1)]
            text += new
            drafts.verified(draft, new, costs.ratio(len(new)) + source.spent_s * bool(draft.tokens))
        asked.append(source.asked)
    assert asked[0] > 0 or times > 1
    assert asked[-1] > 0


@pytest.mark.parametrize(
    ("one_s", "all_s", "tokens", "price"),
    [
        (1.0, 1.6, 4, DraftPrice(0.8, 0.2)),
        # No token takes longer than the first one did, nor less than nothing.
        (1.0, 9.0, 5, DraftPrice(0.75, 0.25)),
        (1.0, 0.5, 4, DraftPrice(1.0, 0.0)),
        (1.0, 1.0, 1, DraftPrice(1.0, 0.0)),
    ],
)
def test_what_a_draft_takes_once_and_for_each_token(
    one_s: float, all_s: float, tokens: int, price: DraftPrice
) -> None:
    found = DraftPrice.between(one_s, all_s, tokens)
    assert (found.once_s, found.token_s) == (pytest.approx(price.once_s), pytest.approx(price.token_s))
    assert found.seconds(0) == 0.0
    assert found.seconds(3) == pytest.approx(price.once_s + 3 * price.token_s)


def test_a_price_follows_what_drafts_take_and_goes_back_where_none_is_made() -> None:
    price = DraftPrice(0.8, 0.2)
    # Twice as long as expected is believed to a fifth, and so is thrice for whatever took longer.
    price.took(3, 2.8)
    assert (price.once_s, price.token_s) == (pytest.approx(0.96), pytest.approx(0.24))
    price.took(1, 100.0)
    assert (price.once_s, price.token_s) == (pytest.approx(1.344), pytest.approx(0.336))
    price.forget(2)
    left = 0.995**2
    assert price.once_s == pytest.approx(0.8 + 0.544 * left)
    assert price.token_s == pytest.approx(0.2 + 0.136 * left)
    free = DraftPrice(0.0, 0.0)
    free.took(1, 1.0)
    assert free.seconds(1) == 0.0


def test_all_answers_are_remembered_as_long_as_a_token_in_33() -> None:
    source = SourceHistory(right=10.0, weight=20.0)
    source.judge(3, wrong=True)
    assert (source.right, source.weight, source.judged) == (
        pytest.approx(10 * 0.97 + 3),
        pytest.approx(20 * 0.97 + 4),
        4,
    )
    source.judge(1, wrong=False)
    assert source.judged == 5
    assert not source.known
    source.judge(2, wrong=True)
    assert source.known
    # One that was right more often than a new source is remembered as it was.
    assert SourceHistory(right=27.0, weight=30.0, account=CARRIED).remembered() == (pytest.approx(7.2), 8.0)
    assert SourceHistory(right=1.0, weight=2.0).remembered() == (1.0, 2.0)


def test_what_is_remembered_is_bounded() -> None:
    history = DraftHistory()
    for n in range(100):
        history.source(f"s{n}").gained(1000.0)
    assert len(history.sources) <= 16
    source = history.source("s99")
    for _ in range(1000):
        source.judge(3, wrong=True)
        source.tried(-5.0)
    assert source.weight < 150
    assert source.allowance == -CARRIED
    # One that is known takes nobody's place.
    for n in range(16):
        history.source(f"t{n}")
    known = set(history.sources)
    history.source(next(iter(known)))
    assert set(history.sources) == known
    source = SourceHistory()
    for steps, account in ((3.0, 3.0), (-1.0, 2.0), (-5.0, 0.0), (100.0, 16.0), (-1.0, 15.0)):
        source.gained(steps)
        assert source.account == account
    source.on_tokens(100)
    for steps in (5.0, -0.2):
        source.tried(steps)
    assert source.allowance == pytest.approx(100 * TRIAL_SHARE - 0.2)
    source.on_tokens(1000)
    assert source.allowance == CARRIED
