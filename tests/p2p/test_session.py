"""A control session: conversations, versions, and misuse by this side."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wired import (
    SessionWire,
    closed_with,
    credit_is_conserved,
    drain,
    feed,
    hello,
    opened,
    pieces,
    request,
    sent,
    wired,
)

from fleetd import limits
from fleetd.errors import (
    NotPaired,
    Overloaded,
    PeerLost,
    ProtocolError,
    VersionMismatch,
)
from fleetd.p2p.session.events import Ended, Measured, MessageReceived, Opened, Requested
from fleetd.p2p.session.frames import encode
from fleetd.p2p.session.session import Session

KIB = limits.KIB


# ---- Conversations --------------------------------------------------------------------------------------


def test_hellos_cross_and_both_sides_open() -> None:
    wire = SessionWire()
    assert wire.a.next_deadline() == limits.HELLO_S
    wire.settle(now=0.25)
    at_a, at_b = wire.take()
    assert at_a == [Opened(hello("b"), 1), Measured(0.0)]
    assert at_b == [Opened(hello("a"), 1), Measured(0.0)]
    assert (wire.a.peer, wire.b.peer) == (hello("b"), hello("a"))


def test_a_request_its_answers_and_the_end() -> None:
    wire = wired()
    number = wire.a.open("models.list", b"all")
    assert wire.settle().take() == ([], [Requested(number, "models.list", b"all")])
    wire.a.end(number)
    for body in (b"one", b"", b"x" * 200_000):
        wire.b.send(number, body)
    wire.b.end(number)
    wire.settle()
    at_a, at_b = wire.take()
    assert at_b == [Ended(number)]
    assert at_a == [MessageReceived(number, body) for body in (b"one", b"", b"x" * 200_000)] + [Ended(number)]
    assert not wire.a.streams
    assert not wire.b.streams


def test_both_sides_open_streams_with_numbers_of_their_own() -> None:
    wire = wired()
    assert [wire.a.open("m", b"") for _ in range(3)] == [1, 3, 5]
    assert [wire.b.open("m", b"") for _ in range(3)] == [2, 4, 6]
    wire.settle()
    at_a, at_b = wire.take()
    assert at_b == [Requested(number, "m", b"") for number in (1, 3, 5)]
    assert at_a == [Requested(number, "m", b"") for number in (2, 4, 6)]


@pytest.mark.parametrize("size", [0, 1, 8 * KIB - 1, 8 * KIB, 8 * KIB + 1, 32 * KIB + 1, 256 * KIB, 3 << 20])
def test_requests_and_messages_of_any_size_arrive_whole(size: int) -> None:
    wire = wired()
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    number = request(wire, body)
    wire.b.send(number, body)
    wire.settle()
    assert wire.take() == ([MessageReceived(number, body)], [])
    wire.a.consumed(number)
    wire.settle()
    credit_is_conserved(wire)


def talk() -> bytes:
    """What a machine says that asks for many things; none of it needs an answer."""
    session = opened()
    small, large, gone = (
        session.open("small", b"x"),
        session.open("large", b"y" * 99_999),
        session.open("gone", b""),
    )
    session.cancel(session.open("never", b""))
    session.notify("card", b"c" * 1000)
    said = encode(hello("a")) + drain(session)
    session.send(small, b"z" * 70_000)
    session.cancel(gone, Overloaded("Too much.", hint="Wait."))
    session.end(large)
    session.ping(0.0)
    said += drain(session)
    session.end(small)
    session.notify("last", b"")
    said += drain(session)
    session.close(NotPaired("Removed."))
    return said + drain(session)


TALK = talk()


def heard(parts: list[bytes]) -> list[str]:
    """Events, as text: errors are equal to nobody but themselves."""
    session = Session(hello=hello("b"), initiator=False, now=0.0)
    return [repr(event) for part in parts for event in session.receive(part, 0.0)]


def test_a_talk_is_understood() -> None:
    kinds = [text.partition("(")[0] for text in heard([TALK])]
    assert Counter(kinds) == {
        "Opened": 1,
        "Requested": 3,
        "Notified": 2,
        "MessageReceived": 1,
        "Cancelled": 1,
        "Ended": 2,
        "Closed": 1,
    }


@given(cuts=st.lists(st.integers(0, len(TALK)), max_size=30))
def test_any_split_of_a_talk_gives_the_same_events(cuts: list[int]) -> None:
    assert heard(pieces(TALK, cuts)) == heard([TALK])


def test_a_talk_byte_by_byte_gives_the_same_events() -> None:
    assert heard([TALK[at : at + 1] for at in range(len(TALK))]) == heard([TALK])


@pytest.mark.parametrize("limit", [1, 7, 1000, 64 * KIB])
def test_writes_are_as_small_as_asked(limit: int) -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * 50_000)
    parts = list(iter(lambda: wire.b.data_to_send(limit), b""))
    assert all(len(part) == limit for part in parts[:-1])
    assert len(parts[-1]) <= limit
    assert wire.a.receive(b"".join(parts), 0.0) == [MessageReceived(number, b"x" * 50_000)]


# ---- Versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1, 1), (1, 2), 1), ((1, 2), (2, 3), 2), ((2, 3), (1, 2), 2), ((1, 5), (2, 3), 3), ((3, 3), (3, 3), 3)],
)
def test_neighbouring_versions_agree_on_the_newest_that_both_speak(
    ours: tuple[int, int], theirs: tuple[int, int], agreed: int
) -> None:
    wire = SessionWire(hello("a", ours), hello("b", theirs)).settle()
    assert wire.a.version == wire.b.version == agreed
    assert wire.at_a[0] == Opened(hello("b", theirs), agreed)


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 3)), ((2, 3), (1, 1))])
def test_versions_without_a_common_one_part_with_a_sentence_on_both_sides(
    ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    wire = SessionWire(hello("a", ours), hello("b", theirs)).settle()
    for events in wire.take():
        error = closed_with(events, VersionMismatch)
        assert "1 to 1" in error.message
        assert "2 to 3" in error.message
        assert error.hint == f"Update fleetd on mac-{'a' if ours == (1, 1) else 'b'}."


def test_a_mismatch_is_told_to_a_side_that_did_not_see_it() -> None:
    a = Session(hello=hello("a", (2, 3)), initiator=True, now=0.0)
    feed(a, hello("b", (1, 1)))
    _, bye = sent(a)
    (event,) = feed(Session(hello=hello("b"), initiator=False, now=0.0), bye)
    assert "2 to 3" in closed_with([event], VersionMismatch).message


def test_a_range_upside_down_is_refused() -> None:
    session = Session(hello=hello("a", (1, 3)), initiator=True, now=0.0)
    closed_with(feed(session, hello("b", (3, 2))), ProtocolError)


def test_nothing_can_be_asked_before_the_hello_or_after_the_end() -> None:
    session = Session(hello=hello("a"), initiator=True, now=0.0)
    for _ in range(2):
        with pytest.raises(PeerLost):
            session.open("m", b"")
        with pytest.raises(PeerLost):
            session.notify("t", b"")
        session.close()


# ---- Misuse by this side --------------------------------------------------------------------------------


def test_streams_that_were_never_opened_or_were_ended_here_are_our_own_bugs() -> None:
    wire = wired()
    for call in (
        lambda: wire.a.send(1, b""),
        lambda: wire.a.end(2),
        lambda: wire.a.cancel(3),
        lambda: wire.a.consumed(4),
        lambda: wire.a.queued(5),
    ):
        with pytest.raises(ValueError, match="never opened"):
            call()
    number = request(wire)
    wire.a.end(number)
    with pytest.raises(ValueError, match="ended on this side"):
        wire.a.send(number, b"")


def test_calls_that_crossed_the_end_of_a_stream_do_nothing() -> None:
    wire = wired()
    number = request(wire)
    wire.a.cancel(number)
    wire.settle().take()
    for session in (wire.a, wire.b):
        session.send(number, b"x")
        session.end(number)
        session.cancel(number)
        session.consumed(number)
        assert session.queued(number) == 0
        assert drain(session) == b""


def test_ending_twice_ends_once() -> None:
    wire = wired()
    number = request(wire)
    wire.a.end(number)
    wire.a.end(number)
    assert wire.settle().take() == ([], [Ended(number)])
    wire.a.end(number)
    assert wire.settle().take() == ([], [])
