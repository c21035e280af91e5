"""Whether a model over machines is cut anew, by what their layers were measured to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetd.control.prefill_trace import GroupStage
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, cut
from fleetd.plan.measured_cut import (
    LEAST_GAIN,
    LEAST_STEPS,
    Exchange,
    OtherMachines,
    cut_anew,
    exchange,
    layer_seconds,
)

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
    assert layer_seconds(found, [stages[0], replace(stages[1], computed_s=0.0)]) is None
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


# ---- machines from outside -------------------------------------------------------------------------------

MANY = 10**9


def others(
    *machines: GroupMachine, held: GroupCut, hop_s: Mapping[str, float] | None = None, load_s: float = 1.0
) -> OtherMachines:
    """All believed to take a millisecond for a layer, or as their speeds say."""
    every = [*(part.machine for part in held.parts), *machines]
    return OtherMachines(
        machines,
        {each.node_id: each.layer_bytes / each.bytes_per_s for each in every},
        {each.node_id: (hop_s or {}).get(each.node_id, 0.0) for each in every},
        {each.node_id: load_s for each in every},
    )


def exchanged(
    found: GroupCut,
    outside: Sequence[GroupMachine],
    tokens: int = MANY,
    hop_s: Mapping[str, float] | None = None,
    **layer_ms: float,
) -> Exchange | None:
    seconds = {name: ms / 1000 for name, ms in layer_ms.items()}
    known = others(*outside, held=found, hop_s=hop_s)
    return exchange(MODEL, found, seconds, known, tokens=tokens, context_tokens=CONTEXT)


def pair() -> GroupCut:
    """Here and b, neither of which has room for all."""
    return held(machine("here", 8), machine("b", 9))


def parts(found: Exchange | None) -> Mapping[str, int] | None:
    return layers(found.found) if found is not None else None


def test_an_idle_machine_takes_the_place_of_a_slow_one() -> None:
    found = exchanged(pair(), [machine("c", 9)], here=1, b=8)
    assert parts(found) == {"here": 6, "c": 6}
    assert found is not None
    # What it gains is said of the cut that is held, and not of the best one of its machines.
    assert found.gain == pytest.approx((6 + 48 + 48) / (6 + 6 + 6) - 1)
    assert found.layer_s["c"] == pytest.approx(0.001)


def test_a_machine_from_outside_is_as_much_slower_than_believed_as_those_that_stay() -> None:
    # All of this fleet's figures are too good by the same factor: nothing is gained.
    assert exchanged(pair(), [machine("c", 9)], here=8, b=8) is None
    # Twice as slow as believed here: so c is reckoned to be, and that is still faster than b.
    found = exchanged(pair(), [machine("c", 9)], here=2, b=16)
    assert found is not None
    assert found.layer_s["c"] == pytest.approx(0.002)
    # Of those that stay one is as slow as believed, and the other one takes three times as long.
    three = held(machine("here", 5), machine("b", 5), machine("c", 5))
    believed_ms = LAYER_BYTES / 1e6
    found = exchanged(three, [machine("d", 5)], here=believed_ms, b=3 * believed_ms, c=20)
    assert found is not None
    assert found.layer_s["d"] == pytest.approx(3 * believed_ms / 1000)


def test_what_a_machine_took_in_an_earlier_group_says_more_than_what_is_believed() -> None:
    assert exchanged(pair(), [machine("c", 9)], here=1, b=8, c=9) is None
    assert parts(exchanged(pair(), [machine("c", 9)], here=1, b=8, c=0.5)) == {"here": 4, "c": 8}


def test_a_faster_machine_takes_the_place_of_one_that_is_as_slow_as_it_was_believed_to_be() -> None:
    found = held(machine("here", 8), machine("b", 9, bytes_per_s=2e8))
    fast = machine("c", 9, bytes_per_s=1e9)
    as_believed = LAYER_BYTES / 1e9 * 1000
    assert parts(exchanged(found, [fast], here=as_believed, b=5 * as_believed)) == {"here": 6, "c": 6}


def test_a_machine_without_room_takes_no_place() -> None:
    assert exchanged(pair(), [machine("c", 3)], here=1, b=8) is None
    assert exchanged(pair(), [], here=1, b=8) is None


def test_no_more_machines_than_before_hold_it() -> None:
    assert exchanged(pair(), [machine("c", 3), machine("d", 3)], here=1, b=8) is None
    three = held(machine("here", 5), machine("b", 5), machine("c", 5))
    found = exchanged(three, [machine("d", 5), machine("e", 5)], here=1, b=1, c=20)
    assert found is not None
    assert len(found.found.parts) == 3
    assert "c" not in layers(found.found)
    assert "b" in layers(found.found)


def test_a_group_of_three_may_become_one_of_two() -> None:
    three = held(machine("here", 5), machine("b", 5), machine("c", 5))
    assert parts(exchanged(three, [machine("d", 9)], here=1, b=9, c=9)) == {"here": 5, "d": 7}


def test_a_place_is_taken_once_the_group_has_lost_as_much_time_as_the_load_takes() -> None:
    # A token would take 40 ms with 8 layers here and 4 on b, and 12 ms with c. 6 layers are loaded in 6 s.
    enough = math.ceil(6 / (0.040 - 0.012))
    assert exchanged(pair(), [machine("c", 9)], enough - 1, here=1, b=8) is None
    assert exchanged(pair(), [machine("c", 9)], enough, here=1, b=8) is not None
    assert exchanged(pair(), [machine("c", 9)], 0, here=1, b=8) is None
    # A faster one gets 8 layers, which take longest to load: 16 s. A token would take 8 ms.
    enough, layer_s = math.ceil(16 / (0.040 - 0.008)), {"here": 0.001, "b": 0.008, "c": 0.0005}
    known = others(machine("c", 9), held=pair(), load_s=2.0)
    for tokens, found in ((enough - 1, False), (enough, True)):
        taken = exchange(MODEL, pair(), layer_s, known, tokens=tokens, context_tokens=CONTEXT)
        assert (taken is not None) is found


def test_the_way_to_a_machine_counts() -> None:
    assert exchanged(pair(), [machine("c", 9)], hop_s={"c": 0.05}, here=1, b=8) is None
    assert exchanged(pair(), [machine("c", 9)], hop_s={"c": 0.05, "b": 0.05}, here=1, b=8) is not None
    found = exchanged(pair(), [machine("c", 9)], hop_s={"c": 0.006, "b": 0.004}, here=1, b=8)
    assert found is not None
    assert found.gain == pytest.approx((6 + 48 + 48 + 4) / (6 + 6 + 6 + 6) - 1)


def test_what_its_own_machines_can_do_needs_no_other_one() -> None:
    roomy = held(machine("here"), machine("b"))
    # With nearly all layers here b hardly counts, and c would gain next to nothing.
    assert anew(roomy, here=1, b=8) == {"here": 11, "b": 1}
    assert parts(exchanged(roomy, [machine("c")], here=1, b=4)) is not None
    assert parts(exchanged(roomy, [machine("c", bytes_per_s=1e8)], here=1, b=8)) is None


def test_nothing_is_exchanged_before_all_machines_were_measured() -> None:
    assert exchanged(pair(), [machine("c", 9)], here=1) is None


@given(
    st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    st.lists(st.integers(3, 12), min_size=6, max_size=6),
    st.lists(st.floats(1e8, 1e10), min_size=3, max_size=3),
)
def test_an_exchange_is_whole_and_fits_and_gains(
    layer_ms: list[float], rooms: list[int], speeds: list[float]
) -> None:
    inside = [machine(f"m{n}", room) for n, room in enumerate(rooms[:3])]
    outside = [machine(f"o{n}", rooms[3 + n], speed) for n, speed in enumerate(speeds)]
    try:
        before = held(*inside)
    except AssertionError:
        return
    found = exchanged(before, outside, **{f"m{n}": ms for n, ms in enumerate(layer_ms)})
    if found is None:
        return
    room = dict(zip(("m0", "m1", "m2", "o0", "o1", "o2"), rooms, strict=True))
    assert found.gain >= LEAST_GAIN
    assert len(found.found.parts) <= len(before.parts)
    assert found.found.parts[0].machine.node_id == "m0"
    assert sum(layers(found.found).values()) == MODEL.layers
    assert all(count <= room[name] for name, count in layers(found.found).items())
