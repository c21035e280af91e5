"""A conversation goes back to the machine that has read it, and no further than it really did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.plan.affinity import BLOCK_CHARS, Affinity, SessionPlaces, chain

KEY = bytes(16)
TURN = "x" * (3 * BLOCK_CHARS)


def test_the_next_turn_is_known_where_the_last_one_ran() -> None:
    seen = Affinity(KEY)
    seen.computed("a", "m", chain(TURN, KEY))
    longer = chain(TURN + "y" * BLOCK_CHARS, KEY)
    assert seen.cached_chars("a", "m", longer) == 3 * BLOCK_CHARS
    assert seen.cached_chars("b", "m", longer) == 0
    assert seen.cached_chars("a", "other", longer) == 0


@given(st.text(max_size=4 * BLOCK_CHARS), st.text(max_size=4 * BLOCK_CHARS))
def test_no_more_counts_than_the_two_have_in_common(first: str, second: str) -> None:
    seen = Affinity(KEY)
    seen.computed("a", "m", chain(first, KEY))
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    found = seen.cached_chars("a", "m", chain(second, KEY))
    assert found == common // BLOCK_CHARS * BLOCK_CHARS


def test_a_block_counts_only_behind_the_same_beginning() -> None:
    same_end = "z" * BLOCK_CHARS
    seen = Affinity(KEY)
    seen.computed("a", "m", chain("1" * BLOCK_CHARS + same_end, KEY))
    assert seen.cached_chars("a", "m", chain("2" * BLOCK_CHARS + same_end, KEY)) == 0


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    seen = Affinity(KEY)
    old = chain(TURN, KEY)
    seen.computed("a", "m", old)
    for number in range(limits.AFFINITY_BLOCKS // 64 + 1):
        seen.computed("a", "m", [number.to_bytes(8, "big") + bytes([i]) for i in range(64)])
    assert seen.cached_chars("a", "m", old) == 0


def text(name: str, blocks: int) -> list[bytes]:
    return chain(name * (blocks * BLOCK_CHARS), KEY)


def test_a_text_that_finds_no_room_beside_newer_ones_is_forgotten_whole() -> None:
    seen = Affinity(KEY)
    for name in "pqr":
        seen.computed("a", "m", text(name, 4), room_chars=9 * BLOCK_CHARS)
    assert seen.cached_chars("a", "m", text("p", 4)) == 0
    assert seen.cached_chars("a", "m", text("q", 4)) == seen.cached_chars("a", "m", text("r", 4))
    assert seen.cached_chars("a", "m", text("q", 4)) == 4 * BLOCK_CHARS


def test_a_turn_takes_the_room_of_the_one_before_and_one_that_was_read_again_stays() -> None:
    seen = Affinity(KEY)
    for blocks in (3, 4, 5):
        seen.computed("a", "m", text("p", blocks), room_chars=9 * BLOCK_CHARS)
    seen.computed("a", "m", text("q", 4), room_chars=9 * BLOCK_CHARS)
    seen.computed("a", "m", text("p", 2), room_chars=9 * BLOCK_CHARS)
    seen.computed("a", "m", text("r", 4), room_chars=9 * BLOCK_CHARS)
    assert seen.cached_chars("a", "m", text("q", 4)) == 0
    assert seen.cached_chars("a", "m", text("p", 9)) == 5 * BLOCK_CHARS


def test_what_two_texts_have_in_common_takes_room_in_both() -> None:
    seen = Affinity(KEY)
    one, other = (chain("s" * 3 * BLOCK_CHARS + name * 2 * BLOCK_CHARS, KEY) for name in "pq")
    for links in (one, other):
        seen.computed("a", "m", links, room_chars=9 * BLOCK_CHARS)
    assert seen.cached_chars("a", "m", one) == 3 * BLOCK_CHARS  # the other one has them
    seen.computed("a", "m", one, room_chars=10 * BLOCK_CHARS)
    seen.computed("a", "m", other, room_chars=10 * BLOCK_CHARS)
    assert seen.cached_chars("a", "m", one) == 5 * BLOCK_CHARS


def test_a_text_that_is_larger_than_the_cache_pushes_nothing_out() -> None:
    seen = Affinity(KEY)
    seen.computed("a", "m", text("p", 4), room_chars=9 * BLOCK_CHARS)
    seen.computed("a", "m", text("q", 10), room_chars=9 * BLOCK_CHARS)
    assert seen.cached_chars("a", "m", text("p", 4)) == 4 * BLOCK_CHARS
    assert seen.cached_chars("a", "m", text("q", 10)) == 0


def test_what_was_lost_with_an_engine_takes_no_room() -> None:
    seen = Affinity(KEY)
    seen.computed("a", "m", text("p", 4), room_chars=5 * BLOCK_CHARS)
    seen.forget("a", "m")
    assert seen.cached_chars("a", "m", text("p", 4)) == 0
    seen.computed("a", "m", text("q", 4), room_chars=5 * BLOCK_CHARS)
    assert seen.cached_chars("a", "m", text("q", 4)) == 4 * BLOCK_CHARS


def test_hashes_of_two_processes_say_nothing_about_each_other() -> None:
    assert chain(TURN, KEY)[0] != chain(TURN, b"k" * 16)[0]


def test_of_machines_the_one_that_computed_last_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AFFINITY_BLOCKS", 8)
    seen = Affinity(KEY)
    seen.computed("a", "m", text("p", 3))
    seen.computed("b", "m", text("q", 3))
    seen.computed("a", "m", text("r", 1))
    seen.computed("c", "m", text("s", 3))
    assert seen.cached_chars("a", "m", text("p", 3)) == 3 * BLOCK_CHARS
    assert seen.cached_chars("b", "m", text("q", 3)) == 0


def test_a_machine_is_forgotten_with_its_last_text_and_the_next_one_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "AFFINITY_BLOCKS", 100)
    seen = Affinity(KEY)
    for machine, name, blocks in (("a", "p", 10), ("a", "q", 10), ("b", "r", 85)):
        seen.computed(machine, "m", text(name, blocks))
    assert seen.cached_chars("a", "m", text("p", 10)) == 0
    assert seen.cached_chars("a", "m", text("q", 10)) == 10 * BLOCK_CHARS
    seen.computed("c", "m", text("s", 20))
    left = [seen.cached_chars(*each) for each in (("a", "m", text("q", 10)), ("b", "m", text("r", 85)))]
    assert left == [0, 0]
    assert seen.cached_chars("c", "m", text("s", 20)) == 20 * BLOCK_CHARS


def test_a_turn_pushes_nothing_out_where_there_is_room_without_the_one_before() -> None:
    seen = Affinity(KEY)
    room, turn = 9 * BLOCK_CHARS, "p" * (4 * BLOCK_CHARS)
    seen.computed("a", "m", text("x", 1), room)
    seen.computed("a", "m", chain(turn, KEY), room)
    seen.computed("a", "m", chain(turn + "q" * (4 * BLOCK_CHARS), KEY), room)
    assert seen.cached_chars("a", "m", text("x", 1)) == BLOCK_CHARS


def test_the_session_that_ran_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS", 2)
    places = SessionPlaces(KEY)
    for session in ("one", "two", "one", "three"):
        places.ran(session, "m", f"the machine of {session}")
    assert [places.last(session, "m") for session in ("one", "two", "three")] == [
        "the machine of one",
        "",
        "the machine of three",
    ]
