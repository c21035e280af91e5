"""Admission is arithmetic: no set of promises is ever worth more than the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.control.daemon_status import MemoryBudget
from fleetd.control.model_facts import StateSizes
from fleetd.engine.load.loading import MemoryShares
from fleetd.engine.measure.memory import KvBudget, RowBound, admit_weights, human
from fleetd.engine.settings import GroupMember, WorkerSettings
from fleetd.errors import OutOfMemory
from fleetd.limits import GIB, MIB
from fleetd.models.memory_need import WORKING_BYTES

NAMES = st.sampled_from("abcd")


@given(
    st.integers(0, 5000),
    st.integers(1, 16),
    st.lists(st.tuples(st.sampled_from(["take", "give back"]), NAMES, st.integers(0, 300)), max_size=40),
)
def test_no_sequence_of_promises_exceeds_the_budget(
    budget_bytes: int, per_token: int, steps: list[tuple[str, str, int]]
) -> None:
    budget = KvBudget.of(budget_bytes, per_token)
    held: dict[str, int] = {}
    for step, name, tokens in steps:
        if step == "give back":
            budget.give_back(name)
            held.pop(name, None)
        else:
            wanted = {**held, name: tokens}
            fits = len(wanted) * max(wanted.values()) * per_token <= budget_bytes
            assert budget.take_memory(name, tokens) == fits
            held = wanted if fits else held
        # A batch is padded to its longest member.
        assert budget.used_bytes == len(held) * max(held.values(), default=0) * per_token <= budget_bytes
    for name in list(held):
        budget.give_back(name)
    assert budget.used_bytes == 0


@pytest.mark.parametrize(("tokens", "fits"), [(100, True), (101, False)])
def test_a_request_alone_at_the_budget_and_one_past_it(tokens: int, fits: bool) -> None:
    budget = KvBudget.of(100 * 7, 7)
    assert budget.capacity_tokens == 100
    assert budget.take_memory("r", tokens) == fits
    if fits:
        budget.check_alone(tokens)
    else:
        with pytest.raises(OutOfMemory, match=r"101 tokens .*\(100 tokens\)"):
            budget.check_alone(tokens)


def test_a_running_state_is_promised_to_each_request_whatever_its_length() -> None:
    budget = KvBudget.of(1000, 7, fixed_bytes=300)
    assert budget.capacity_tokens == 100
    assert budget.take_memory("a", 20)
    assert budget.used_bytes == 440
    assert budget.take_memory("b", 20)
    assert budget.used_bytes == 880
    assert not budget.take_memory("c", 1)
    budget.give_back("a")
    assert budget.take_memory("b", 100)
    assert not budget.take_memory("b", 101)
    with pytest.raises(OutOfMemory, match=r"\(100 tokens\)"):
        budget.check_alone(101)


def test_weights_at_what_is_free_and_one_byte_past_it() -> None:
    admit_weights("m", 1000, MemoryBudget(usable_bytes=1000 + WORKING_BYTES))
    with pytest.raises(OutOfMemory, match="m needs") as caught:
        admit_weights("m", 1001, MemoryBudget(usable_bytes=1000 + WORKING_BYTES))
    with pytest.raises(OutOfMemory, match="critically short of memory"):
        admit_weights("m", 1, MemoryBudget(pressure="critical"))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 MB"), (300_000_000, "300 MB"), (10**9, "1.0 GB"), (1_500_000_000, "1.5 GB")]
)
def test_sizes_for_people(n: int, text: str) -> None:
    assert human(n) == text


def test_what_is_lent_counts_as_it_is_and_comes_back() -> None:
    budget = KvBudget.of(1000, 1)
    assert budget.take_memory("answer", 300)
    budget.lend("assist", 500)
    # Not times two, as a second answer in the batch would be.
    assert budget.used_bytes == 800
    with pytest.raises(OutOfMemory, match="need"):
        budget.lend("another", 201)
    assert not budget.take_memory("answer", 501)
    assert budget.take_memory("answer", 500)
    budget.give_back("assist")
    assert budget.used_bytes == 500
    budget.lend("another", 500)


def test_what_a_request_has_besides_counts_as_it_is_until_it_is_given_back() -> None:
    budget = KvBudget.of(1000, 1)
    assert budget.capacity_beside(400) == 600
    budget.check_alone(600, 400)
    with pytest.raises(OutOfMemory, match=r"601 tokens .*, and its images 0 MB; .*\(1000 tokens\)"):
        budget.check_alone(601, 400)
    assert not budget.take_memory("a", 601, 400)
    assert budget.take_memory("a", 300, 400)
    assert budget.used_bytes == 700
    # Not times two, as its tokens are in a batch.
    assert not budget.take_memory("b", 301)
    assert not budget.take_memory("b", 1, 400)
    assert budget.take_memory("a", 300, 100)
    assert budget.take_memory("b", 300, 300)
    assert budget.used_bytes == 1000
    budget.validate(["a", "b"], [])
    budget.give_back("a")
    assert budget.used_bytes == 600
    assert budget.take_memory("b", 1000)


@pytest.mark.parametrize("asked", [0, MIB, 64 * GIB])
def test_a_prefix_cache_is_bounded_by_what_is_left_and_leaves_room_for_new_prompts(asked: int) -> None:
    """4 GiB may be taken, of which the weights take one."""
    settings = WorkerSettings(name="m", path="/m", prefix_cache_bytes=asked)
    shares = MemoryShares.of(GIB, StateSizes(1), MemoryBudget(usable_bytes=4 * GIB), settings)
    left = 3 * GIB - WORKING_BYTES
    assert shares.prefix == {0: left // 4, MIB: MIB, 64 * GIB: left - left // 4}[asked]
    assert shares.prefix + shares.sequences == left
    none = MemoryShares.of(GIB, StateSizes(1), MemoryBudget(usable_bytes=GIB), settings)
    assert (none.prefix, none.sequences) == (0, 0)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("streams", [1, 16])
def test_states_of_a_part_of_a_group_have_room_whatever_the_other_machines_have(
    rows: int, streams: int
) -> None:
    """The first machine's layers may keep nothing but running states; the others bound rows alone."""
    members = (GroupMember(2, 4, "s"),)
    settings = WorkerSettings(name="m", path="/m", max_streams=streams, group=members, group_tokens=8192)
    sizes = StateSizes(rows, state_bytes=MIB)
    shares = MemoryShares.of(GIB, sizes, MemoryBudget(usable_bytes=4 * GIB), settings)
    assert sizes.fitting(shares.sequences - (streams - 1) * MIB) >= rows * 0.7 * 8192
    assert shares.sequences >= streams * MIB
    assert shares.sequences + shares.prefix == 2 * streams * MIB + rows * 8192
    assert sizes.fitting(MIB - 1) == 0


def test_room_is_set_aside_for_the_numbers_of_one_layer() -> None:
    """Rows of 80 bytes a token, of which one layer's are 20 more while they are unpacked."""
    settings = WorkerSettings(name="m", path="/m")
    room, sizes = MemoryBudget(usable_bytes=4 * GIB), StateSizes(80)
    plain = MemoryShares.of(GIB, sizes, room, settings)
    packed = MemoryShares.of(GIB, sizes, room, settings, unpacking_bytes=20)
    assert packed.prefix == plain.prefix
    tokens = sizes.fitting(packed.sequences)
    assert plain.sequences - 200 < tokens * (80 + 20) <= plain.sequences


def test_requests_are_bounded_by_the_rows_that_other_machines_have_whatever_they_take_here() -> None:
    budget = KvBudget(1 << 40, StateSizes(0, window_bytes=1, window=4), rows=RowBound(100, spare=10))
    assert budget.capacity_tokens == 90
    budget.check_alone(90)
    with pytest.raises(OutOfMemory, match=r"91 tokens are too long: .* room for 90"):
        budget.check_alone(91)
    assert budget.take_memory("a", 20)
    # A batch is as long as its longest sequence.
    assert not budget.take_memory("b", 41)
    assert budget.take_memory("b", 40)
    assert not budget.take_memory("a", 41)
    assert not budget.take_memory("c", 1)
    budget.give_back("b")
    assert budget.take_memory("a", 90)


def test_new_requests_wait_for_what_other_workers_hold_and_none_waits_alone() -> None:
    told: list[int] = []
    budget = KvBudget(100, StateSizes(1), told.append)
    budget.taken_elsewhere_bytes = 60
    assert budget.take_memory("a", 30)
    assert not budget.take_memory("b", 11)
    # It runs already: its answer is not cut off.
    assert budget.take_memory("a", 100)
    with pytest.raises(OutOfMemory, match="0 MB of 0 MB are free"):
        budget.lend("guest", 1)
    budget.give_back("a")
    assert budget.take_memory("b", 90), "nothing else runs: it would wait for ever"
    budget.give_back("b")
    budget.lend("guest", 40)
    assert not budget.take_memory("c", 1)
    budget.taken_elsewhere_bytes = 0
    assert budget.take_memory("c", 60)
    assert told == [30, 100, 0, 90, 0, 40, 100]
