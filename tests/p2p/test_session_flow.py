"""What a control session sends first, how much of it, and how much it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from wired import (
    cancelled_with,
    closed_with,
    credit_is_conserved,
    drain,
    feed,
    frames,
    opened,
    request,
    sent,
    wired,
)

from fleetd import limits
from fleetd.errors import (
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
)
from fleetd.p2p.session.events import MessageReceived, Notified, Requested
from fleetd.p2p.session.frames import (
    CancelFrame,
    DataFrame,
    End,
    NotifyFrame,
    Open,
    Ping,
    Pong,
    WindowFrame,
    encode,
)
from fleetd.p2p.session.session import Session, SessionState
from fleetd.p2p.session.stream import cost

KIB = limits.KIB


# ---- Priorities -----------------------------------------------------------------------------------------


def test_a_ping_overtakes_64_mib_of_messages() -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * (64 << 20))
    wire.a.receive(wire.b.data_to_send(), 0.0)
    nonce = wire.b.ping(1.0)
    ahead = wire.b.data_to_send()
    assert encode(Ping(nonce)) in ahead[: limits.FRAGMENT_BYTES + 100]
    wire.a.receive(ahead, 1.0)
    wire.b.receive(wire.a.data_to_send(), 1.25)
    assert wire.b.life.rtt_s == 0.25
    wire.settle()
    (message,) = [event for event in wire.at_a if isinstance(event, MessageReceived)]
    assert len(message.body) == 64 << 20


def test_a_pong_overtakes_everything_too() -> None:
    session = opened()
    number = session.open("m", b"")
    session.send(number, b"x" * 200_000)
    session.notify("t", b"x" * 60_000)
    feed(session, Ping(77))
    assert frames(session.data_to_send(16)) == [Pong(77)]


def order(session: Session) -> list[int | str]:
    """Who was served, in order."""
    return [frame.topic if isinstance(frame, NotifyFrame) else frame.stream for frame in sent(session)]  # type: ignore[union-attr]


def test_streams_take_turns() -> None:
    session = opened()
    first, second, third = (session.open("m", b"") for _ in range(3))
    drain(session)
    session.send(first, b"x" * 200_000)
    begun = session.data_to_send(1)
    for number in (second, third):
        session.send(number, b"y" * 100_000)
    served = [frame.stream for frame in frames(begun + drain(session)) if isinstance(frame, DataFrame)]
    assert served == [first] + [first, second, third] * 4 + [first] * 2


def test_news_do_not_starve_streams() -> None:
    session = opened()
    number = session.open("m", b"")
    drain(session)
    session.send(number, b"x" * 100_000)
    for at in range(20):
        session.notify(f"t{at}", b"n" * 1000)
    assert [served == number for served in order(session)[:8]] == [True, False] * 4


def test_opens_leave_in_order_whatever_waits_before_them() -> None:
    wire = wired()
    numbers = [wire.a.open("m", b"x" * (100_000 * (i % 2))) for i in range(10)]
    wire.a.cancel(numbers[4])
    assert [f.stream for f in frames(wire.a.data_to_send(1 << 24)) if isinstance(f, Open)] == [
        number for number in numbers if number != numbers[4]
    ]


def test_a_request_cancelled_before_it_left_leaves_no_trace() -> None:
    session = opened()
    number = session.open("m", b"x" * 100_000)
    session.send(number, b"y")
    session.cancel(number)
    assert drain(session) == b""
    session.validate()
    assert not session.streams


# ---- Credit ---------------------------------------------------------------------------------------------


def test_a_slow_reader_stops_only_its_own_stream() -> None:
    wire = wired()
    slow, quick = request(wire), request(wire)
    for _ in range(100):
        wire.b.send(slow, b"x" * 10_000)
    wire.settle()
    at_a, _ = wire.take()
    arrived = len(at_a)
    assert arrived == limits.STREAM_WINDOW_BYTES // cost(b"x" * 10_000)
    wire.b.send(quick, b"y" * (1 << 20))
    wire.settle()
    assert wire.take() == ([MessageReceived(quick, b"y" * (1 << 20))], [])
    for _ in range(arrived):
        wire.a.consumed(slow)
    wire.settle()
    assert len(wire.take()[0]) > 10


def test_a_stopped_reader_holds_one_large_message_and_one_window() -> None:
    wire = wired()
    number = request(wire)
    for _ in range(10):
        wire.b.send(number, b"x" * (1 << 20))
    wire.settle()
    at_a, _ = wire.take()
    assert at_a == [MessageReceived(number, b"x" * (1 << 20))]
    assert wire.a.streams.held_bytes <= (1 << 20) + limits.STREAM_WINDOW_BYTES
    for count in range(1, 10):
        wire.a.consumed(number)
        wire.settle()
        assert len(wire.take()[0]) == 1, count
    wire.a.consumed(number)
    wire.settle()
    credit_is_conserved(wire)
    assert wire.a.streams.held_bytes == 0


def test_empty_message_flood_runs_out_of_credit() -> None:
    wire = wired()
    number = request(wire)
    for _ in range(10_000):
        wire.b.send(number, b"")
    wire.settle()
    assert len(wire.take()[0]) == limits.STREAM_WINDOW_BYTES // limits.FRAGMENT_COST_BYTES


def test_sending_without_credit_ends_the_session() -> None:
    fragments = [DataFrame(2, b"x" * limits.FRAGMENT_BYTES)] * 7
    left = limits.STREAM_WINDOW_BYTES - 7 * cost(fragments[0].body) - limits.FRAGMENT_COST_BYTES
    for size, fine in ((left - 1, True), (left, True), (left + 1, False)):
        session = opened()
        events = feed(session, Open(2, "m"), *fragments, DataFrame(2, b"x" * size))
        assert (session.state is SessionState.OPEN) == fine
        if not fine:
            assert "1 bytes more than its window" in closed_with(events, ProtocolError).message


def test_credit_that_was_not_taken_ends_the_session() -> None:
    for extra in (-1, 0, 1):
        session = opened()
        number = session.open("m", b"")
        session.send(number, b"x" * 1000)
        drain(session)
        events = feed(session, WindowFrame(number, cost(b"x" * 1000) + extra))
        if extra == 1:
            closed_with(events, ProtocolError)
        else:
            assert events == []


def test_end_in_the_middle_of_a_message_is_refused() -> None:
    session = opened()
    closed_with(feed(session, Open(2, "m"), DataFrame(2, b"x", True), End(2)), ProtocolError)
    session = opened()
    closed_with(feed(session, Open(2, "m", b"", True), End(2)), ProtocolError)


# ---- Bounds ---------------------------------------------------------------------------------------------


def test_message_at_the_limit_arrives_and_one_byte_more_costs_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bound, fine in ((300_001, True), (300_000, True), (299_999, False)):
        wire = wired()
        number = request(wire)
        wire.b.send(number, b"x" * 300_000)
        monkeypatch.setattr(limits, "MESSAGE_BYTES", bound)
        wire.settle()
        at_a, at_b = wire.take()
        if fine:
            assert at_a == [MessageReceived(number, b"x" * 300_000)]
        else:
            cancelled_with(at_a, number, PayloadTooLarge)
            cancelled_with(at_b, number, PayloadTooLarge)
        assert wire.a.state is wire.b.state is SessionState.OPEN
        assert wire.a.streams.held_bytes == (300_000 if fine else 0)
        monkeypatch.undo()


def test_request_over_the_limit_is_cancelled_before_anybody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = wired()
    number = wire.a.open("m", b"x" * 300_000)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 299_999)
    wire.settle()
    at_a, at_b = wire.take()
    assert at_b == []
    cancelled_with(at_a, number, PayloadTooLarge)


def test_own_message_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = wired()
    number = request(wire)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 100)
    for size in (99, 100):
        wire.a.send(number, b"x" * size)
        wire.a.open("m", b"x" * size)
    for too_much in (lambda: wire.a.send(number, b"x" * 101), lambda: wire.a.open("m", b"x" * 101)):
        with pytest.raises(PayloadTooLarge, match="101 bytes is over the limit of 100"):
            too_much()
    assert len(wire.settle().take()[1]) == 4


@pytest.mark.parametrize("more", [True, False])
def test_hoarding_over_the_session_bound_costs_the_stream_only(
    monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    """A peer that leaves many large messages unfinished, or a reader that takes none."""
    monkeypatch.setattr(limits, "SESSION_HELD_BYTES", 60_000)
    for size, fine in ((29_999, True), (30_000, True), (30_001, False)):
        session = opened()
        feed(session, Open(2, "m"), Open(4, "m"), DataFrame(2, b"x" * 30_000))
        events = feed(session, DataFrame(4, b"y" * size, more))
        session.validate()
        assert session.state is SessionState.OPEN
        if fine:
            assert events == ([] if more else [MessageReceived(4, b"y" * size)])
        else:
            assert len(events) == 1
            cancelled_with(events, 4, Overloaded)
            assert session.streams.held_bytes == 30_000
            assert [type(frame) for frame in sent(session)] == [CancelFrame]


WAYS_TO_SAY: list[Callable[[Session, bytes], object]] = [
    lambda session, body: session.send(1, body),
    lambda session, body: session.notify("t", body),
    lambda session, body: session.open("m", body),
]


@pytest.mark.parametrize("say", WAYS_TO_SAY)
@pytest.mark.parametrize(("size", "fine"), [(999, True), (1000, True), (1001, False)])
def test_own_bytes_waiting_are_bounded(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[Session, bytes], object], size: int, fine: bool
) -> None:
    monkeypatch.setattr(limits, "SESSION_QUEUED_BYTES", 10_000)
    session = opened()
    number = session.open("m", b"")
    drain(session)
    session.send(number, b"x" * (9000 - 2 * limits.FRAGMENT_COST_BYTES))
    assert session.queued(number) == 9000 - limits.FRAGMENT_COST_BYTES
    if fine:
        say(session, b"y" * size)
        assert session.outbox.queued_bytes == 9000 + size
    else:
        with pytest.raises(Overloaded, match="10001 bytes"):
            say(session, b"y" * size)
    session.validate()


def test_the_peers_open_streams_are_bounded() -> None:
    session = opened()
    last = 2 * limits.SESSION_STREAMS
    events = feed(session, *(Open(number, "m") for number in range(2, last, 2)))
    assert len(events) == limits.SESSION_STREAMS - 1
    assert feed(session, Open(last, "m")) == [Requested(last, "m", b"")]
    assert feed(session, Open(last + 2, "m"), DataFrame(last + 2, b"late")) == []
    (refusal,) = sent(session)
    assert isinstance(refusal, CancelFrame)
    assert (refusal.stream, refusal.code) == (last + 2, "overloaded")
    assert feed(session, CancelFrame(2, "withdrawn"), Open(last + 4, "m"))[1:] == [
        Requested(last + 4, "m", b"")
    ]


def test_own_open_streams_are_bounded_by_what_the_peer_takes() -> None:
    wire = wired()
    numbers = [wire.a.open("m", b"") for _ in range(limits.SESSION_STREAMS)]
    with pytest.raises(Overloaded, match=r"256 requests to mac-b \(bbbbbbb\) are open"):
        wire.a.open("m", b"")
    wire.settle()
    assert len(wire.take()[1]) == limits.SESSION_STREAMS
    wire.b.end(numbers[0])
    wire.settle()
    wire.a.end(numbers[0])
    with pytest.raises(Overloaded):
        wire.a.open("m", b"")  # the End has not left, so the peer counts the stream
    wire.settle().take()
    number = wire.a.open("m", b"")
    assert wire.settle().take() == ([], [Requested(number, "m", b"")])


def test_ping_flood_by_a_peer_that_does_not_read_ends_the_session() -> None:
    session = opened()
    assert feed(session, *([Ping(1)] * (limits.SESSION_ANSWERS - 1))) == []
    assert feed(session, Ping(1)) == []
    closed_with(feed(session, Ping(1)), ProtocolError)


def test_rapid_open_and_cancel_leaves_nothing_behind() -> None:
    session = opened()
    for number in range(2, limits.SESSION_ASKS_AT_ONCE, 2):
        feed(session, Open(number, "m", b"x", True), CancelFrame(number, "withdrawn"))
    session.validate()
    assert not session.streams
    assert drain(session) == b""


@pytest.mark.parametrize("frames", [2, 1])
def test_attack_requests_without_end_end_the_session(frames: int) -> None:
    """Opened and cancelled at once, or cancelled again and again."""
    session = opened()
    feed(session, Open(2, "m", b"x"), CancelFrame(2, "withdrawn"))
    for number in range(4, 4 * limits.SESSION_ASKS_AT_ONCE, 2):
        asks = Open(number, "m", b"x"), CancelFrame(number, "withdrawn")
        events = feed(session, *asks) if frames == 2 else feed(session, CancelFrame(2, "withdrawn"))
        if session.state is not SessionState.OPEN:
            break
    assert "without end" in closed_with(events[-1:], ProtocolError).message


def test_news_at_the_limit_pass_and_one_byte_more_does_not() -> None:
    wire = wired()
    for size in (limits.NOTIFY_BYTES - 1, limits.NOTIFY_BYTES):
        wire.a.notify("t", b"x" * size)
        assert wire.settle().take() == ([], [Notified("t", b"x" * size)])
    with pytest.raises(PayloadTooLarge):
        wire.a.notify("t", b"x" * (limits.NOTIFY_BYTES + 1))
