"""Which models a machine has room for, and which of them to take. Pure.

What a machine may hold at most decides whether a model fits: that stays the same while programs come and go.
What is free at the moment only tells whether memory has to be freed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

import msgspec

from fleetd.control.model_listing import ModelFit
from fleetd.models.catalog import CatalogEntry, Purpose
from fleetd.models.memory_need import WeightRules

# Of a machine's most, a recommended model leaves this share for longer contexts.
_LEFT = 0.05
_RANK = {"here": 0, "freed": 0, "elsewhere": 1, "together": 2, "none": 3}


class Room(msgspec.Struct, frozen=True):
    """A machine as a place for models."""

    name: str
    # How it holds weights.
    rules: WeightRules
    # Bytes that all models may take with all memory free.
    most_bytes: int
    # Bytes that one more model may take now, idle models unloaded; None if that is not known.
    free_bytes: int | None = None
    # It may see prompts, so it may hold a part of a model.
    sees_prompts: bool = True
    # Of weights that it reads for each token; only ratios count.
    bytes_per_s: float = 1.0


def fit(need: Callable[[WeightRules], int], here: Room, others: Iterable[Room] = ()) -> ModelFit:
    """Where a model has room.

    Args:
        need: bytes that it needs on a machine that holds weights so.
        others: the other machines of the fleet.
    """
    needed = need(here.rules)
    machines = [room.name for room in others if need(room.rules) <= room.most_bytes]
    if needed > here.most_bytes:
        return ModelFit("elsewhere" if machines else "none", machines, needed - here.most_bytes)
    free = here.most_bytes if here.free_bytes is None else here.free_bytes
    return ModelFit("here", machines) if needed <= free else ModelFit("freed", machines, needed - free)


def recommended(
    entries: Iterable[CatalogEntry], needs: Mapping[str, int], most_bytes: int
) -> dict[str, list[str]]:
    """The models to take on a machine: for chat and for coding the largest marked one with room to spare, and
    the draft of one of these.

    Args:
        needs: bytes that each model needs there, by its name.
        most_bytes: that models may take there.

    Returns:
        By name of a model, the work that it is recommended for; a machine may be too small for any.
    """
    by_name = {entry.name: entry for entry in entries}
    fitting = [entry for name, entry in by_name.items() if needs[name] <= (1 - _LEFT) * most_bytes]
    found: dict[str, list[str]] = {}
    targets = []
    for purpose in get_args(Purpose):
        marked = [entry for entry in fitting if purpose in entry.recommended]
        if marked:
            best = max(marked, key=lambda entry: entry.memory_bytes)
            found.setdefault(best.name, []).append(purpose)
            targets.append(best)
    # Beside its target if there is room, or else for smaller models of the family.
    drafts = [each for each in targets if each.draft]
    if drafts:
        best = min(drafts, key=lambda each: needs[each.draft] + needs[each.name] > most_bytes)
        found.setdefault(best.draft, []).append("draft")
    return found


def in_order(
    entries: Sequence[CatalogEntry], fits: Mapping[str, ModelFit], chosen: Mapping[str, list[str]]
) -> list[CatalogEntry]:
    """Models in the order in which people look at them: those that load here, the recommended ones and larger
    ones first; then those that another machine has room for, and the others, smaller ones first."""

    def rank(entry: CatalogEntry) -> tuple[int, bool, int]:
        where = _RANK[fits[entry.name].where]
        size = entry.memory_bytes if where else -entry.memory_bytes
        return where, entry.name not in chosen, size

    return sorted(entries, key=rank)
