"""What models may take: one rule for the engine's admission, FITS HERE, routing and cards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.render.memory import memory_lines
from fleetctl.verbs.status import _machine
from fleetd.control.daemon_status import HardwareReading
from fleetd.hardware.memory import MemoryReading, budget, machine_budget, metal_limit
from fleetd.limits import GIB, MIB
from fleetd.models import catalog
from fleetd.models.memory_need import (
    WORKING_BYTES,
    CpuSizes,
    WeightNeed,
    WeightRules,
    estimated,
    sizes_by_config,
)

SIZES = st.integers(0, 1 << 50)


@pytest.mark.parametrize(
    ("limits", "usable", "largest"),
    [
        ({}, 8, 16),
        ({"fraction": 0.5}, 4, 8),
        ({"device_limit_bytes": 6 * GIB}, 6, 6),
        ({"device_limit_bytes": 12 * GIB, "fraction": 0.5}, 4, 6),
        ({"max_bytes": 3 * GIB}, 3, 3),
        ({"overcommit": True, "fraction": 0.5}, 8, 8),
        ({"overcommit": True, "device_limit_bytes": 12 * GIB, "max_bytes": 10 * GIB}, 10, 10),
    ],
)
def test_what_is_usable_now_and_at_most(limits: dict[str, Any], usable: int, largest: int) -> None:
    found = budget(MemoryReading(16 * GIB, 8 * GIB), **limits)
    assert (found.usable_bytes, found.largest_bytes) == (usable * GIB, largest * GIB)


@pytest.mark.parametrize(
    ("limits", "usable"),
    [
        ({"max_bytes": 8 * GIB, "held_bytes": 5 * GIB}, 3),
        ({"max_bytes": 8 * GIB, "held_bytes": 28 * GIB}, 0),
        ({"device_limit_bytes": 12 * GIB, "fraction": 0.5, "held_bytes": 4 * GIB}, 2),
        # Without them 12 + 8 GiB would be free.
        ({"fraction": 0.5, "held_bytes": 8 * GIB}, 2),
        ({"fraction": 0.5, "held_bytes": 12 * GIB}, 0),
        ({"max_bytes": 8 * GIB, "held_bytes": 5 * GIB, "overcommit": True}, 3),
        ({"held_bytes": 20 * GIB, "overcommit": True}, 32),
    ],
)
def test_what_models_hold_already_counts_against_the_owners_bounds(
    limits: dict[str, Any], usable: int
) -> None:
    assert budget(MemoryReading(32 * GIB, 12 * GIB), **limits).usable_bytes == usable * GIB


@given(
    st.integers(1, 64),
    st.integers(0, 64),
    st.floats(0.1, 0.95),
    st.integers(0, 64),
    st.lists(st.floats(0, 1)),
)
def test_however_many_models_are_loaded_their_sum_keeps_to_the_bounds(
    free_gib: int, device_gib: int, fraction: float, most_gib: int, parts: list[float]
) -> None:
    """Each takes a part of what it is told that it may take, or all of it."""
    bounds = [int(free_gib * GIB * fraction)]
    bounds += [int(device_gib * GIB * fraction)] * bool(device_gib) + [most_gib * GIB] * bool(most_gib)
    held = 0
    for part in [*parts, 1.0]:
        found = budget(
            MemoryReading(64 * GIB, free_gib * GIB - held),
            device_limit_bytes=device_gib * GIB,
            held_bytes=held,
            fraction=fraction,
            max_bytes=most_gib * GIB,
        )
        held += int(found.usable_bytes * part)
        assert held <= min(bounds)
    assert held == min(bounds)


@given(SIZES, SIZES, SIZES, st.floats(0.01, 0.95), SIZES, st.booleans(), SIZES)
def test_no_limit_is_ever_passed(
    total: int, available: int, device: int, fraction: float, most: int, overcommit: bool, held: int
) -> None:
    available = min(available, total)
    found = budget(
        MemoryReading(total, available),
        device_limit_bytes=device,
        held_bytes=held,
        fraction=fraction,
        max_bytes=most,
        overcommit=overcommit,
    )
    assert 0 <= found.usable_bytes <= found.largest_bytes <= total * fraction
    assert not device or found.largest_bytes <= device * fraction
    assert not most or found.largest_bytes <= most
    assert overcommit or found.usable_bytes <= available
    assert overcommit or held or found.usable_bytes <= available * fraction


@pytest.mark.parametrize(
    ("total_gib", "wired_mib", "limit_gib"), [(8, 0, 16 / 3), (24, 0, 16), (64, 0, 48), (24, 20_480, 20)]
)
def test_the_gpu_of_a_mac_may_not_hold_everything(total_gib: int, wired_mib: int, limit_gib: float) -> None:
    assert metal_limit(total_gib * GIB, wired_mib * MIB) == int(limit_gib * GIB)


def test_a_cpu_holds_a_quantised_model_packed_and_in_float32_takes_seven_times_its_files() -> None:
    entry = catalog.find("qwen3-4b")
    assert entry is not None
    on_disk, room = entry.download_bytes, budget(MemoryReading(24 * GIB, 22 * GIB), fraction=0.85)
    context = entry.memory_bytes - on_disk
    of = partial(WeightRules.of, budget=room)
    assert estimated(entry, of("metal", "auto", available=True)) == WeightNeed("", on_disk + context)
    packed = estimated(entry, of("cpu", "auto", available=True))
    assert packed.arithmetic == "int8"
    assert packed.n_bytes == pytest.approx(1.235 * on_disk + context, rel=0.01)
    wide = estimated(entry, of("cpu", "float32", available=True))
    assert wide == estimated(entry, of("cpu", "auto", available=False))
    assert wide.arithmetic == "float32"
    assert wide.n_bytes == pytest.approx(7.1 * on_disk + context, rel=0.01)


def test_a_model_that_a_machine_without_onnxruntime_cannot_hold_fits_in_int8() -> None:
    entry = catalog.find("qwen3-8b")
    assert entry is not None
    room = budget(MemoryReading(24 * GIB, 22 * GIB), fraction=0.85)
    without, packed = (
        estimated(entry, WeightRules.of("cpu", "auto", room, available=here)).n_bytes + WORKING_BYTES
        for here in (False, True)
    )
    assert packed < 12 * GIB < room.usable_bytes < without


def test_the_config_tells_the_sizes_of_weights_whose_headers_cannot_be_read() -> None:
    def float32(config: dict[str, Any]) -> int:
        return sizes_by_config(9000, config).float32

    assert float32({}) == 18_000
    assert float32({"torch_dtype": "float32"}) == 9000
    # The unpacked model's type says nothing of the files.
    assert float32({"torch_dtype": "float32", "quantization": {"bits": 4}}) == 64_000
    assert float32({"quantization": {"bits": 8, "head": {"bits": 4}}}) == 64_000
    assert float32({"quantization": {"bits": 4096}}) == 18_000
    # What a publisher wrote there is not believed to be a mapping, or a number.
    assert float32({"quantization": [4]}) == 18_000
    assert float32({"quantization": {"bits": "4"}}) == 18_000
    # 16 bits become 8 and a scale; 4 stay as they are, and no width takes less than it takes in the files.
    assert 4500 < sizes_by_config(9000, {}).int8 < 9000
    for bits in (2, 3, 4, 5, 6, 8):
        assert 9000 <= sizes_by_config(9000, {"quantization": {"bits": bits}}).int8 <= 30_000


def test_what_is_free_at_the_moment_does_not_choose_the_arithmetic() -> None:
    """Two loads of one model would compute different bytes otherwise."""
    one, other = (
        WeightRules.of("cpu", "auto", budget(MemoryReading(24 * GIB, free), held_bytes=held), available=True)
        for free, held in ((20 * GIB, 0), (GIB, 12 * GIB))
    )
    assert one == other
    sizes = CpuSizes(float32=16 * GIB, int8=4 * GIB)
    assert one.need(8 * GIB, {}, lambda: sizes) == WeightNeed("float32", 16 * GIB)
    more = CpuSizes(float32=24 * GIB, int8=6 * GIB)
    assert one.need(12 * GIB, {}, lambda: more) == WeightNeed("int8", 6 * GIB)


def test_people_see_the_parts_of_the_figure_and_a_warning() -> None:
    limits: dict[str, Any] = {"device_limit_bytes": 16 * GIB, "fraction": 0.85, "max_bytes": 15 * GIB}
    (line,) = memory_lines(budget(MemoryReading(24 * GIB, 20 * GIB), **limits))
    assert line == (
        "Models may take 14.6 GB now: 21.5 GB free of 25.8 GB, of which the GPU may hold 17.2 GB, "
        "times 0.85 (engine.memory_fraction), at most 16.1 GB (engine.max_memory_bytes)."
    )
    shown = memory_lines(budget(MemoryReading(24 * GIB, GIB), overcommit=True), 2 * GIB)
    assert "2.1 GB" in shown[1]
    assert "may swap" in shown[2]


def test_people_see_what_is_unknown_short_or_held() -> None:
    held = budget(MemoryReading(64 * GIB, 30 * GIB), device_limit_bytes=48 * GIB, held_bytes=20 * GIB)
    assert "of which the GPU may hold 51.5 GB, times 1" in memory_lines(held)[0]
    assert memory_lines(held)[0].endswith("(engine.memory_fraction), with the 21.5 GB that models hold.")
    unknown = memory_lines(budget(MemoryReading(64 * GIB, 64 * GIB, free_unknown=True)))
    assert unknown[0].startswith("Models may take 68.7 GB now: 68.7 GB of memory, times 1")
    assert "does not say what is free" in unknown[1]
    for pressure, words in (("warning", "idle for a minute"), ("critical", "none is loaded")):
        found = budget(MemoryReading(64 * GIB, 9 * GIB, pressure=pressure))  # type: ignore[arg-type]
        assert words in memory_lines(found)[1]


def test_the_status_line_says_unknown_and_short() -> None:
    assert "free unknown" in _machine({"machine": {"memory_bytes": GIB, "free_unknown": True}})
    assert "(pressure: critical)" in _machine({"machine": {"memory_bytes": GIB, "pressure": "critical"}})


@pytest.mark.parametrize(
    ("told", "usable_gib"),
    [
        ({}, 10),
        ({"device_limit_bytes": 16 * GIB}, 8),
        ({"card_bytes": 24 * GIB, "card_free_bytes": 10 * GIB}, 10),
        # Of 12 GiB they hold 8, whatever the card says is free.
        ({"card_bytes": 12 * GIB, "card_free_bytes": 10 * GIB}, 4),
        ({"pressure": "critical"}, 0),
    ],
)
def test_a_reading_of_the_machine_has_one_budget(told: dict[str, Any], usable_gib: int) -> None:
    """10 GiB are free, wherever models live; loaded ones hold 8 of what the GPU may."""
    machine = HardwareReading(memory_bytes=32 * GIB, available_bytes=10 * GIB, **told)
    found = machine_budget(
        machine, machine.model_available_bytes, 8 * GIB, fraction=1.0, max_bytes=0, overcommit=False
    )
    assert found.usable_bytes == usable_gib * GIB
    assert found.total_bytes == told.get("card_bytes", 32 * GIB)
    assert (found.pressure, found.held_bytes) == (told.get("pressure", ""), 8 * GIB)
