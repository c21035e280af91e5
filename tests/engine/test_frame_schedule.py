"""What is due on a stream: both ends have the same list, it moves every row once, and nothing else passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetd.engine.shared_prefill import frame_schedule, helper_work, home_work
from fleetd.engine.shared_prefill.frame_schedule import Incoming, Outgoing
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill import schedule
from fleetd.plan.prefill.split import Split, SplitKind

LAYERS = 6


@dataclass(frozen=True)
class Shape:
    """A window of -1 stands for a running state."""

    window: int

    @property
    def in_rows(self) -> bool:
        return not self.window

    @property
    def state_sizes(self) -> tuple[int, int] | None:
        return (40, 0) if self.window < 0 else None

    def sizes(self, rows: int) -> tuple[int, int]:
        return 12 * rows, 8 * rows


@dataclass(frozen=True)
class Sizes:
    windows: tuple[tuple[int, ...], ...] = ((0,),) * LAYERS

    def parts(self, layer: int) -> list[Shape]:
        return [Shape(window) for window in self.windows[layer]]

    def hidden_bytes(self, tokens: int) -> int:
        return 16 * tokens


ROTATING = Sizes(((0,), (32,)) * 3)
# Running states, an index beside the keys, and layers that keep nothing.
MIXED = Sizes(((-1,), (0, 0), (), (-1, 0), (0,), ()))
KINDS = [Sizes(), ROTATING, MIXED]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    cached, new, chunk = draw(st.integers(0, 50)), draw(st.integers(1, 90)), draw(st.integers(1, 40))
    within = st.sets(st.integers(cached + 1, cached + new - 1), max_size=4) if new > 1 else st.just(set())
    places = tuple(sorted(draw(within)))
    rest = {"places": places, "sent": draw(st.integers(0, len(places)))}
    if draw(st.booleans()):
        inner = sorted(draw(st.sets(st.integers(1, LAYERS), min_size=1, max_size=3)))
        return Split("layers", (0, *inner, LAYERS), LAYERS, cached, cached + new, chunk, **rest)
    ends = [*range(cached + chunk, cached + new, chunk), cached + new]
    inner = sorted(draw(st.sets(st.sampled_from(ends), min_size=1, max_size=3)))
    return Split("tokens", (cached, *inner, cached + new), LAYERS, cached, cached + new, chunk, **rest)


@given(splits())
def test_chunks_are_those_of_a_prefill_without_helpers(split: Split) -> None:
    """Of the same size, and ending at the same places."""
    alone, at = [], split.cached
    while at < split.tokens:
        end = min(at + split.chunk - (at - split.cached) % split.chunk, split.tokens)
        end = min([end, *(rank for rank in split.places if rank > at)])
        alone.append(range(at, end))
        at = end
    assert split.chunks(range(split.cached, split.tokens)) == alone
    for machine in range(split.machines):
        own = split.tokens_of(machine)
        assert split.chunks_of(machine) == [chunk for chunk in alone if chunk and chunk.start in own]


@given(splits(), st.sampled_from(KINDS))
def test_every_row_that_home_does_not_compute_arrives_once(split: Split, sizes: Sizes) -> None:
    came: Counter[tuple[int, int, int]] = Counter()
    snapshots: Counter[tuple[int, int, int, int]] = Counter()
    for rank in range(split.helpers):
        heads = list(frame_schedule.to_home(split, rank, sizes))
        assert [h.kind for h in heads].count(Kind.DONE) == 1
        assert heads[-1].kind is Kind.DONE
        for head in heads:
            if head.kind is Kind.ROWS:
                assert sizes.parts(head.layer)[head.part].in_rows
                came.update((head.layer, head.part, token) for token in range(head.start, head.end))
            elif head.kind is Kind.STATE and head.end in split.states_of(rank):
                snapshots[head.layer, head.part, rank, head.end] += 1
            elif head.kind is Kind.STATE:
                assert not sizes.parts(head.layer)[head.part].in_rows
                came[head.layer, head.part, head.end - 1] += 1
    for rank in range(split.helpers):
        for layer in split.layers_of(rank):
            tokens = split.tokens_of(rank)
            for part, shape in enumerate(sizes.parts(layer)):
                for token in tokens if shape.in_rows else [tokens[-1]]:
                    assert came.pop((layer, part, token)) == 1
                inner = set() if shape.in_rows else {at for at in split.sent_places if at in tokens[1:]}
                if shape.state_sizes is not None and len(split.chunks_of(rank)) > 1:
                    inner.add(split.chunks_of(rank)[-1].start)
                for at in inner:
                    assert snapshots.pop((layer, part, rank, at)) == 1
    assert not came
    assert not snapshots


@given(splits(), st.sampled_from(KINDS))
def test_every_machine_has_what_comes_before_its_part(split: Split, sizes: Sizes) -> None:
    for rank in range(split.helpers):
        first, *prefix = frame_schedule.to_helper(split, rank, sizes)
        assert (first.kind, first.start, first.end) == (Kind.TOKENS, 0, split.tokens)
        kept = [(layer, part) for layer in range(LAYERS) for part in range(len(sizes.parts(layer)))]
        own = [one for one in kept if one[0] in split.layers_of(rank)]
        assert [(h.layer, h.part) for h in prefix] == (own if split.cached else [])
        assert all((h.start, h.end) == (0, split.cached) for h in prefix)
        passed = list(frame_schedule.to_next(split, rank, sizes))
        if not split.has_next(rank):
            assert not passed
            continue
        if split.kind == "layers":
            covered = [token for h in passed for token in range(h.start, h.end)]
            assert covered == list(split.tokens_of(rank + 1))
            assert {h.layer for h in passed} == {split.layers_of(rank + 1).start}
        else:
            assert [(h.layer, h.part) for h in passed] == kept
            assert {h.end for h in passed} == {split.tokens_of(rank + 1).start}


@given(splits())
def test_every_frame_has_a_hash_of_its_tokens(split: Split) -> None:
    ids = np.arange(split.tokens, dtype="<i4")
    hashes = frame_schedule.prefixes(split, ids.tobytes())
    ids[0] += 1
    others = frame_schedule.prefixes(split, ids.tobytes())
    for rank in range(split.helpers):
        for heads in (frame_schedule.to_helper, frame_schedule.to_home, frame_schedule.to_next):
            for head in heads(split, rank, ROTATING):
                assert hashes[head.end] != others[head.end] or head.end == 0


def test_every_kind_of_split_has_frames_times_and_work() -> None:
    tables = (frame_schedule._FRAMES, schedule._PRICED, helper_work._WORK, home_work._WORK)
    assert all(set(table) == set(get_args(SplitKind)) for table in tables)


SPLIT = Split("layers", (0, 2, LAYERS), LAYERS, 0, 20, 10)


def incoming(sizes: Sizes = Sizes()) -> tuple[Incoming, list[FrameHeader], dict[int, bytes]]:
    hashes = frame_schedule.prefixes(SPLIT, bytes(80))
    out = Outgoing(frame_schedule.to_home(SPLIT, 0, sizes), hashes)
    heads = [out.next() for _ in frame_schedule.to_home(SPLIT, 0, sizes)]
    buffers = lambda head: [memoryview(bytearray(head.nbytes))]  # noqa: E731
    return Incoming("helper0", frame_schedule.to_home(SPLIT, 0, sizes), sizes, buffers), heads, hashes


def test_what_is_due_passes_in_its_order_and_nothing_after_it() -> None:
    stream, heads, hashes = incoming()
    assert not stream.began
    for left, head in zip(reversed(range(len(heads))), heads, strict=True):
        (buffer,) = stream.place(head)
        assert buffer.nbytes == head.nbytes
        stream.take_frame(Frame(head, [buffer]), hashes)
        assert stream.left == left
        assert stream.began
    with pytest.raises(ProtocolError, match="after the last"):
        stream.place(heads[-1])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": Kind.STATE},
        {"layer": 1},
        {"part": 1},
        {"start": 1},
        {"count": 9},
        {"sizes": (119, 80)},
        {"index": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_other_head_is_refused_by_the_name_of_its_field(change: dict[str, object]) -> None:
    stream, heads, _ = incoming()
    with pytest.raises(
        ProtocolError, match="size" if set(change) & {"sizes", "index"} else next(iter(change))
    ):
        stream.place(replace(heads[0], **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "index", "due_here"),
    [(1, 0, True), (20, 20, True), (276, 5, True), (277, 5, False), (0, 0, False), (20, 21, False)],
)
def test_the_size_of_a_state_has_bounds(rows: int, index: int, due_here: bool) -> None:
    stream, heads, hashes = incoming(ROTATING)
    for head in heads:
        if head.kind is Kind.STATE:
            break
        stream.take_frame(Frame(head, stream.place(head)), hashes)
    state = Outgoing.state(head, Shape(32).sizes(rows), index)
    if due_here:
        assert stream.place(state)[0].nbytes == 20 * rows
    else:
        with pytest.raises(ProtocolError, match="not a state"):
            stream.place(state)
