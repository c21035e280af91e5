"""What stays of a GPU's memory: a bounded cache of buffers, and weights that are wired and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_architectures import write

from fleetd.engine.load import model_reading, stage_loading
from fleetd.engine.settings import WorkerSettings
from fleetd.hardware import memory, mlx_device
from fleetd.hardware.device_facts import DeviceFacts
from fleetd.hardware.memory import MemoryReading
from fleetd.limits import GIB, MIB

pytestmark = pytest.mark.one_loop
SETTINGS = WorkerSettings(name="m", path="/m", memory_fraction=0.5)


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The limits that a GPU of a Mac was given, by the calls that give them."""
    given: dict[str, int] = {}
    generate: Any = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(
        generate, "maybe_set_recommended_wired_limit", generate.maybe_set_recommended_wired_limit
    )
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "set_default_device", lambda device: None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_cache_limit", lambda size: given.update(cache=size))
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: given.update(wired=size))
    monkeypatch.setattr(mx, "get_active_memory", lambda: 5 * GIB)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12 * GIB})
    monkeypatch.setattr(
        mlx_device, "describe", lambda: DeviceFacts("metal", "Apple M3", limit_bytes=12 * GIB)
    )
    monkeypatch.setattr(memory, "system_memory", lambda groups: MemoryReading(16 * GIB, 11 * GIB))
    return given


def test_mlx_keeps_few_buffers_and_mlx_lm_wires_none(metal: dict[str, int]) -> None:
    assert model_reading.pick_device("auto") == "metal"
    assert metal == {"cache": GIB}
    generate: Any = importlib.import_module("mlx_lm.generate")
    # What BatchGenerator sets at its start; None is a device without such a limit, so it resets none either.
    assert generate.maybe_set_recommended_wired_limit() is None
    assert "wired" not in metal


def test_only_what_is_loaded_is_wired(metal: dict[str, int]) -> None:
    model_reading.keep_weights("metal", SETTINGS)
    assert metal["wired"] == 5 * GIB + 16 * MIB


def test_no_more_is_wired_than_the_gpu_may_hold(
    metal: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: 13 * GIB)
    model_reading.keep_weights("metal", SETTINGS)
    assert metal["wired"] == 12 * GIB


@pytest.mark.parametrize(("device", "wanted"), [("cpu", True), ("cuda", True), ("metal", False)])
def test_elsewhere_and_where_the_owner_says_so_nothing_is_wired(
    metal: dict[str, int], device: Any, wanted: bool
) -> None:
    model_reading.keep_weights(device, WorkerSettings(name="m", path="/m", wire_weights=wanted))
    assert "wired" not in metal


@pytest.mark.usefixtures("cpu_installed")
def test_a_part_of_a_model_is_wired_as_a_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[tuple[str, int]] = []
    monkeypatch.setattr(
        stage_loading, "keep_weights", lambda device, settings: kept.append((device, settings.last_layer))
    )
    part = WorkerSettings(name="m", path=str(write(tmp_path, "llama")), first_layer=0, last_layer=1)
    stage_loading.load_part(part, "cpu", lambda progress: None)
    assert kept == [("cpu", 1)]


@pytest.mark.usefixtures("metal")
def test_a_worker_may_take_what_the_daemon_says_it_may() -> None:
    """Half of 11 GiB free. Beside 4 that another worker holds: half of the 12 that a GPU may, or of the 15
    that are free or held, less these 4."""
    assert model_reading.memory_budget("metal", SETTINGS).usable_bytes == int(5.5 * GIB)
    beside = WorkerSettings(name="m", path="/m", memory_fraction=0.5, held_bytes=4 * GIB)
    assert model_reading.memory_budget("metal", beside).usable_bytes == 2 * GIB
    # Of a CPU no GPU is asked.
    assert model_reading.memory_budget("cpu", beside).usable_bytes == int(3.5 * GIB)


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize(("card_gib", "free_gib", "usable"), [(24, 20, 10.0), (0, 0, 5.5)])
def test_a_card_with_memory_of_its_own_is_budgeted_by_it(
    monkeypatch: pytest.MonkeyPatch, card_gib: int, free_gib: int, usable: float
) -> None:
    told = DeviceFacts("cuda", card_bytes=card_gib * GIB, card_free_bytes=free_gib * GIB)
    monkeypatch.setattr(mlx_device, "describe", lambda: told)
    assert model_reading.memory_budget("cuda", SETTINGS).usable_bytes == int(usable * GIB)
