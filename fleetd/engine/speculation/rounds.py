"""When several sequences are decoded one by one with drafts, and when together without. Pure.

A batch of n gives every answer a token per step of s(n) seconds. One by one, answer i gets E_i tokens per
round of c_1 + … + c_n seconds, c_i being the pass that verifies its drafts. No answer may lose by it, so
rounds are worth it if

    min E_i · s(n) > MARGIN · (c_1 + … + c_n)

s(n) is never assumed: it is what steps of n have taken here. Rounds in which an answer has lost end, and are
not tried again before a rest, each time twice as long unless every answer had gained until then.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

# Moving in and out of a batch copies KV and costs some steps there, and expectations are estimates: at 1.25
# what was won in rounds was lost on the way.
MARGIN = 1.6
# Steps that a batch's time is the median of, and rounds that are looked back on.
STEPS, WINDOW = 8, 4
# Steps before the question is asked again: asking costs a little for every answer.
PAUSE = 8
# Steps of the first rest and of the longest.
REST, LONGEST_REST = 32, 1024


class Promise(msgspec.Struct, frozen=True):
    """What the next pass of one answer is expected to bring."""

    # Tokens of the answer, at least 1.
    tokens: float
    # What the pass takes.
    seconds: float


@dataclass
class Rounds:
    """The rounds of one worker. Call ``add_step`` after each step of a batch, ``add_round`` after each
    round and ``end`` after the last one."""

    _steps: defaultdict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=STEPS))
    )
    _window: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _gained_s: dict[str, float] = field(default_factory=dict)
    _rest: int = 0
    _next_rest: int = REST

    def add_step(self, size: int, seconds: float) -> None:
        """Note that a batch of ``size`` answers made a step in ``seconds``."""
        self._steps[size].append(seconds)
        self._rest = max(0, self._rest - 1)

    def step_s(self, size: int) -> float | None:
        """s(n); None until it was measured often enough."""
        steps = self._steps.get(size, ())
        return statistics.median(steps) if len(steps) == STEPS else None

    @property
    def resting(self) -> bool:
        return self._rest > 0

    def worth(self, promises: Sequence[Promise]) -> bool:
        """True if every answer would gain. If not, the next ``PAUSE`` steps need not ask again."""
        step_s = self.step_s(len(promises))
        if step_s is None or self.resting:
            return False
        round_s = sum(promise.seconds for promise in promises)
        worth = min(promise.tokens for promise in promises) * step_s > MARGIN * round_s
        if not worth:
            self._rest = PAUSE
        return worth

    def add_round(self, emitted: Mapping[str, int], seconds: float) -> None:
        """Note a round: the tokens that each answer got, by its id, and what the round took."""
        if self._window and self._window[-1][1].keys() != emitted.keys():
            self._window.clear()
        self._window.append((seconds, dict(emitted)))
        if (step_s := self.step_s(len(emitted))) is not None:
            for answer, tokens in emitted.items():
                self._gained_s[answer] = self._gained_s.get(answer, 0.0) + tokens * step_s - seconds

    @property
    def losing(self) -> bool:
        """True if the batch would have given some answer more lately."""
        if len(self._window) < WINDOW:
            return False
        seconds = sum(each for each, _ in self._window)
        step_s = self.step_s(len(self._window[-1][1]))
        fewest = min(sum(said[answer] for _, said in self._window) for answer in self._window[-1][1])
        return step_s is None or fewest * step_s < seconds

    def end(self) -> None:
        """End the rounds: all answers are back in the batch. Does nothing if there were no rounds."""
        if not self._gained_s:
            return
        gained = min(self._gained_s.values()) > 0
        self._rest = REST if gained else self._next_rest
        self._next_rest = REST if gained else min(2 * self._next_rest, LONGEST_REST)
        self._window.clear()
        self._gained_s.clear()
