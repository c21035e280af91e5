"""What a long prompt takes, from chunks that were timed at some depths, and what the planner expects. Pure.

Each of n tokens in a chunk behind t others takes a + b (t + n/2) seconds: a line over the chunk's middle.
What all of a prompt takes is the area under it. The planner's own code then prices the prompt with that line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.scoring import Scorer, SmartPlan, SmartPrefillQuestion, plan


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """``tokens`` tokens behind ``start`` others took so many ``seconds``."""

    start: int
    tokens: int
    seconds: float

    @property
    def middle(self) -> float:
        return self.start + self.tokens / 2

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens


def depths(tokens: int, count: int, last: int) -> list[int]:
    """``count`` places in a prompt, evenly spread: the first one at its beginning, the last one ``last``
    tokens before its end."""
    return [place * (tokens - last) // (count - 1) for place in range(count)]


def whole_s(chunks: Sequence[TimedChunk], tokens: int) -> float:
    """Seconds of all of a prompt: the area under the chunks' seconds per token, by trapezoids, and by the
    line through the first and the last two of them up to the prompt's ends."""
    points = sorted((chunk.middle, chunk.token_s) for chunk in chunks)
    ends = [(0.0, _at(0.0, *points[:2])), *points, (float(tokens), _at(float(tokens), *points[-2:]))]
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(ends))


def _at(x: float, near: tuple[float, float], far: tuple[float, float]) -> float:
    """The line through two points at ``x``."""
    return near[1] + (x - near[0]) * (far[1] - near[1]) / (far[0] - near[0])


def fitted(chunks: Sequence[TimedChunk]) -> PrefillSpeed:
    """The planner's speed on the line that is nearest to all chunks. What each of them costs however short it
    is counts with its tokens: all are about equally long."""
    slope, first = statistics.linear_regression(
        [chunk.middle for chunk in chunks], [chunk.token_s for chunk in chunks]
    )
    return PrefillSpeed(max(0.0, first), max(0.0, slope))


def as_measured(scorer: Scorer, tokens: int, score_s: float) -> Scorer:
    """The same scorer, with the pace at which it took ``score_s`` seconds to score so many tokens."""
    factor = score_s / scorer.seconds(tokens, scorer.passes(tokens))
    return replace(scorer, speed=scorer.speed.times(factor))


def expected(
    target: PrefillSpeed, scorer: Scorer, tokens: int, kept: float, *, dense_s: float = 0.0
) -> SmartPlan:
    """The planner's plan for a prompt of which the share ``kept`` is read. ``dense_s``: seconds of the whole
    prompt, if they were measured."""
    dense_s = dense_s or target.total(1.0, range(tokens), 1)
    return plan(SmartPrefillQuestion(tokens, kept, target, dense_s=dense_s), [scorer])
