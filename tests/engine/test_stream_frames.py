"""Heads of frames between workers: every field survives, and what is no head is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.engine.streams.frames import HEAD_BYTES, FrameHeader, Kind
from fleetd.errors import ProtocolError

u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
heads = st.builds(
    FrameHeader, st.sampled_from(Kind), u16, u32, u32, sizes, u32, st.binary(min_size=8, max_size=8)
)


@given(heads)
def test_a_head_is_read_as_it_was_written(head: FrameHeader) -> None:
    data = head.pack()
    assert len(data) == HEAD_BYTES
    assert FrameHeader.unpack(data) == head
    assert FrameHeader.unpack(memoryview(bytearray(data))) == head


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_any_bytes_are_a_head_or_a_protocol_error(data: bytes) -> None:
    try:
        head = FrameHeader.unpack(data)
    except ProtocolError:
        return
    assert head.pack() == data


@pytest.mark.parametrize("kind", [0, max(Kind) + 1, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        FrameHeader.unpack(bytes([kind]) + bytes(HEAD_BYTES - 1))


@pytest.mark.parametrize("size", [(1 << 40) + 1, 2**64 - 1])
def test_an_absurd_size_is_refused_before_anything_is_allocated(size: int) -> None:
    with pytest.raises(ProtocolError, match="absurd size"):
        FrameHeader.unpack(FrameHeader(Kind.ROWS, sizes=(0, size)).pack())


def test_a_frame_ends_where_its_tokens_do() -> None:
    head = FrameHeader(Kind.ROWS, layer=3, start=256, count=100, sizes=(10, 20))
    assert head.end == 356
    assert head.nbytes == 30
