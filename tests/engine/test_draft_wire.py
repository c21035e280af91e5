"""Frames between an answer and its drafter: what is said arrives, and everything else is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.engine.speculation import draft_messages as wire
from fleetd.engine.streams.frames import HEAD_BYTES, Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import prefix_hashes

VOCAB = 1000
LONGEST = limits.DRAFT_TEXT_TOKENS
token = st.integers(0, VOCAB - 1)
texts = st.lists(token, min_size=1, max_size=200)
paths = st.lists(token, min_size=1, max_size=limits.DRAFT_BRANCH_TOKENS)


def received(head: FrameHeader, payload: Any, buffers: list[memoryview]) -> Frame:
    at = 0
    for buffer in buffers:
        buffer[:] = bytes(payload)[at : at + buffer.nbytes]
        at += buffer.nbytes
    assert at == len(bytes(payload))
    return Frame(head, buffers)


def trail(text: list[int]) -> wire.TextHash:
    found = wire.TextHash()
    found.extend(text)
    return found


@given(texts, texts)
def test_a_commit_arrives(base: list[int], tokens: list[int]) -> None:
    head, payload = wire.commit(trail(base), tokens)
    head = FrameHeader.unpack(head.pack())
    frame = received(head, payload, wire.place_commit(head))
    assert wire.tokens_of(frame, VOCAB) == tokens
    assert (head.start, head.end) == (len(base), len(base) + len(tokens))
    assert head.prefix == prefix_hashes(wire.packed(base), [len(base)])[len(base)]


@given(texts, st.lists(paths, min_size=1, max_size=limits.DRAFT_BRANCHES))
def test_a_draft_arrives(base: list[int], branches: list[list[int]]) -> None:
    known = trail(base)
    head, payload = wire.draft(known.length, known.hash, branches)
    head = FrameHeader.unpack(head.pack())
    assert wire.branches_of(received(head, payload, wire.place_draft(head)), VOCAB) == branches


@given(texts, st.lists(st.integers(1, 50), max_size=5))
def test_a_trail_does_not_depend_on_its_pieces(text: list[int], cuts: list[int]) -> None:
    pieces = wire.TextHash()
    at = 0
    for cut in cuts:
        pieces.extend(text[at : at + cut])
        at = min(len(text), at + cut)
    pieces.extend(text[at:])
    assert (pieces.length, pieces.hash) == (len(text), trail(text).hash)


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), st.binary(max_size=64))
def test_no_bytes_do_more_than_a_protocol_error(data: bytes, payload: bytes) -> None:
    for place in (wire.place_commit, wire.place_draft):
        try:
            head = FrameHeader.unpack(data)
            buffers = place(head)
        except ProtocolError:
            continue
        # Whatever passed is small, and its content is checked as well.
        assert head.nbytes <= max(LONGEST, limits.DRAFT_BRANCHES * (1 + limits.DRAFT_BRANCH_TOKENS)) * 4
        full = (payload * head.nbytes)[: head.nbytes].ljust(head.nbytes, b"\0")
        frame = received(head, full, buffers)
        for read in (wire.tokens_of, wire.branches_of):
            try:
                read(frame, VOCAB)
            except ProtocolError:
                pass


@given(st.data())
def test_a_changed_head_is_refused_or_harmless(data: st.DataObject) -> None:
    """Any field of an honest head changed to anything: the payload's size is always what is announced."""
    branches = data.draw(st.lists(paths, min_size=1, max_size=4))
    head, _ = wire.draft(9, b"8 bytes.", branches)
    number = st.integers(0, 2**16 - 1)
    changes: dict[str, Any] = {
        "kind": st.sampled_from(Kind),
        "layer": number,
        "count": number,
        "index": number,
        "sizes": st.tuples(number, number),
    }
    field = data.draw(st.sampled_from(sorted(changes)))
    changed = msgspec.structs.replace(head, **{field: data.draw(changes[field])})
    try:
        buffers = wire.place_draft(changed)
    except ProtocolError:
        return
    assert sum(buffer.nbytes for buffer in buffers) == changed.nbytes


@pytest.mark.parametrize(
    "lengths", [[0], [-1], [3], [1, 2], [limits.DRAFT_BRANCH_TOKENS + 1], [2**31 - 1], [2, 0]]
)
def test_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    """Two tokens came."""
    sizes = 4 * len(lengths), 8
    head = FrameHeader(Kind.DRAFT, start=3, count=len(lengths), sizes=sizes, prefix=b"8 bytes.")
    frame = received(head, wire.packed([*lengths, 1, 2]), wire.place_draft(head))
    with pytest.raises(ProtocolError):
        wire.branches_of(frame, VOCAB)


@pytest.mark.parametrize("length", [LONGEST + 1, 2**32 - 1])
def test_a_text_beyond_the_longest_is_refused_unread(length: int) -> None:
    head = FrameHeader(Kind.COMMIT, start=length - 1, count=1, sizes=(4, 0), prefix=b"8 bytes.")
    with pytest.raises(ProtocolError):
        wire.place_commit(head)
    fits = msgspec.structs.replace(head, start=LONGEST - 1)
    assert [b.nbytes for b in wire.place_commit(fits)] == [4]
