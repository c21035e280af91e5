"""What holds of the steps of any trace, as the API gives it."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetd.control.prefill_trace import Trace
from fleetd.plan.prefill.step_names import PHASES, REQUEST

_ROUNDING_S = 1e-6


def check_steps(told: Trace | dict[str, Any]) -> None:
    """Assert that no step leaves the one that it is part of, that sums fit, and that nothing ends late."""
    trace = told if isinstance(told, Trace) else msgspec.convert(told, Trace)
    first, *others = trace.steps
    assert (first.name, first.parent, first.begin_s) == (REQUEST, None, 0.0)
    assert trace.took_s is not None
    assert abs(first.end_s - trace.took_s) < _ROUNDING_S
    for at, step in enumerate(others, 1):
        assert step.parent is not None
        assert 0 <= step.parent < at
        parent = trace.steps[step.parent]
        assert parent.begin_s <= step.begin_s <= step.end_s <= parent.end_s <= trace.took_s + _ROUNDING_S
        assert 0 <= step.seconds <= step.end_s - step.begin_s + _ROUNDING_S
        # A lane has a name of its own for each machine.
        assert step.machine not in ("", "this machine")
    _check_sums(trace)
    _check_phases(trace)


def _check_sums(trace: Trace) -> None:
    sums: dict[tuple[int, str], float] = {}
    for step in trace.steps:
        if step.parent is not None and not (step.parent == 0 and step.name in PHASES):
            key = step.parent, step.machine
            sums[key] = sums.get(key, 0.0) + step.seconds
    for (parent, _), seconds in sums.items():
        owner = trace.steps[parent]
        assert seconds <= owner.end_s - owner.begin_s + _ROUNDING_S


def _check_phases(trace: Trace) -> None:
    phases = [step for step in trace.steps if step.parent == 0 and step.name in PHASES]
    at = 0.0
    for phase in phases:
        assert abs(phase.begin_s - at) < _ROUNDING_S
        at = phase.end_s
    assert abs(at - trace.steps[0].end_s) < _ROUNDING_S
    if trace.ttft_s is not None and trace.ttft_s < (trace.took_s or 0.0):
        assert any(phase.name == "writing" for phase in phases)
