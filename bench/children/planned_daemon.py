"""``planned_daemon run ...``: the daemon, and another planner: a file says what is done with each prompt.

The planner keeps at home what is sooner read there, as it should; to measure what sharing or fetching takes
all the same, the file that ``BENCH_PLAN`` names holds one word:

    layers, tokens    a helper computes half of them
    fetch             what another machine has read is fetched, whatever that takes
    here              it is read here, alone
    anything else     as the planner decides

With each of the words no other machine answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fleetd import limits
from fleetd.cli import main
from fleetd.plan.prefill import choice
from fleetd.plan.prefill.options import HelperSpec, PlanChoice, PrefillOption
from fleetd.plan.prefill.schedule import PrefillSize, timeline
from fleetd.plan.prefill.split import KINDS, Split, SplitKind, halved
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.kv_fetching import choice as fetch_choice
from fleetd.requests.kv_fetching import client as fetching
from fleetd.requests.kv_fetching.choice import FetchChoice, FetchSource
from fleetd.requests.placement.placement import Placement, Placer, WantedModel
from fleetd.requests.prefill_sharing import client as sharing

# A fetch may take so long.
_FETCH_S = 120.0
_WORDS = (*KINDS, "fetch", "here")
_choose_place = Placer.choose


def plan_prefill(
    prompt: PrefillSize,
    home: HelperSpec,
    helpers: Iterable[HelperSpec],
    previous: PrefillOption | None = None,
) -> PlanChoice:
    """The planner's choice, or half of the prompt for the best helper."""
    machines = {machine.node_id: machine for machine in helpers}
    chosen = choice.plan_prefill(prompt, home, machines.values(), previous)
    kind = next((kind for kind in KINDS if kind == _word()), None)
    found = choice.options(prompt, home, machines.values())
    if _word() in ("fetch", "here"):
        return choice.choose([way for way in found if way.kind == "local"])
    ways = [way for way in found if way.split is not None and len(way.helpers) == 1]
    if kind is None or not ways:
        return chosen
    best = min(ways, key=lambda way: way.predicted_s)
    split = in_two(kind, prompt)
    line = timeline(replace(prompt, states=0), split, [machines[best.helpers[0]]], home.speed)
    half = replace(best, kind=kind, split=split, predicted_s=line.total_s, code="", reason="")
    return PlanChoice(half, tuple(way for way in found if way is not best))


def choose_place(placer: Placer, job: Job, model: WantedModel, **more: Any) -> Placement:
    """Here if the file has one of the words, else as the planner decides."""
    if _word() in _WORDS:
        return Placement(THIS_NODE, Planned("local", LOCAL.nodes, LOCAL.exactness))
    return _choose_place(placer, job, model, **more)


def in_two(kind: SplitKind, prompt: PrefillSize) -> Split:
    """Half of the layers, or of the chunks; these are smaller than usual if there are fewer than two."""
    chunk = min(prompt.chunk, max(1, len(prompt.new) // 2))
    return replace(halved(kind, prompt.shape.layers, prompt.new, chunk), places=prompt.places)


def choose_fetch(
    sources: Iterable[FetchSource], computed_s: Sequence[float], block_bytes: int
) -> FetchChoice | None:
    """The planner's choice, or all that a machine has, first to last."""
    found = list(sources)
    if _word() != "fetch" or not found:
        return fetch_choice.choose_fetch(found, computed_s, block_bytes)
    most = max(found, key=lambda source: source.blocks)
    return FetchChoice(most, most.seconds(block_bytes))


def within_s(chosen: FetchChoice, computed_s: Sequence[float], spent_s: float) -> float:
    return _FETCH_S if _word() == "fetch" else fetch_choice.within_s(chosen, computed_s, spent_s)


def _word() -> str:
    return Path(os.environ["BENCH_PLAN"]).read_text(encoding="ascii").strip()


if __name__ == "__main__":
    # How long a way is beside what it saves is no reason not to measure it.
    setattr(limits, "FETCH_LOOK_SHARE", 1.0)  # noqa: B010
    for name, value in {"choose_fetch": choose_fetch, "within_s": within_s}.items():
        setattr(fetching, name, value)
    setattr(sharing, "plan_prefill", plan_prefill)  # noqa: B010 - mypy knows an assignment for a mistake
    setattr(Placer, "choose", choose_place)  # noqa: B010
    main()
