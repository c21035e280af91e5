"""Whether a prompt's keys and values are fetched, and from where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.limits import FETCH_FIXED_S, FETCH_LEAST_GAIN, MIB
from fleetd.plan.beginnings import KeptBeginning, from_peer, meeting_s
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.fetch_speeds import FetchSpeed
from fleetd.requests.kv_fetching.choice import FetchChoice, FetchSource, choose_fetch, within_s
from fleetd.requests.members.members import Members

BLOCK = 10 * MIB
# Ten blocks of which each takes a second.
COMPUTED_S = [float(i + 1) for i in range(10)]
GIGABIT = LinkSpeed(115 * MIB, 0.001)
FETCH = FetchSpeed(0.0, 1e6)


def source(
    name: str = "a", blocks: int = 10, link: LinkSpeed = GIGABIT, disk: float = 1e9, state_bytes: int = 0
) -> FetchSource:
    return FetchSource(name, name, FetchSpeed.by_figures(link, disk), blocks, state_bytes)


def test_what_comes_sooner_than_it_is_computed_is_fetched() -> None:
    found = choose_fetch([source(state_bytes=1)], COMPUTED_S, BLOCK)
    assert found is not None
    assert (found.source, found.last_first) == (source(state_bytes=1), False)
    assert found.seconds == pytest.approx(FETCH_FIXED_S + 0.004 + 10 * BLOCK / (115 * MIB))


def test_the_machine_that_saves_most_is_asked() -> None:
    slow = LinkSpeed(2 * MIB, 0.03)
    found = choose_fetch([source("few", 3), source("most", 9), source("slow", 10, slow)], COMPUTED_S, BLOCK)
    assert found is not None
    assert found.source.name == "most"


def test_over_a_slow_link_the_prompt_is_computed_towards_what_comes() -> None:
    # A block takes two seconds on the link and one to compute: seven are computed while three come.
    found = choose_fetch([source(link=LinkSpeed(BLOCK / 2, 0.0))], COMPUTED_S, BLOCK)
    assert found is not None
    assert (found.seconds, found.last_first) == (7.0, True)
    # A state has no half.
    assert choose_fetch([source(link=LinkSpeed(BLOCK / 2, 0.0), state_bytes=1)], COMPUTED_S, BLOCK) is None


def test_computing_towards_what_comes_must_save_a_quarter_of_the_wait() -> None:
    def last_first(block_s: float) -> bool:
        found = choose_fetch([source(link=LinkSpeed(BLOCK / block_s, 0.0))], COMPUTED_S, BLOCK)
        assert found is not None
        return found.last_first

    # Two blocks computed while eight come save a fifth, three while seven come three tenths.
    assert not last_first(0.26)
    assert last_first(0.44)


def test_what_comes_at_once_comes_in_order() -> None:
    found = choose_fetch([source(link=LinkSpeed(1e10, 0.0), disk=1e10)], COMPUTED_S, BLOCK)
    assert found is not None
    assert not found.last_first


@given(st.integers(1, 300), st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(0, 10))
def test_two_ends_meet_where_the_later_of_them_is_soonest(
    pieces: int, computed_s: float, sent_s: float, fixed_s: float
) -> None:
    def computed(count: int) -> float:
        return count * computed_s

    def sent(count: int) -> float:
        return fixed_s + count * sent_s

    best = min(max(computed(i), sent(pieces - i)) for i in range(pieces + 1))
    assert meeting_s(pieces, computed, sent) == pytest.approx(best)


def test_a_place_for_a_prompt_is_priced_with_what_is_computed_meanwhile() -> None:
    kept, speed = KeptBeginning(0, 10_000, 10_000 * 1000, 1e9), PrefillSpeed(1e-3)
    waits, meets = (from_peer(kept, 0, None, FETCH, "a", speed, state_bytes) for state_bytes in (1, 0))
    assert waits is not None
    assert meets is not None
    # Ten seconds either way, so half of it each; a state is checked by 512 tokens that are computed.
    assert waits.seconds == pytest.approx(10.5, abs=0.1)
    assert meets.seconds == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize(
    "unfit",
    [
        source(blocks=0),
        source(blocks=11),
        source(link=LinkSpeed(0.0, 0.0)),
        source(link=LinkSpeed(9 * MIB, 0.0), state_bytes=1),
        source(disk=9 * MIB, state_bytes=1),
        source(disk=MIB / 2),
    ],
)
def test_what_saves_too_little_or_makes_no_sense_is_not_fetched(unfit: FetchSource) -> None:
    assert choose_fetch([unfit], COMPUTED_S, BLOCK) is None


@given(
    st.lists(
        st.builds(
            FetchSource,
            st.just("n"),
            st.just("n"),
            st.builds(FetchSpeed, st.floats(0, 10), st.floats(0, 1e10)),
            st.integers(0, 12),
            st.integers(0, 10**9),
        )
    ),
    st.lists(st.floats(0, 100), max_size=10).map(sorted),
    st.integers(1, 10**9),
)
def test_a_fetch_always_promises_its_gain(
    sources: list[FetchSource], computed_s: list[float], block_bytes: int
) -> None:
    found = choose_fetch(sources, computed_s, block_bytes)
    if found is not None:
        alone_s = computed_s[found.source.blocks - 1]
        assert found.seconds <= (1 - FETCH_LEAST_GAIN) * alone_s


def test_a_slow_machine_costs_more_before_a_prompt_is_placed_and_when_it_is_fetched() -> None:
    kept, speed = KeptBeginning(0, 10_000, 10_000_000, 1e9), PrefillSpeed(1e-2)
    fast, slow = FetchSpeed(0.0, 1e6), FetchSpeed(1.0, 5e5)
    once, twice = (from_peer(kept, 0, None, fetch, "a", speed, 1) for fetch in (fast, slow))
    assert once is not None
    assert twice is not None
    assert twice.seconds - once.seconds == pytest.approx(1.0 + 10.0)
    assert [FetchSource("a", "a", each, 4).seconds(10**6) for each in (fast, slow)] == [4.0, 9.0]


def test_what_came_is_checked_before_it_is_of_use_and_that_has_a_price() -> None:
    kept, speed = KeptBeginning(0, 10_000, 1000, 1e9), PrefillSpeed(1e-2)
    rows, states = (from_peer(kept, 0, None, FETCH, "a", speed, n) for n in (0, 1))
    assert rows is not None
    assert states is not None
    # 16 tokens, or both blocks between two snapshots.
    assert rows.seconds == pytest.approx(0.16, abs=0.01)
    assert states.seconds == pytest.approx(5.12, abs=0.01)


def test_a_fetch_may_take_a_few_times_as_long_as_planned_and_no_longer_than_computing() -> None:
    def most_s(planned_s: float, computed_s: float, spent_s: float = 0.0) -> float:
        return within_s(FetchChoice(FetchSource("a", "a", FETCH, 2), planned_s), [1.0, computed_s], spent_s)

    assert most_s(1.0, 100.0) == limits.FETCH_LATE
    assert most_s(10.0, 12.0, 1.0) == 11.0
    assert most_s(0.1, 0.2, 1.0) == limits.FETCH_BLOCK_S


def test_a_machine_that_is_silent_again_and_again_is_not_asked_for_a_while() -> None:
    now_s = 0.0
    members = Members(monotonic=lambda: now_s)
    members.unanswered("a", 0.0)
    assert not members.left_out("a", "fetch")
    members.answered("a")
    members.unanswered("a", 0.0)
    assert not members.left_out("a", "fetch")
    now_s = 1.0
    members.unanswered("a", 0.5)
    assert members.left_out("a", "fetch")
    assert not members.left_out("a", "answer"), "it may do everything else well"


def test_questions_of_one_moment_are_one_silence() -> None:
    now_s = 1.0
    members = Members(monotonic=lambda: now_s)
    for _ in range(5):
        members.unanswered("a", 0.9)
    assert not members.left_out("a", "fetch")
    now_s = 2.0
    for _ in range(5):
        members.unanswered("a", 1.9)
    assert members.left_out("a", "fetch")
    # Once it is asked again, questions from before do not count, and the first silence leaves it in.
    now_s = 2.1 + limits.BACKOFF_S
    members.unanswered("a", 1.9)
    members.unanswered("a", now_s)
    assert not members.left_out("a", "fetch")
