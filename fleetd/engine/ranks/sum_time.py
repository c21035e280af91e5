"""How long one sum over all ranks takes: measured by all of them at once, when the group forms."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks.ring import lost_ranks

# The first few wake whatever sleeps on the way; of the others the median counts.
SUMS, FIRST = 40, 8


def measured(group: Any, hidden: mx.array, progress: PassProgress) -> float:
    """The median seconds of one sum of arrays such as ``hidden`` (B, 1, D), evaluated by itself as a pass
    waits for it. Every rank makes as many. Raises MemberLost."""
    taken = []
    with progress.within(limits.RANK_FIRST_S), lost_ranks():
        for _ in range(SUMS):
            begun_s = time.perf_counter()
            mx.eval(mx.distributed.all_sum(hidden, group=group))
            taken.append(time.perf_counter() - begun_s)
    return sorted(taken[FIRST:])[(SUMS - FIRST) // 2]
