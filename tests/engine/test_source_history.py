"""What drafts gain and lose over many answers of a worker, in simulated time: no clock, no mlx."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fleetd.engine.speculation.controller import NO_DRAFT, RISK_PER_TOKEN, Controller
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.source_history import (
    CARRIED,
    PRIOR,
    TRIAL_SHARE,
    DraftHistory,
    SourceHistory,
)

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
class Worker:
    """A head that takes ``price`` plain steps a token, on a device whose passes seem to take now a little more,
    now a little less, and now and then three times as long."""

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
    return max(
        (1 - a ** (k + 1)) / (1 - a) / (costs.ratio(k + 1) + price * k) for k in range(MOST + 1)
    )


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


@pytest.mark.parametrize("price", [0.05, 0.3])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("process", PROCESSES)
def test_hardly_any_answer_is_slower_than_without_the_head(process: str, device: str, price: float) -> None:
    found = Worker(device, price).times_plain(PROCESSES[process])
    assert p10(found) >= 0.98
    assert min(found) >= 0.93


@pytest.mark.parametrize("price", [0.05, 0.3])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chance", [0.6, 0.75, 0.9])
def test_a_head_that_pays_comes_near_the_best(chance: float, device: str, price: float) -> None:
    if (most := best(device, price, chance)) < 1.15:
        assert (device, price, chance) == ("cpu, quantised", 0.3, 0.6)
        return
    found = Worker(device, price).times_plain(always(chance), answers=40)[10:]
    assert len(found) / sum(1 / each for each in found) >= 0.85 * most
