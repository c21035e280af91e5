"""What a split could give at best, and how good a prediction was. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.plan.prefill import step_names

HOME = "this"


def ceiling(trace: Trace, layers: int) -> float:
    """Over one machine alone, with machines that are alike, free hand-offs and nothing else to do.

    Layers are a pipeline: with m chunks and S machines, S m / (m + S - 1); tokens are the same with L layers
    in place of chunks. ``layers`` are the model's.

    Raises:
        ValueError: nothing was split.
    """
    return pipeline(len(trace.chosen.cuts) - 1, pieces(trace, layers))


def pieces(trace: Trace, layers: int) -> int:
    """In how many pieces a split is handed on: chunks, or the model's layers.

    Raises:
        ValueError: nothing was split.
    """
    split = trace.chosen
    match split.kind:
        case "layers":
            return math.ceil((trace.prompt_tokens - 1 - trace.cached_tokens) / split.chunk)
        case "tokens":
            return layers
        case _:
            raise ValueError(f"{split.kind} has no such ceiling")


def pipeline(machines: int, steps: int) -> float:
    """What a pipeline of equal steps gives over one machine."""
    return machines * steps / (steps + machines - 1)


def error(trace: Trace) -> float | None:
    """Predicted over actual time, less 1: below 0 it took longer. None where there is nothing to compare."""
    if trace.outcome != "shared" or not trace.prefill_s or trace.chosen.predicted_s is None:
        return None
    return trace.chosen.predicted_s / trace.prefill_s - 1


def step_s(trace: Trace, name: str, machine: str) -> float:
    """Seconds of a step as it went, 0 where there was none."""
    machine = trace.machine if machine == HOME else machine
    return sum(step.seconds for step in trace.steps if step.name == name and step.machine == machine)


def later_check_s(trace: Trace) -> float:
    """What the check of later tokens takes on average of prompts like this one.

    It is left out by chance where the first check took more than ``SHARE_LATER_SHARE`` of the plan's seconds:
    its own seconds count by how probable it was. Where it was left out, the first check's seconds do.
    """
    first_s = step_s(trace, step_names.SPOT_CHECK, HOME)
    share_s = limits.SHARE_LATER_SHARE * (trace.chosen.predicted_s or 0.0)
    probability = 1.0 if first_s <= share_s else share_s / first_s
    return probability * (step_s(trace, step_names.LATER_CHECK, HOME) or first_s)


def handed_off_s(trace: Trace, layers: int) -> float:
    """How long home had nothing to do although no machine's work explains it: the hand-off shows.

    With one helper. By the step times of both ends: home has to wait for the helper's first piece, or, where
    the helper has more to do, for its last one, which is home's last one too. What it waits beyond that went
    into rows and hidden states on their way, and into the beginning.
    """
    idle_s = sum(step_s(trace, name, HOME) for name in (step_names.WAITED, step_names.EXPOSED))
    own_s = step_s(trace, step_names.COMPUTED, HOME)
    theirs_s = sum(step.seconds for step in trace.steps if step.name == step_names.COMPUTED) - own_s
    count = pieces(trace, layers)
    explained_s = max(theirs_s / count, theirs_s - own_s * (1 - 1 / count))
    # The spot check takes up some of the wait.
    return max(0.0, idle_s - max(0.0, explained_s - step_s(trace, step_names.SPOT_CHECK, HOME)))


def sum_of_speeds(alone_s: Sequence[float]) -> float:
    """What machines that need so long for the same work could give together, over the first one alone."""
    return sum(alone_s[0] / seconds for seconds in alone_s)
