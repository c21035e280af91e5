"""What plain steps of a group took in one machine's layers, and on the way there and on."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetd.control.prefill_trace import GroupStage

# Tokens of a plain step: two on devices that compute one row as two (``speculation.canonical_width``).
MOST_TOKENS = 2
# Steps that the medians are of.
STEPS = 64


def slowest_part(times: Sequence[GroupStage], step_s: float) -> float:
    """The part of a plain step of ``step_s`` seconds that the slowest machine takes, at least an equal one; 0
    if no step of some machine was measured. ``times``: of each machine, first of the one that answers, which
    has the head and chooses tokens besides."""
    if not times or not all(each.steps for each in times):
        return 0.0
    front, *members = times
    elsewhere_s = sum(each.computed_s + each.way_s for each in members)
    total_s = max(step_s, front.computed_s + elsewhere_s)
    return max(1 / len(times), *(each.computed_s / total_s for each in members), 1 - elsewhere_s / total_s)


@dataclass(slots=True)
class StepTimes:
    """Steps of one machine, which has layers [first, last). ``name``: of the machine; "" for this one.
    ``relayed``: as ``GroupStage`` has it."""

    name: str
    first: int
    last: int
    relayed: bool = False
    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STEPS))

    def add(self, tokens: int, computed_s: float, way_s: float = 0.0) -> None:
        """Note a block of ``tokens`` of each sequence that had the machine to itself; wider ones than a plain
        step are left out. ``way_s``: from when it was sent until it was answered, without ``computed_s``."""
        if tokens <= MOST_TOKENS:
            self._steps.append((computed_s, max(0.0, way_s)))

    @property
    def median(self) -> GroupStage:
        computed_s, way_s = zip(*self._steps, strict=True) if self._steps else ((0.0,), (0.0,))
        medians = statistics.median(computed_s), statistics.median(way_s)
        return GroupStage(self.name, self.first, self.last, *medians, len(self._steps), self.relayed)
