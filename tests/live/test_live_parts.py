"""A group is formed with a machine that has no file of the model: it fetches the layers that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of
from live_fleet import LiveFleet

from fleetd.models import layer_files
from fleetd.models.memory_need import WORKING_BYTES

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

DEEP = "deep"
#: Its weights take 19 MB in int8.
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "int8", "FLEETD_ENGINE_THREADS": "1"}
SETTINGS = {**COMMON, "FLEETD_ENGINE_MAX_MEMORY_BYTES": str(WORKING_BYTES + 17_000_000)}


@pytest.fixture
def pair(deep_model: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    """Only alpha has the model."""
    models: dict[str, list[Path]] = {"alpha": [deep_model], "beta": []}
    settings = dict.fromkeys(models, SETTINGS)
    with LiveFleet(short_dir / "parts", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        yield fleet


def answer(daemon: LiveDaemon) -> str:
    with daemon.stream(DEEP, "Tell me of a fox.", max_tokens=24, temperature=0) as events:
        return "".join(text_of(event) for event in checked(events))


def checked(events: Any) -> Iterator[Any]:
    for event in events:
        assert "error" not in event, event
        yield event


def test_a_machine_without_the_model_fetches_the_layers_that_it_holds(
    pair: LiveFleet, deep_model: Path, short_dir: Path, programs: Programs
) -> None:
    with LiveFleet(
        short_dir / "unparted", {"whole": [deep_model]}, settings={"whole": COMMON}, programs=programs
    ) as fleet:
        expected = answer(fleet["whole"])
    pair.until_has("beta", "alpha", DEEP)
    assert answer(pair["alpha"]) == expected
    (part,) = [engine for engine in pair["beta"].status()["engines"] if engine["part_of"]]
    # By the name that the model has on alpha, whatever beta calls the folder.
    assert (part["part_of"], part["asked_by"]) == (DEEP, ["alpha"])
    told = pair["beta"].fleetctl("status").stdout
    assert f"{DEEP}: layers {part['first_layer']}-{part['last_layer'] - 1} of 12, asked by alpha" in told
    (place,) = (pair.models_dir("beta") / layer_files.PARTS).iterdir()
    held = sorted(file.name for file in place.glob("*.safetensors"))
    assert held == [layer_files.name_of(n) for n in range(part["first_layer"], part["last_layer"])]
    whole = sum(file.stat().st_size for file in deep_model.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in place.glob("*.safetensors")) < 0.7 * whole
    # It is no model of beta's.
    assert not pair.peers("alpha")["beta"]["models"]
