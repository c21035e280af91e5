"""Which models fit a machine, and which are recommended for it."""

from __future__ import annotations

import pytest

from fleetd.control.model_listing import ModelFit
from fleetd.hardware.memory import metal_limit
from fleetd.limits import GIB
from fleetd.models import catalog
from fleetd.models.choosing import Room, fit, in_order, recommended
from fleetd.models.memory_need import WeightRules, estimated

METAL = WeightRules("metal")
ENTRIES = catalog.entries()


def most(memory_gib: int) -> int:
    """What models may take of a Mac's memory by the settings as they come."""
    return int(metal_limit(memory_gib * GIB, 0) * 0.85)


def needs(rules: WeightRules = METAL) -> dict[str, int]:
    return {entry.name: estimated(entry, rules).n_bytes for entry in ENTRIES}


# ---- Where a model has room ------------------------------------------------------------------------------


def test_what_is_free_now_never_decides_whether_a_model_fits() -> None:
    for free_gib in range(9):
        found = fit(lambda rules: 6 * GIB, Room("here", METAL, 8 * GIB, free_gib * GIB))
        assert found.loads_here
        assert (found.where == "freed") == (found.short_bytes > 0) == (free_gib < 6)
    assert fit(lambda rules: 6 * GIB, Room("here", METAL, 8 * GIB, 5 * GIB)) == ModelFit("freed", [], GIB)


def test_a_model_fits_on_the_machines_whose_memory_is_enough_by_their_own_way_to_hold_weights() -> None:
    def need(rules: WeightRules) -> int:
        return 40 * GIB if rules.accelerator == "cpu" else 20 * GIB

    here = Room("mini", METAL, 12 * GIB)
    studio, box = Room("studio", METAL, 48 * GIB), Room("box", WeightRules("cpu"), 36 * GIB)
    assert fit(need, here, [box, studio]) == ModelFit("elsewhere", ["studio"], 8 * GIB)
    assert fit(need, here, [box]) == ModelFit("none", [], 8 * GIB)
    assert fit(need, studio, [here]) == ModelFit("here")


# ---- Which one to take -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory_gib", "chat", "coding", "draft"),
    [
        (8, "qwen3.5-4b", "qwen3.5-4b", "qwen3.5-0.8b"),
        (16, "qwen3.5-9b", "qwen3.5-9b", "qwen3.5-0.8b"),
        (24, "qwen3.5-9b", "qwen3.5-9b", "qwen3.5-0.8b"),
        (36, "gemma-4-26b-a4b", "qwen3.6-27b", "gemma-4-e2b"),
        (64, "qwen3.6-35b-a3b", "qwen3.6-35b-a3b", "qwen3.5-0.8b"),
        (128, "qwen3.5-122b-a10b", "qwen3.5-122b-a10b", "qwen3.5-0.8b"),
    ],
)
def test_each_size_of_mac_has_one_model_for_each_work(
    memory_gib: int, chat: str, coding: str, draft: str
) -> None:
    found = recommended(ENTRIES, needs(), most(memory_gib))
    by_work = {work: name for name, works in found.items() for work in works}
    assert by_work == {"chat": chat, "coding": coding, "draft": draft}


@pytest.mark.parametrize("memory_gib", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("rules", [METAL, WeightRules("cpu", "auto"), WeightRules("cpu", "int8", True)])
def test_what_is_recommended_fits_and_drafts_for_what_is_recommended_too(
    memory_gib: int, rules: WeightRules
) -> None:
    found = recommended(ENTRIES, needs(rules), most(memory_gib))
    works = [work for each in found.values() for work in each]
    assert len(works) == len(set(works))
    for name, each in found.items():
        assert needs(rules)[name] <= most(memory_gib)
        if "draft" in each:
            targets = [catalog.find(other) for other, work in found.items() if {"chat", "coding"} & {*work}]
            assert name in [target.draft for target in targets if target is not None]


def test_models_that_load_here_come_first_recommended_ones_before_larger_ones() -> None:
    here, studio = Room("mini", METAL, most(16), 0), Room("studio", METAL, most(64))
    fits = {
        entry.name: fit(lambda rules, entry=entry: estimated(entry, rules).n_bytes, here, [studio])
        for entry in ENTRIES
    }
    chosen = recommended(ENTRIES, needs(), most(16))
    ordered = in_order(ENTRIES, fits, chosen)
    assert {entry.name for entry in ordered[:2]} == {"qwen3.5-9b", "qwen3.5-0.8b"}
    places = [fits[entry.name].where for entry in ordered]
    assert places == sorted(places, key=["freed", "elsewhere", "none"].index)
    here_first = [entry.memory_bytes for entry in ordered[2 : places.count("freed")]]
    assert here_first == sorted(here_first, reverse=True)
    assert ordered[-1].name == "kimi-k2.6"
