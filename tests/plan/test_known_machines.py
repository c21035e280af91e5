"""The machines that one can add in thought."""

from __future__ import annotations

import pytest

from fleetd.limits import GIB
from fleetd.plan import chip_speeds, known_machines


@pytest.mark.parametrize(
    "name", ["Mac mini M4, 16 GB", "mac mini m4 16gb", "  Mac Mini  M4,16 gb", "MAC MINI M4, 16 GB"]
)
def test_a_machine_is_found_however_its_name_is_spaced(name: str) -> None:
    found = known_machines.find(name)
    assert found is not None
    assert (found.name, found.chip, found.accelerator) == ("Mac mini M4, 16 GB", "Apple M4", "metal")
    assert found.memory_bytes == 16 * GIB


def test_an_unknown_name_is_answered_by_its_neighbours() -> None:
    assert known_machines.find("Mac mini M4") is None
    assert known_machines.find("") is None
    assert known_machines.nearest("Mac mini M4, 18 GB")[0] == "Mac mini M4, 16 GB"
    assert known_machines.nearest("mac studio m3 ultr, 96")[0] == "Mac Studio M3 Ultra, 96 GB"
    assert known_machines.nearest("zzz") == []


def test_the_speeds_of_every_chip_are_known() -> None:
    assert len({machine.name for machine in known_machines.MACHINES}) == len(known_machines.MACHINES)
    for machine in known_machines.MACHINES:
        speeds = chip_speeds.hardware_of(machine.chip, machine.accelerator, 0)
        assert speeds is chip_speeds.GB10 or speeds in chip_speeds.APPLE.values()
        if machine.accelerator == "metal":
            generation, _, variant = machine.chip.removeprefix("Apple M").partition(" ")
            assert speeds is chip_speeds.APPLE[int(generation), variant], machine.name
