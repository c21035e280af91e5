from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetd.compression.budget import budget
from fleetd.compression.filling import KeptPieces, Piece, fill
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.unit_list import TextUnit


@pytest.mark.parametrize(
    ("policy", "at_least", "tokens"),
    [
        (SmartPrefillPolicy(target_ratio=0.2), 0.0, 200),
        (SmartPrefillPolicy(target_ratio=0.2), 0.5, 500),
        (SmartPrefillPolicy(target_ratio=0.2, min_keep_tokens=300), 0.0, 300),
        (SmartPrefillPolicy(target_ratio=0.2, max_keep_tokens=50), 0.5, 50),
        (SmartPrefillPolicy(target_ratio=0.2, min_keep_tokens=5000), 0.0, 1000),
    ],
)
def test_the_client_says_how_much(policy: SmartPrefillPolicy, at_least: float, tokens: int) -> None:
    assert budget(policy, 1000, 50, [10] * 95, [0.1] * 95, at_least) == tokens


def test_without_a_target_as_much_as_stands_out() -> None:
    # Three of 95 units hold nearly all that is over the others; but never less than a twentieth.
    sharp = [0.01] * 92 + [0.9] * 3
    assert budget(SmartPrefillPolicy(), 1000, 50, [10] * 95, sharp) == 80
    assert budget(SmartPrefillPolicy(), 1000, 0, [10] * 95, [0.01] * 94 + [0.9]) == 50
    # Nothing stands out, so all might matter; but never more than half.
    assert budget(SmartPrefillPolicy(), 1000, 50, [10] * 95, [0.1] * 95) == 500
    assert budget(SmartPrefillPolicy(), 1000, 50, [10] * 95, None) == 250


# ---- Filling -------------------------------------------------------------------------------------------


def pieces(*blocks: int, size: int = 20, frames: dict[int, tuple[int, ...]] | None = None) -> list[Piece]:
    found: list[Piece] = []
    frames = frames or {}
    framing = {f for around in frames.values() for f in around}
    for block, count in enumerate(blocks):
        for _ in range(count):
            i = len(found)
            unit = TextUnit(i, i + 1, is_frame=i in framing)
            found.append(Piece(i, block, unit, (i, i + 1), size, frames.get(i, ())))
    return found


def test_a_piece_that_stands_alone_costs_its_gap() -> None:
    found = pieces(10)
    kept = KeptPieces(found, marker=9)
    # One gap at first: a piece at the edge leaves one, one in the middle makes two.
    assert kept.length == 9
    kept.add(found[0])
    assert kept.length == 20 + 9
    kept.add(found[5])
    assert kept.length == 40 + 18
    kept.add(found[6])
    assert kept.length == 60 + 18
    for piece in found:
        kept.add(piece)
    assert kept.length == 200
    assert kept.tokens == 200


def test_frames_come_with_their_piece_and_are_paid_once() -> None:
    found = pieces(6, frames={2: (0, 5), 3: (0, 5)})
    kept = KeptPieces(found, marker=0)
    kept.add(found[2])
    assert [piece.index for piece in kept.pieces] == [0, 2, 5]
    kept.add(found[3])
    assert kept.tokens == 80


@given(st.permutations(range(24)), st.integers(0, 600), st.sampled_from([0, 9]))
def test_no_more_than_the_room_but_for_the_best(order: list[int], room: int, marker: int) -> None:
    found = pieces(8, 8, 8, frames={3: (1,), 12: (8, 15)})
    kept = KeptPieces(found, marker)
    fill(kept, [found[i] for i in order], room)
    best = {order[0], *found[order[0]].frames}
    assert best <= kept.indexes
    assert kept.tokens <= max(room, 20 * len(best))
    for index in kept.indexes:
        assert set(found[index].frames) <= kept.indexes


@given(st.permutations(range(24)), st.integers(0, 600), st.integers(0, 600))
def test_a_larger_room_keeps_what_a_smaller_one_keeps(order: list[int], room: int, larger: int) -> None:
    """If pieces are equally long and gaps cost nothing: else what fits now may take the place of others."""
    found = pieces(8, 8, 8)
    kept = []
    for tokens in sorted((room, larger)):
        kept.append(KeptPieces(found, marker=0))
        fill(kept[-1], [found[i] for i in order], tokens)
    assert kept[0].indexes <= kept[1].indexes


@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=24),
    st.integers(0, 900),
    st.integers(0, 900),
    st.sampled_from([0, 9]),
)
def test_a_larger_room_leaves_out_only_what_gave_way_to_something_better(
    sizes: list[int], room: int, larger: int, marker: int
) -> None:
    """A long piece that fits only into the larger room takes the place of short ones behind it."""
    found = [
        replace(piece, tokens=size) for piece, size in zip(pieces(*[1] * len(sizes)), sizes, strict=True)
    ]
    kept = []
    for tokens in sorted((room, larger)):
        kept.append(KeptPieces(found, marker))
        fill(kept[-1], found, tokens)
    differ = sorted(i for i in kept[0].indexes ^ kept[1].indexes if sizes[i] > marker or i in kept[1].indexes)
    assert not differ or differ[0] in kept[1].indexes


def test_a_line_as_long_as_a_text_does_not_use_up_a_small_budget() -> None:
    found = pieces(8)
    found[2] = replace(found[2], tokens=4000)
    kept = KeptPieces(found, marker=9)
    fill(kept, [found[2], found[0]], 100)
    assert 0 in kept.indexes
    assert 2 not in kept.indexes


def test_a_bound_is_kept_where_even_the_best_has_no_room() -> None:
    kept = KeptPieces(found := pieces(8), marker=9)
    fill(kept, found, 15, strict=True)
    assert not kept.indexes


def test_at_least_as_many_as_are_asked_for() -> None:
    kept = KeptPieces(found := pieces(8), marker=9)
    fill(kept, found[::-1], 30, least=70)
    assert kept.tokens == 80
