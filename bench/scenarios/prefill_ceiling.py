"""What a split could give at best, and how good a prediction was. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetd.control.prefill_trace import Trace


def ceiling(trace: Trace, layers: int) -> float:
    """Over one machine alone, with machines that are alike, free hand-offs and nothing else to do.

    Layers are a pipeline: with m chunks and S machines, S m / (m + S - 1); tokens are the same with L layers
    in place of chunks. ``layers`` are the model's.

    Raises:
        ValueError: nothing was split.
    """
    split = trace.chosen
    machines = len(split.cuts) - 1
    match split.kind:
        case "layers":
            steps = math.ceil((trace.prompt_tokens - 1 - trace.cached_tokens) / split.chunk)
        case "tokens":
            steps = layers
        case _:
            raise ValueError(f"{split.kind} has no such ceiling")
    return pipeline(machines, steps)


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
    return sum(step.seconds for step in trace.steps if step.name == name and step.machine == machine)


def sum_of_speeds(alone_s: Sequence[float]) -> float:
    """What machines that need so long for the same work could give together, over the first one alone."""
    return sum(alone_s[0] / seconds for seconds in alone_s)
