"""Event streams, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.connection.event_stream import Comment, Data, Decoder, EventTooLong
from fleetd import limits

STREAM = ': keepalive 1/2\n\ndata: {"a": "żółć 🦊"}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata:tight\n\n'
WHOLE = [Comment("keepalive 1/2"), Data('{"a": "żółć 🦊"}'), Data("one\ntwo"), Data("tight")]


@given(st.lists(st.integers(0, len(STREAM.encode()))))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    raw, decoder = STREAM.encode(), Decoder()
    edges = [0, *sorted(cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == WHOLE


def test_an_unfinished_event_is_not_delivered() -> None:
    assert list(Decoder().feed(b'data: {"half": ')) == []
    assert list(Decoder().feed(b"data: whole line, no blank one\n")) == []


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_BODY_BYTES", 100)
    decoder = Decoder()
    assert list(decoder.feed(b"x" * 100)) == []
    with pytest.raises(EventTooLong):
        list(decoder.feed(b"x"))
