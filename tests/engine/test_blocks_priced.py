"""Whether blocks go ahead of each other, on machines and links whose time is counted: never slower than one
block at a time, whatever becomes of the drafts and however the layers are divided."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import speculating
import tiny_architectures
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import Run, Scripted, patchy, perfect
from timed_groups import timed_group

from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.groups.step_times import slowest_part
from fleetd.engine.protocol import Speculate
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.speculation.ahead import GainEvidence, GroupFlights
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.pass_costs import Costs

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(50)]
TOKENS, STEP_S = 120, 0.01
# As a GPU that mostly reads weights, and as a CPU: what a block of so many tokens takes, in plain steps.
FLAT, STEEP = {1: 1.0, 16: 1.2}, {1: 1.0, 4: 1.4, 8: 1.9, 16: 3.0}
CUTS = {2: (2,), 3: (1, 3)}
Source = Callable[[list[int], int], Scripted]


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@functools.cache
def model() -> Any:
    return tiny_architectures.tiny("llama")


@functools.cache
def text(tokenizer: Any) -> list[int]:
    run = Run(model(), tokenizer)
    run.submit("r", PROMPT, max_tokens=TOKENS + 40)
    run.finish()
    return run.tokens["r"]


class CountedAnswers:
    """Answers of machines that take these ``parts`` of a block's time, and ``way`` plain steps for a message.

    ``flights``: what answers before have left; None if there were none.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        tokenizer: Any,
        curve: dict[int, float],
        parts: Sequence[float],
        way: float,
        *,
        ahead: bool,
        flights: GroupFlights | None = None,
    ) -> None:
        costs = Costs(curve)

        def part_of(part: float, width: int) -> float:
            return STEP_S * part * costs.ratio(width)

        ways = 2 * way * (len(parts) - 1)
        verdict = ExactnessVerdict(
            16, ANY, "exact: for the test", {w: STEP_S * (costs.ratio(w) + ways) for w in curve}
        )
        takes = [functools.partial(part_of, part) for part in parts]
        self._timed = timed_group(patch, model(), CUTS[len(parts)], takes, STEP_S * way)
        known = speculating.speculation(VOCAB, "auto", verdict=verdict, ahead=ahead)
        if flights is not None:
            known.flights = flights
        self._run = Run(self._timed.group.model, tokenizer, known)
        self._text = text(tokenizer)
        # Blocks that were sent and dropped.
        self.dropped = 0
        undo = self._timed.group.model.undo

        def counted(dropped: Sequence[Any]) -> None:
            self.dropped += len(dropped)
            undo(dropped)

        patch.setattr(self._timed.group.model, "undo", counted)
        # What the layers of each machine take is known from here on.
        self._run.submit("plain", PROMPT, max_tokens=6, speculate=Speculate(enabled=False))
        self._run.finish()

    def steps(self, source: Source, answers: int = 2) -> float:
        """Plain steps that so many answers take, one after the other."""
        begun_s = self._timed.clock.now
        for number in range(answers):
            name = f"r{number}"
            self._run.submit(name, PROMPT, source(self._text, number), max_tokens=TOKENS)
            self._run.finish()
            said = self._run.tokens[name]
            assert said == self._text[: len(said)]
        return (self._timed.clock.now - begun_s) / STEP_S


def right(chance: float) -> Source:
    return lambda text, seed: patchy(text, seed, chance, VOCAB)


def gain(tokenizer: Any, source: Source, *machines: Any, answers: int = 2) -> float:
    """How many times as fast answers are with blocks ahead as with one block at a time."""
    took = []
    for ahead in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            took.append(CountedAnswers(patch, tokenizer, *machines, ahead=ahead).steps(source, answers))
    return took[0] / took[1]


MACHINES = {
    "equal": (FLAT, (0.5, 0.5), 0.0),
    "a slow member": (FLAT, (0.2, 0.8), 0.0),
    "a slow first machine": (STEEP, (0.8, 0.2), 0.1),
    "a little unequal": (STEEP, (0.35, 0.65), 0.1),
    "a long way": (STEEP, (0.5, 0.5), 0.5),
    "three, one slow": (FLAT, (0.2, 0.2, 0.6), 0.1),
    "three equal ones": (STEEP, (0.34, 0.33, 0.33), 0.0),
}
# The quick run has these with right drafts, and the first with drafts that turn wrong.
OTHERWISE_TRIED = {"equal", "a little unequal", "three, one slow"}


@pytest.mark.parametrize(
    ("machines", "chance"),
    [
        pytest.param(
            name, chance, marks=() if chance == 0.7 and name not in OTHERWISE_TRIED else pytest.mark.long
        )
        for name in MACHINES
        for chance in (0.05, 0.3, 0.7, 0.9)
    ],
)
def test_text_with_refused_drafts_is_not_slower_than_one_block_at_a_time(
    tokenizer: Any, machines: str, chance: float
) -> None:
    assert gain(tokenizer, right(chance), *MACHINES[machines]) >= 0.99


@pytest.mark.parametrize("machines", ["a slow member", "a slow first machine", "three, one slow"])
def test_right_drafts_are_not_slower_if_one_machine_takes_most_of_the_time(
    tokenizer: Any, machines: str
) -> None:
    assert gain(tokenizer, right(0.98), *MACHINES[machines]) >= 0.99


@pytest.mark.parametrize(
    ("machines", "least"),
    [("equal", 1.3), ("a little unequal", 1.15), ("a long way", 1.3), ("three equal ones", 1.5)],
)
def test_right_drafts_gain(tokenizer: Any, machines: str, least: float) -> None:
    assert gain(tokenizer, lambda text, _: perfect(text), *MACHINES[machines], answers=3) >= least


def test_text_that_is_repeated_in_no_draft_never_sends_ahead(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = CountedAnswers(monkeypatch, tokenizer, *MACHINES["equal"], ahead=True)
    timed.steps(right(0.05))
    assert timed.dropped == 0


def test_drafts_that_turn_wrong_in_the_middle_of_an_answer_soon_end_blocks_ahead(tokenizer: Any) -> None:
    """Even if everything before has paid: few blocks are sent in vain, and the answer takes no longer."""
    half = len(PROMPT) + TOKENS // 2

    def turning(whole: list[int], _seed: int) -> Scripted:
        known = perfect(whole)

        def say(tokens: Sequence[int], width: int) -> list[int]:
            found = known.say(tokens, width)
            first = max(0, half - len(tokens))
            return found[:first] + [(token + 1) % VOCAB for token in found[first:]]

        return Scripted(say)

    took, dropped = {}, {}
    for ahead in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            paid = GroupFlights(GainEvidence(alone=100.0, promised=70.0))
            timed = CountedAnswers(patch, tokenizer, *MACHINES["equal"], ahead=ahead, flights=paid)
            took[ahead], dropped[ahead] = timed.steps(turning, answers=1), timed.dropped
    assert took[True] <= 1.01 * took[False]
    assert 0 < dropped[True] <= 3


# ---- the slowest machine -----------------------------------------------------------------------------------


def machine(computed_s: float, way_s: float = 0.0, steps: int = 8) -> GroupStage:
    return GroupStage("m", 0, 1, computed_s, way_s, steps)


@pytest.mark.parametrize(
    ("times", "step_s", "part"),
    [
        # The one that answers: its layers, and what is left of a step for the head.
        ((machine(2.0), machine(3.0, 1.0)), 10.0, 0.6),
        ((machine(2.0), machine(6.0, 1.0)), 10.0, 0.6),
        # A step that is thought to be shorter than its parts.
        ((machine(2.0), machine(6.0, 2.0)), 1.0, 0.6),
        # Ways are nobody's time, and then none has less than an equal part.
        ((machine(2.0), machine(2.0, 6.0)), 10.0, 0.5),
        ((machine(1.0), machine(7.0), machine(1.0, 0.5)), 10.0, 0.7),
        # Nothing was measured.
        ((machine(2.0), machine(0.0, steps=0)), 10.0, 0.0),
        ((), 10.0, 0.0),
    ],
)
def test_the_slowest_machine_is_known_from_plain_steps(
    times: Sequence[GroupStage], step_s: float, part: float
) -> None:
    assert slowest_part(times, step_s) == pytest.approx(part)
