"""Whether a model over machines is cut anew, by what their layers were measured to take."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetd.control.prefill_trace import GroupStage
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, cut
from fleetd.plan.measured_cut import LEAST_GAIN, LEAST_STEPS, cut_anew, layer_seconds

LAYER_BYTES, CONTEXT = 1 << 20, 1000
MODEL = GroupModelSize(12, 0, 16)


def machine(name: str, layers: int = 12, bytes_per_s: float = 1e9) -> GroupMachine:
    """``layers``: so many have room, with keys and values for a context."""
    return GroupMachine(
        name, name, layers * (LAYER_BYTES + CONTEXT * MODEL.row_bytes), bytes_per_s, LAYER_BYTES
    )


def held(*machines: GroupMachine) -> GroupCut:
    found = cut(MODEL, machines[0], machines[1:], least_tokens=CONTEXT, most_tokens=2 * CONTEXT, every=True)
    assert isinstance(found, GroupCut)
    return found


def layers(found: GroupCut) -> Mapping[str, int]:
    return {part.machine.name: part.last - part.first for part in found.parts}


def anew(found: GroupCut, **layer_ms: float) -> Mapping[str, int] | None:
    seconds = {name: ms / 1000 for name, ms in layer_ms.items()}
    better = cut_anew(MODEL, found, seconds, context_tokens=CONTEXT)
    return layers(better[0]) if better is not None else None


def test_a_machine_that_became_slow_gives_layers_away() -> None:
    found = held(machine("here"), machine("b"))
    assert layers(found) == {"here": 6, "b": 6}
    assert anew(found, here=1, b=8) == {"here": 11, "b": 1}


def test_machines_as_fast_as_planned_stay_as_they_are() -> None:
    found = held(machine("here"), machine("b", bytes_per_s=2e9))
    # Each takes as much for its layers as was planned, whatever that is in milliseconds.
    assert anew(found, here=10, b=5) is None


def test_a_small_gain_is_not_worth_a_load() -> None:
    found = held(machine("here"), machine("b"))
    assert anew(found, here=1, b=1.05) is None


def test_no_machine_gets_more_than_it_has_room_for() -> None:
    found = held(machine("here", 7), machine("b", 9))
    assert anew(found, here=1, b=8) == {"here": 7, "b": 5}


def test_room_for_a_whole_context_is_not_given_up_for_speed() -> None:
    roomy = machine("here", 12)
    tight = replace(roomy, room_bytes=8 * LAYER_BYTES + 8 * 100 * MODEL.row_bytes)
    found = held(tight, machine("b"))
    better = cut_anew(MODEL, found, {"here": 0.001, "b": 0.008}, context_tokens=CONTEXT)
    assert better is not None
    assert better[0].tokens >= CONTEXT
    assert layers(better[0])["here"] < 8


def test_the_gain_is_told() -> None:
    found = held(machine("here"), machine("b"))
    better = cut_anew(MODEL, found, {"here": 0.001, "b": 0.008}, context_tokens=CONTEXT)
    assert better is not None
    # (6 + 48 + 48) ms for (11 + 8 + 11) ms.
    assert better[1] == pytest.approx(102 / 30 - 1)


def test_only_enough_steps_of_this_very_cut_count() -> None:
    found = held(machine("here"), machine("b"))
    stages = [
        GroupStage("", 0, 6, 0.006, 0.0, LEAST_STEPS),
        GroupStage("b", 6, 12, 0.012, 0.001, LEAST_STEPS),
    ]
    assert layer_seconds(found, stages) == {"here": pytest.approx(0.001), "b": pytest.approx(0.002)}
    few = replace(stages[1], steps=LEAST_STEPS - 1)
    assert layer_seconds(found, [stages[0], few]) is None
    assert layer_seconds(found, [replace(stages[0], last=5), replace(stages[1], first=5)]) is None
    assert layer_seconds(found, []) is None


def test_nothing_is_moved_before_all_machines_were_measured() -> None:
    assert anew(held(machine("here"), machine("b")), here=1) is None


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=4),
    st.lists(st.integers(4, 12), min_size=4, max_size=4),
)
def test_a_new_cut_is_whole_gains_and_is_not_cut_again(layer_ms: list[float], rooms: list[int]) -> None:
    machines = [machine(f"m{n}", room) for n, (_, room) in enumerate(zip(layer_ms, rooms, strict=False))]
    try:
        found = held(*machines)
    except AssertionError:
        return
    seconds = {each.node_id: ms / 1000 for each, ms in zip(machines, layer_ms, strict=True)}
    better = cut_anew(MODEL, found, seconds, context_tokens=CONTEXT)
    if better is None:
        return
    new, gain = better
    assert gain >= LEAST_GAIN
    assert sum(layers(new).values()) == MODEL.layers
    assert all(layers(new)[each.name] <= room for each, room in zip(machines, rooms, strict=False))
    assert cut_anew(MODEL, new, seconds, context_tokens=CONTEXT) is None
