"""One prompt computed by two machines: how much sooner its answer begins."""

from __future__ import annotations

from bench import shard_engines, shard_idle, shard_speedup, shard_unequal
from bench.figures import Measured
from bench.shard_machines import why_none

TITLE = "Shared prefill"
RUNS, QUICK_RUNS = 5, 1


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two machines cannot be had on this one."""
    if why := why_none():
        raise RuntimeError(why)
    quick = runs < RUNS
    parts = [
        shard_speedup.measure(runs),
        shard_engines.measure(runs, quick=quick),
        shard_unequal.measure(runs),
        shard_idle.measure(runs),
    ]
    return Measured([figure for part in parts for figure in part.figures], "\n\n".join(p.how for p in parts))
