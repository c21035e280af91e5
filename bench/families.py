"""What can be measured by name: each family's title on the page, its runs, and the scenarios behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.figures import Measured
from bench.harness.machines import why_none
from bench.harness.samples import merged
from bench.scenarios import (
    batching,
    decode,
    demo,
    drafter_beside_local,
    drafts,
    fleet_idle,
    fleet_meeting,
    fleet_sessions,
    fleet_work,
    modelled,
    never_slower,
    padding,
    prefill,
    prefill_no_helper,
    prefill_part,
    prefill_shared,
    prefill_three,
    prefill_unequal,
    prefill_workers,
    scoring,
    sealed_streams,
    service,
    smart_prefill,
    speculation,
    turns,
)


@dataclass(frozen=True, slots=True)
class Family:
    """``measure`` takes a number of runs; ``runs`` make a measurement, ``quick_runs`` a look."""

    title: str
    runs: int
    quick_runs: int
    measure: Callable[[int], Measured]


_SHARED_RUNS = 5


def _shared_prefill(runs: int) -> Measured:
    """Raises RuntimeError where two machines cannot be had on this one."""
    if why := why_none():
        raise RuntimeError(why)
    return merged(
        prefill_shared.measure(runs),
        prefill_workers.measure(runs, quick=runs < _SHARED_RUNS),
        prefill_unequal.measure(runs),
        prefill_no_helper.measure(runs),
    )


def _fleet(runs: int) -> Measured:
    parts = (fleet_meeting, fleet_sessions, fleet_idle, fleet_work)
    return merged(*(part.measure(runs) for part in parts))


#: By name on the command line, in the order of the page.
FAMILIES = {
    "demo": Family("From a fresh clone to an answer", 1, 1, demo.measure),
    "decode": Family("Decode through HTTP", 7, 2, decode.measure),
    "batching": Family("Eight streams at once", 3, 1, batching.measure),
    "prefill": Family("Prefill on the CPU", 5, 1, prefill.measure),
    "turns": Family("Second turn of a chat", 5, 1, turns.measure),
    "service": Family("The daemon", 10, 3, service.measure),
    "streams": Family("Sealed streams", 10, 3, sealed_streams.measure),
    "fleet": Family("The fleet", 10, 2, _fleet),
    "shard": Family("Shared prefill", _SHARED_RUNS, 1, _shared_prefill),
    "shard-three": Family("Shared prefill, three machines", 3, 1, prefill_three.measure),
    "shard-part": Family("Shared prefill, a helper with half of the layers", 3, 1, prefill_part.measure),
    "never-slower": Family("Shared prefill, never slower", never_slower.RUNS, 1, never_slower.measure),
    "smart": Family("Smart prefill, a small model in front of a large one", 3, 1, smart_prefill.measure),
    "smart-score": Family("Scoring a prompt", 3, 1, scoring.measure),
    "drafts": Family("Drafts from another worker", 3, 1, drafts.measure),
    "drafts-beside": Family(
        "A drafter on another machine, beside local drafts", 3, 1, drafter_beside_local.measure
    ),
    "spec": Family("Speculative decoding", 3, 1, speculation.measure),
    "modelled": Family("Others' figures, as the planner predicts them", 1, 1, modelled.measure),
    "padding": Family("The price of exactness on a CPU", 5, 1, padding.measure),
}
# Measured only when named: it downloads everything anew.
ON_REQUEST = {"demo"}
