"""Machines as a fleet: how fast they find and lose each other, what being together costs, what it gives."""

from __future__ import annotations

from bench import fleet_idle, fleet_meeting, fleet_sessions, fleet_work
from bench.figures import Measured

TITLE = "The fleet"
RUNS, QUICK_RUNS = 10, 2
_PARTS = (fleet_meeting, fleet_sessions, fleet_idle, fleet_work)


def measure(runs: int) -> Measured:
    parts = [part.measure(runs) for part in _PARTS]
    return Measured([figure for part in parts for figure in part.figures], "\n\n".join(p.how for p in parts))
