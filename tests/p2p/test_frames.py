"""Frames: any split of the stream gives the same ones, version 1 stays what it is, and garbage is named."""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wired import frames, pieces

from fleetd import limits
from fleetd.errors import ProtocolError
from fleetd.p2p.session.frames import (
    Bye,
    CancelFrame,
    DataFrame,
    End,
    Frame,
    FrameBuffer,
    Hello,
    NotifyFrame,
    Open,
    Ping,
    Pong,
    WindowFrame,
    encode,
)
from fleetd.p2p.session.stream_table import wire_text

ID = "a" * 56
EXAMPLES: list[Frame] = [
    Hello((1, 3), ID, "mäc", 1 << 40, "fleetd 0.1", bytes(range(16)), 65535, ["copy"]),
    Ping(0),
    Pong((1 << 63) - 1),
    Open(1, "jobs.run", b"\x00\xff", True),
    DataFrame((1 << 63) - 1, b"body", True),
    End(2),
    CancelFrame(3, "overloaded", "Too much.", "Wait.", "model"),
    WindowFrame(4, 131072),
    NotifyFrame("card", b"\x93"),
    Bye("goodbye", "Until later."),
]


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def packed(*items: Any) -> bytes:
    return framed(msgspec.msgpack.encode(items))


def test_every_frame_has_an_example_here() -> None:
    assert {type(frame) for frame in EXAMPLES} == set(typing.get_args(Frame))


@pytest.mark.parametrize("frame", EXAMPLES)
def test_frames_arrive_as_sent(frame: Frame) -> None:
    assert frames(encode(frame)) == [frame]


def test_the_bytes_of_version_1() -> None:
    """Machines that are not updated rely on each of these."""
    assert encode(Ping(7)) == bytes.fromhex("00000003 920207")
    assert encode(Pong(7)) == bytes.fromhex("0000000c 930307 cb0000000000000000")
    assert frames(bytes.fromhex("00000003 920307")) == [Pong(7)], "as machines send it that tell no time"
    assert encode(Open(1, "m", b"b")) == bytes.fromhex("00000009 9504 01 a16d c40162 c2")
    assert encode(DataFrame(1, b"b", True)) == bytes.fromhex("00000007 9405 01 c40162 c3")
    assert encode(End(1)) == bytes.fromhex("00000003 920601")
    assert encode(CancelFrame(1, "c", "m", "h")) == bytes.fromhex("0000000a 9607 01 a163 a16d a168 c0")
    assert encode(WindowFrame(1, 2)) == bytes.fromhex("00000004 93080102")
    assert encode(NotifyFrame("t", b"b")) == bytes.fromhex("00000007 9309 a174 c40162")
    assert encode(Bye("c", "m")) == bytes.fromhex("00000006 930a a163 a16d")
    said = Hello((1, 2), ID, "n", 3, "s", b"r" * 16, 4, [])
    assert encode(said) == framed(
        b"\x99\x01\x92\x01\x02\xd9\x38" + ID.encode() + b"\xa1n\x03\xa1s\xc4\x10" + b"r" * 16 + b"\x04\x90"
    )


def test_a_newer_neighbours_extra_fields_are_skipped_and_an_older_ones_defaults_filled_in() -> None:
    assert frames(packed(2, 7, "new", {"a": 1})) == [Ping(7)]
    newer = (1, [1, 2], ID, "n", 3, "s", b"r" * 16, 4, ["f"], "new", 5)
    assert frames(packed(*newer)) == [Hello((1, 2), ID, "n", 3, "s", b"r" * 16, 4, ["f"])]
    assert frames(packed(*newer[:8])) == [Hello((1, 2), ID, "n", 3, "s", b"r" * 16, 4)]
    assert frames(packed(4, 1, "m")) == [Open(1, "m")]
    assert frames(packed(4, 1, "m", b"b", False, True)) == [Open(1, "m", b"b")]
    assert frames(packed(7, 1, "c")) == [CancelFrame(1, "c")]


@given(st.lists(st.sampled_from(EXAMPLES), max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_any_split_of_the_stream_gives_the_same_frames(said: list[Frame], cuts: list[int]) -> None:
    buffer = FrameBuffer()
    stream = b"".join(map(encode, said))
    assert [frame for piece in pieces(stream, cuts) for frame in buffer.feed(piece)] == said
    assert len(buffer) == 0


def test_one_byte_at_a_time() -> None:
    buffer = FrameBuffer()
    stream = b"".join(map(encode, EXAMPLES))
    assert [frame for at in range(len(stream)) for frame in buffer.feed(stream[at : at + 1])] == EXAMPLES


def test_a_reader_that_stops_in_the_middle_finds_the_rest_later() -> None:
    buffer = FrameBuffer()
    reading = buffer.feed(encode(Ping(1)) + encode(Ping(2)) + encode(Ping(3)))
    assert next(reading) == Ping(1)
    reading.close()  # type: ignore[attr-defined]
    assert list(buffer.feed(b"")) == [Ping(2), Ping(3)]


# ---- Bounds ----------------------------------------------------------------------------------------------


def test_oversized_length_is_refused_before_anything_is_buffered() -> None:
    for length in (limits.FRAME_BYTES + 1, 0xFFFFFFFF, 0x16030100):
        with pytest.raises(ProtocolError, match=str(length)):
            list(FrameBuffer().feed(struct.pack(">I", length)))


def test_a_frame_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    overhead = len(encode(DataFrame(1, b"x" * limits.NOTIFY_BYTES))) - 4 - limits.NOTIFY_BYTES
    for size in (limits.FRAME_BYTES - 1, limits.FRAME_BYTES):
        frame = DataFrame(1, b"x" * (size - overhead))
        assert len(encode(frame)) == 4 + size
        assert frames(encode(frame)) == [frame]
    with pytest.raises(ProtocolError):
        frames(encode(DataFrame(1, b"x" * (limits.FRAME_BYTES + 1 - overhead))))


def test_an_unfinished_frame_is_all_that_is_kept() -> None:
    buffer = FrameBuffer()
    whole = encode(NotifyFrame("t", b"x" * limits.NOTIFY_BYTES))
    assert len(list(buffer.feed(whole * 20 + whole[:-1]))) == 20
    assert len(buffer) == len(whole) - 1


def test_whatever_this_side_sends_fits_into_a_frame() -> None:
    """In the worst case: four bytes per character, and numbers that take nine."""
    stream = (1 << 63) - 1
    name, text = "\U0001f600" * limits.METHOD_CHARS, wire_text("\U0001f600" * (limits.ERROR_TEXT_CHARS + 1))
    for frame in (
        NotifyFrame(name, b"x" * limits.NOTIFY_BYTES),
        Open(stream, name, b"x" * limits.OPEN_BODY_BYTES, True),
        DataFrame(stream, b"x" * limits.FRAGMENT_BYTES, True),
        CancelFrame(stream, "context_length_exceeded", text, text, text),
        Bye("context_length_exceeded", text),
    ):
        assert frames(encode(frame)) == [frame]


BOUNDED: list[tuple[Callable[[int], Frame], int]] = [
    (lambda n: Hello((1, 1), ID, "x" * n, 1, "s", b"r" * 16, 1), limits.PEER_NAME_CHARS),
    (lambda n: Open(1, "x" * n), limits.METHOD_CHARS),
    (lambda n: NotifyFrame("x" * n), limits.METHOD_CHARS),
    (lambda n: Open(1, "m", b"x" * n), limits.OPEN_BODY_BYTES),
    (lambda n: NotifyFrame("t", b"x" * n), limits.NOTIFY_BYTES),
]


@pytest.mark.parametrize(("make", "limit"), BOUNDED)
def test_fields_at_their_limit_pass_and_one_more_does_not(make: Callable[[int], Frame], limit: int) -> None:
    for size in (limit - 1, limit):
        assert frames(encode(make(size))) == [make(size)]
    with pytest.raises(ProtocolError):
        frames(encode(make(limit + 1)))


# ---- Garbage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"type": 2, "nonce": 1}),
        msgspec.msgpack.encode(["2", 1]),
        msgspec.msgpack.encode([0, 1]),
        msgspec.msgpack.encode([11, 1]),
        msgspec.msgpack.encode([2]),
        msgspec.msgpack.encode([2, -1]),
        msgspec.msgpack.encode([2, 1 << 63]),
        msgspec.msgpack.encode([2, 1.0]),
        msgspec.msgpack.encode([2, True]),
        msgspec.msgpack.encode([6, 0]),
        msgspec.msgpack.encode([5, 1, "text"]),
        msgspec.msgpack.encode([5, 1, b"x", 1]),
        msgspec.msgpack.encode([1, [1], ID, "n", 1, "s", b"r" * 16, 1]),
        msgspec.msgpack.encode([1, [0, 1], ID, "n", 1, "s", b"r" * 16, 1]),
        msgspec.msgpack.encode([1, [1, 1], ID[1:], "n", 1, "s", b"r" * 16, 1]),
        msgspec.msgpack.encode([1, [1, 1], ID + "a", "n", 1, "s", b"r" * 16, 1]),
        msgspec.msgpack.encode([1, [1, 1], ID, "n", 1, "s", b"r" * 15, 1]),
        msgspec.msgpack.encode([1, [1, 1], ID, "n", 1, "s", b"r" * 17, 1]),
        msgspec.msgpack.encode([1, [1, 1], ID, "n", 1, "s", b"r" * 16, 65536]),
        msgspec.msgpack.encode([2, 1]) + b"\x00",
        b"\x92\x02",
        b"\x93\x09\xa3\xff\xfe\xfd\xc4\x00",
        b"\x93\x09\xa3\xed\xa0\x80\xc4\x00",
        b"\x93\x02\x01" + b"\x91" * 60000 + b"\x90",
        b"\xdd\xff\xff\xff\xff\x02",
        b"\x93\x05\x01\xc6\xff\xff\xff\xff",
    ],
)
def test_what_is_no_frame_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{len(payload)} bytes"):
        frames(framed(payload))


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_anything_but_wait_or_raise(data: bytes, whole: bool) -> None:
    try:
        got = frames(framed(data) if whole else data)
    except ProtocolError:
        return
    assert {type(frame) for frame in got} <= set(typing.get_args(Frame))
