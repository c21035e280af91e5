"""Where models have room: on this machine, on another one, on several together, or on none."""

from __future__ import annotations

import pytest
import tiny_architectures

from fleetctl.render.models_table import fits
from fleetd.api.control.offered import Rooms
from fleetd.control.daemon_status import DaemonStatus, HardwareReading, MemoryBudget
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.model_listing import ModelFit
from fleetd.limits import GIB
from fleetd.models.catalog import find
from fleetd.models.folder import read_folder
from fleetd.models.memory_need import WeightRules

METAL = WeightRules("metal", budget_bytes=24 * GIB)


def peer(name: str, gib: int, *, sees: bool = True, chip: str = "Apple M4") -> PeerView:
    return PeerView(
        name, name, name, "usable", sees_prompts=sees, chip=chip, accelerator="metal", memory_bytes=gib * GIB
    )


def rooms(*peers: PeerView, most: int = 24 * GIB, rules: WeightRules = METAL) -> Rooms:
    status = DaemonStatus(
        machine=HardwareReading(accelerator=rules.accelerator, gpu="Apple M4"),
        memory=MemoryBudget(largest_bytes=most, usable_bytes=most),
        fleet=FleetView(True, name="mini", peers=list(peers)),
    )
    return Rooms(status, rules, 0)


def where(model: str, *peers: PeerView) -> ModelFit:
    entry = find(model)
    assert entry is not None
    return rooms(*peers).of_entry(entry)


def test_a_model_that_fits_no_machine_fits_on_as_few_together_as_hold_it() -> None:
    found = where("llama-3.3-70b", peer("studio", 48), peer("kitchen", 16), peer("phone", 8))
    assert found.where == "together"
    assert found.machines == ["studio"]
    assert fits(found) == "here + studio"


def test_a_model_that_fits_one_machine_is_not_cut() -> None:
    assert fits(where("qwen3-8b", peer("studio", 32))) == "here"
    assert fits(where("llama-3.3-70b", peer("studio", 128), peer("kitchen", 32))) == "studio"


@pytest.mark.parametrize("others", [(), (peer("studio", 32, sees=False),)])
def test_machines_that_may_not_see_prompts_hold_no_part(others: tuple[PeerView, ...]) -> None:
    found = where("llama-3.3-70b", *others)
    assert (found.where, found.machines) == ("none", [])
    assert fits(found) == "no: 23.6 GB short"


def test_what_is_missing_is_what_is_missing_together() -> None:
    alone, together = where("llama-3.3-70b"), where("llama-3.3-70b", peer("phone", 8))
    assert together.where == "none"
    assert 0 < together.short_bytes < alone.short_bytes


def test_layers_of_a_model_on_the_disk_are_read_from_its_files(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("tiny")
    tiny_architectures.write(path, "llama", num_hidden_layers=4, hidden_size=256)
    folder = read_folder(path, name="tiny", source="folder", revision=None)
    assert rooms(peer("studio", 1)).of_folder(folder).where == "here"
    cramped = rooms(peer("studio", 1, sees=False), most=1000).of_folder(folder)
    assert cramped.where in ("elsewhere", "none")
