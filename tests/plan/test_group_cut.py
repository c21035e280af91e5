"""Where a model is cut over machines."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, Shortage, cut, cut_with_fetchers

GB = 10**9
#: 80 layers of half a GB: 70 billion weights of 4 bits.
LARGE = GroupModelSize(80, 2 * GB, 4096)


def machine(name: str, room_gb: float, speed: float = 400.0, layer_bytes: int = GB // 2) -> GroupMachine:
    return GroupMachine(name, name, int(room_gb * GB), speed, layer_bytes)


def layers(found: GroupCut | Shortage) -> dict[str, int]:
    assert isinstance(found, GroupCut)
    return {part.machine.name: part.last - part.first for part in found.parts}


def asked(here: GroupMachine, *others: GroupMachine, model: GroupModelSize = LARGE) -> GroupCut | Shortage:
    return cut(model, here, others, least_tokens=4096, most_tokens=65536)


def test_equal_machines_get_equal_parts() -> None:
    assert layers(asked(machine("here", 30), machine("b", 30))) == {"here": 40, "b": 40}


def test_a_faster_machine_gets_more() -> None:
    found = layers(asked(machine("here", 40, 100), machine("fast", 40, 400)))
    assert found["fast"] > 2 * found["here"]


def test_no_more_machines_than_needed_and_of_these_the_faster() -> None:
    found = layers(asked(machine("here", 24), machine("slow", 40, 50), machine("fast", 30, 400)))
    assert set(found) == {"here", "fast"}


def test_the_embedding_and_the_head_count_where_answers_are_written() -> None:
    found = layers(asked(machine("here", 22.5), machine("b", 60)))
    assert found["here"] <= 40


def test_what_is_missing_is_told() -> None:
    # A layer and its 4096 tokens take 0.5168 GB: 15 have room beside the 2 GB of both ends, and 19 on b.
    found = asked(machine("here", 10), machine("b", 10))
    assert found == Shortage(46 * (GB // 2 + 4096 * 4096))
    here, cramped = machine("here", 2.5), machine("c", 0.5)
    found = asked(here, machine("b", 10), cramped)
    assert found == Shortage(61 * (GB // 2 + 4096 * 4096), (here, cramped))


def test_the_roomiest_seven_are_tried() -> None:
    small = [machine(name, 1.1) for name in ("a", "b")]
    large = [machine(name, 5.7) for name in "cdefghi"]
    assert set(layers(asked(machine("here", 4), *small, *large))) == {"here", *"cdefghi"}


def test_the_fastest_comes_first_in_the_chain() -> None:
    found = asked(machine("here", 15), machine("slow", 15, 50), machine("fast", 16, 800))
    assert list(layers(found)) == ["here", "fast", "slow"]


def test_machines_that_fetch_come_last_unless_all_are_to_hold_a_part() -> None:
    here, has, bare = machine("here", 30), machine("has", 30, 100), replace(machine("bare", 30), can_fetch=80)
    for every, names in ((False, {"here", "has"}), (True, {"here", "has", "bare"})):
        found = cut_with_fetchers(
            LARGE, here, [has], [bare], least_tokens=4096, most_tokens=65536, every=every
        )
        assert set(layers(found)) == names


@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 2, 4), (4, 1, 2), (2, 3, 3), (1, 9, 1)])
@pytest.mark.parametrize("rooms", [(4, 4, 4), (9, 9, 9), (2, 9, 3), (6, 2, 9)])
def test_no_other_cut_over_the_same_machines_costs_less(
    speeds: tuple[int, ...], rooms: tuple[int, ...]
) -> None:
    """What a step takes in all machines one after the other, and once more the longest of them."""
    model = GroupModelSize(10, 0, 0)
    here, *others = (
        machine(str(number), room / 2, speed * GB / 2)
        for number, (room, speed) in enumerate(zip(rooms, speeds, strict=True))
    )
    found = layers(cut(model, here, others, least_tokens=0, most_tokens=1, every=True))

    def cost(counts: tuple[int, ...]) -> float:
        times = [count / speed for count, speed in zip(counts, speeds, strict=True)]
        return sum(times) + max(times)

    fitting = [each for each in product(*(range(1, room + 1) for room in rooms)) if sum(each) == 10]
    assert cost(tuple(found[str(number)] for number in range(3))) == pytest.approx(min(map(cost, fitting)))


def test_room_for_more_tokens_than_wanted_is_not_taken() -> None:
    found = asked(machine("here", 300), machine("b", 300))
    assert isinstance(found, GroupCut)
    assert found.tokens == 65536


MACHINES = st.builds(
    lambda name, room, speed: machine(f"m{name}", room / 10, speed),
    st.integers(0, 10**6),
    st.integers(0, 400),
    st.sampled_from([50.0, 100.0, 273.0, 546.0, 819.0]),
)


@given(
    MACHINES,
    st.lists(MACHINES, max_size=5, unique_by=lambda each: each.name),
    st.integers(2, 90),
    st.integers(0, 8),
)
def test_every_cut_fits_and_is_whole(
    here: GroupMachine, others: list[GroupMachine], count: int, outside: int
) -> None:
    model = GroupModelSize(count, outside * GB, 4096)
    found = asked(here, *others, model=model)

    def most(each: GroupMachine, *, ends: bool) -> int:
        room = each.room_bytes - (model.outside_bytes if ends else 0)
        return max(0, room) // (each.layer_bytes + 4096 * model.row_bytes)

    def holds(some: tuple[GroupMachine, ...]) -> bool:
        rooms = [most(here, ends=True), *(most(each, ends=False) for each in some)]
        return min(rooms) >= 1 and sum(rooms) >= count and count >= len(rooms)

    possible = [n for n in range(1, len(others) + 1) if any(map(holds, combinations(others, n)))]
    if isinstance(found, Shortage):
        assert not possible
        assert found.missing_bytes > 0
        return
    assert len(found.parts) == possible[0] + 1
    assert found.parts[0].machine == here
    ends = [part.last for part in found.parts]
    assert [part.first for part in found.parts] == [0, *ends[:-1]]
    assert ends[-1] == count
    assert found.tokens >= 4096
    for index, part in enumerate(found.parts):
        held = (part.last - part.first) * (part.machine.layer_bytes + found.tokens * model.row_bytes)
        assert held + (0 if index else model.outside_bytes) <= part.machine.room_bytes


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_of_fewer_layers_than_machines_is_not_cut(count: int) -> None:
    tiny = GroupModelSize(count, 0, 4096)
    found = asked(machine("here", 0.6), machine("b", 0.6), machine("c", 0.6), model=tiny)
    assert isinstance(found, GroupCut) is (count == 2)


def test_layers_that_stay_together_are_all_on_the_last_machine() -> None:
    ten = GroupModelSize(10, 0, 0, together=4)
    here, large, small = machine("here", 3), machine("large", 2.6), machine("small", 1.5, 800)
    assert layers(asked(here, large, model=ten)) == {"here": 5, "large": 5}
    # Three layers have room, and four would have to be there.
    assert asked(machine("here", 4), small, model=ten) == Shortage(GB // 2)
    found = asked(machine("here", 1.5), small, large, model=ten)
    assert isinstance(found, GroupCut)
    assert [part.machine.name for part in found.parts] == ["here", "small", "large"]
    assert found.parts[-1].last - found.parts[-1].first >= 4
