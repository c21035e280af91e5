"""A control session: every state and frame, versions, liveness, priorities, credit and bounds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wired import (
    Wire,
    check,
    credit_is_conserved,
    drain,
    feed,
    frames,
    hello,
    opened,
    pieces,
    request,
    sent,
    wired,
)

from fleetd import errors, limits
from fleetd.errors import (
    FleetError,
    InvalidValue,
    NotPaired,
    Overloaded,
    PayloadTooLarge,
    PeerError,
    PeerLost,
    ProtocolError,
    VersionMismatch,
)
from fleetd.p2p.events import (
    Cancelled,
    Closed,
    Ended,
    Event,
    Heard,
    Measured,
    Notified,
    Opened,
    Quiet,
    Received,
    Requested,
)
from fleetd.p2p.frames import Bye, Cancel, Data, End, Frame, Hello, Notify, Open, Ping, Pong, Window, encode
from fleetd.p2p.session import GOODBYE, Session, SessionState
from fleetd.p2p.states import SESSION_TABLE, STREAM_TABLE, Act, StreamState
from fleetd.p2p.stream import cost

KIB = limits.KIB
STREAM_FRAMES = (Open, Data, End, Cancel, Window)


def closed_with(events: list[Event], kind: type[FleetError]) -> FleetError:
    """The error of the last event, which must be of exactly this kind."""
    last = events[-1]
    assert isinstance(last, Closed)
    assert type(last.error) is kind
    return last.error


def cancelled_with(events: list[Event], stream: int, kind: type[FleetError]) -> FleetError:
    (event,) = [e for e in events if isinstance(e, Cancelled)]
    assert event.stream == stream
    assert type(event.error) is kind
    return event.error


# ---- The tables ------------------------------------------------------------------------------------------


def test_every_state_and_frame_is_in_the_tables() -> None:
    assert set(SESSION_TABLE) == set(SessionState)
    assert all(set(row) == set(get_args(Frame)) for row in SESSION_TABLE.values())
    assert set(STREAM_TABLE) == set(StreamState)
    assert all(set(row) == set(STREAM_FRAMES) for row in STREAM_TABLE.values())


def session_in(state: SessionState) -> Session:
    if state is SessionState.NEW:
        session = Session(hello=hello("a"), initiator=True, now=0.0)
        drain(session)
        return session
    session = opened()
    feed(session, Open(2, "m"))
    session.ping(0.0)
    drain(session)
    if state is not SessionState.OPEN:
        session.close()
    if state is SessionState.CLOSED:
        drain(session)
    assert session.state is state
    return session


# One frame of each kind that makes sense to `session_in(OPEN)`, whose stream 2 the peer has opened.
SENSIBLE: dict[type[Frame], Frame] = {
    Hello: hello("b"),
    Ping: Ping(9),
    Pong: Pong(2),
    Open: Open(4, "n"),
    Data: Data(2, b"x"),
    End: End(2),
    Cancel: Cancel(2, "internal_error", "m"),
    Window: Window(2, 0),
    Notify: Notify("t", b"x"),
    Bye: Bye(GOODBYE),
}
DELIVERED = {
    Open: Requested(4, "n", b""),
    Data: Received(2, b"x"),
    End: Ended(2),
}


@pytest.mark.parametrize(
    ("state", "kind"), list(itertools.product(SessionState, get_args(Frame))), ids=lambda x: str(x)[-12:]
)
def test_every_frame_in_every_session_state(state: SessionState, kind: type[Frame]) -> None:
    session = session_in(state)
    before = session.next_deadline()
    events = feed(session, SENSIBLE[kind], now=0.5)
    check(session)
    match SESSION_TABLE[state][kind]:
        case Act.IGNORE:
            assert events == []
            assert session.next_deadline() == before
            assert sent(session) == ([Bye(GOODBYE)] if state is SessionState.CLOSING else [])
            assert session.state is SessionState.CLOSED
        case Act.REFUSE:
            error = closed_with(events, ProtocolError)
            assert kind.__name__ in error.message
            assert sent(session) == [Bye("protocol_error", error.message)]
            assert session.state is SessionState.CLOSED
        case Act.GREET:
            assert events == [Opened(hello("b"), 1)]
            assert session.state is SessionState.OPEN
            assert sent(session) == [Ping(1)]
        case Act.LEAVE:
            assert events == [Closed(None)]
            assert session.state is SessionState.CLOSED
            assert drain(session) == b""
        case Act.ANSWER:
            assert (events, sent(session)) == ([], [Pong(9)])
        case Act.MEASURE:
            assert events == [Measured(0.5)]
            assert session.life.rtt_s == 0.5
        case Act.DELIVER:
            assert events == [Notified("t", b"x")]
        case Act.STREAM if kind is Cancel:
            cancelled_with(events, 2, FleetError)
        case Act.STREAM if kind is Window:
            assert events == []
        case Act.STREAM:
            assert events == [DELIVERED[kind]]
        case other:
            pytest.fail(f"nothing here says what {other} means")


def stream_in(state: StreamState, *, mine: bool) -> tuple[Session, int]:
    """A session with a stream in a state, and nothing left to say but one message if the stream takes it."""
    session = opened()
    if mine:
        number = session.open("m", b"") if state is not StreamState.IDLE else 1
        drain(session)
    else:
        number = 2
        if state is not StreamState.IDLE:
            feed(session, Open(2, "m"))
    if state in (StreamState.REMOTE_ENDED, StreamState.CLOSED):
        feed(session, End(number))
    if state in (StreamState.LOCAL_ENDED, StreamState.CLOSED):
        session.end(number)
    drain(session)
    assert session._streams._state(number) is state
    return session, number


@pytest.mark.parametrize("mine", [True, False], ids=["mine", "theirs"])
@pytest.mark.parametrize(
    ("state", "kind"), list(itertools.product(StreamState, STREAM_FRAMES)), ids=lambda x: str(x)[-12:]
)
def test_every_frame_in_every_stream_state(state: StreamState, kind: type[Frame], mine: bool) -> None:
    session, number = stream_in(state, mine=mine)
    waits = state in (StreamState.OPEN, StreamState.REMOTE_ENDED) and kind is Window
    if waits:
        session.send(number, b"y" * limits.STREAM_WINDOW_BYTES)
        drain(session)
    frame: Frame = {
        Open: Open(number, "m"),
        Data: Data(number, b"x"),
        End: End(number),
        Cancel: Cancel(number, "internal_error", "m"),
        Window: Window(number, limits.STREAM_WINDOW_BYTES // 2 if waits else 0),
    }[kind]
    events = feed(session, frame)
    check(session)
    act = STREAM_TABLE[state][kind]
    match act:
        case Act.REFUSE | Act.ACCEPT if act is Act.REFUSE or mine:
            closed_with(events, ProtocolError)
            assert [type(said) for said in sent(session)] == [Bye]
            return
        case Act.IGNORE:
            assert events == []
            assert session._streams._state(number) is state
        case Act.ACCEPT:
            assert events == [Requested(number, "m", b"")]
            assert session._streams._state(number) is StreamState.OPEN
        case Act.TAKE:
            assert events == [Received(number, b"x")]
            assert session._streams._state(number) is state
        case Act.END:
            assert events == [Ended(number)]
            over = state is StreamState.LOCAL_ENDED
            after = StreamState.CLOSED if over else StreamState.REMOTE_ENDED
            assert session._streams._state(number) is after
        case Act.CANCEL:
            cancelled_with(events, number, FleetError)
            assert session._streams._state(number) is StreamState.CLOSED
        case Act.CREDIT:
            assert events == []
            assert bool(drain(session)) == waits
        case other:
            pytest.fail(f"nothing here says what {other} means")
    assert session.state is SessionState.OPEN


def test_frames_for_a_request_that_has_not_left_yet_are_refused() -> None:
    session = opened()
    number = session.open("m", b"")
    closed_with(feed(session, Data(number, b"x")), ProtocolError)


def test_numbers_of_streams_only_grow() -> None:
    session = opened()
    feed(session, Open(6, "m"))
    closed_with(feed(session, Open(4, "m")), ProtocolError)


# ---- Conversations ---------------------------------------------------------------------------------------


def test_hellos_cross_and_both_sides_open() -> None:
    wire = Wire()
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
    assert at_a == [Received(number, body) for body in (b"one", b"", b"x" * 200_000)] + [Ended(number)]
    assert not wire.a._streams
    assert not wire.b._streams


def test_both_sides_open_streams_with_numbers_of_their_own() -> None:
    wire = wired()
    assert [wire.a.open("m", b"") for _ in range(3)] == [1, 3, 5]
    assert [wire.b.open("m", b"") for _ in range(3)] == [2, 4, 6]
    wire.settle()
    at_a, at_b = wire.take()
    assert at_b == [Requested(number, "m", b"") for number in (1, 3, 5)]
    assert at_a == [Requested(number, "m", b"") for number in (2, 4, 6)]


@pytest.mark.parametrize("size", [0, 1, 8 * KIB - 1, 8 * KIB, 8 * KIB + 1, 32 * KIB + 1, 256 * KIB, 3 << 20])
@pytest.mark.parametrize("bulk", [False, True])
def test_requests_and_messages_of_any_size_arrive_whole(size: int, bulk: bool) -> None:
    wire = wired()
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    number = request(wire, body, bulk=bulk)
    assert wire.b._streams._open[number].bulk == bulk
    wire.b.send(number, body)
    wire.settle()
    assert wire.take() == ([Received(number, body)], [])
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
        "Received": 1,
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
    assert wire.a.receive(b"".join(parts), 0.0) == [Received(number, b"x" * 50_000)]


# ---- Versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1, 1), (1, 2), 1), ((1, 2), (2, 3), 2), ((2, 3), (1, 2), 2), ((1, 5), (2, 3), 3), ((3, 3), (3, 3), 3)],
)
def test_neighbouring_versions_agree_on_the_newest_that_both_speak(
    ours: tuple[int, int], theirs: tuple[int, int], agreed: int
) -> None:
    wire = Wire(hello("a", ours), hello("b", theirs)).settle()
    assert wire.a.version == wire.b.version == agreed
    assert wire.at_a[0] == Opened(hello("b", theirs), agreed)


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 3)), ((2, 3), (1, 1))])
def test_versions_without_a_common_one_part_with_a_sentence_on_both_sides(
    ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    wire = Wire(hello("a", ours), hello("b", theirs)).settle()
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


# ---- Liveness --------------------------------------------------------------------------------------------


def test_hello_must_come_in_time() -> None:
    session = Session(hello=hello("a"), initiator=True, now=10.0)
    assert session.next_deadline() == 10.0 + limits.HELLO_S
    assert session.tick(9.999 + limits.HELLO_S) == []
    error = closed_with(session.tick(10.0 + limits.HELLO_S), PeerLost)
    assert "hello within 5 s" in error.message


def test_a_hello_at_the_last_moment_is_in_time() -> None:
    session = Session(hello=hello("a"), initiator=True, now=10.0)
    assert len(feed(session, hello("b"), now=9.999 + limits.HELLO_S)) == 1
    assert session.tick(10.0 + limits.HELLO_S) == []


def silence(session: Session, until: float) -> list[tuple[float, Event]]:
    """What a session says of a peer that says nothing, ticking exactly when it asks for it."""
    seen: list[tuple[float, Event]] = []
    while (due := session.next_deadline()) is not None and due <= until:
        seen += [(due, event) for event in session.tick(due)]
    return seen


def test_silence_is_noticed_in_time() -> None:
    session = opened(now=100.0)
    drain(session)
    (quiet_at, quiet), (lost_at, lost) = silence(session, 200.0)
    assert (quiet_at, quiet) == (100.0 + limits.SUSPECT_S, Quiet())
    assert lost_at == 100.0 + limits.DEAD_S
    assert "silent for 5 s" in closed_with([lost], PeerLost).message
    assert session.state is SessionState.CLOSED
    assert session.next_deadline() is None
    assert drain(session) == b""


@given(began=st.floats(0, 1e7))
def test_silence_is_noticed_whatever_the_clock_reads(began: float) -> None:
    """Sums of times round: a deadline must never be due and its judgement not."""
    session = opened(now=began)
    ticks, events = 0, []
    while (due := session.next_deadline()) is not None:
        ticks += 1
        assert ticks < 12
        events += [(due, event) for event in session.tick(due)]
    (quiet_at, quiet), (lost_at, lost) = events
    assert (quiet_at, quiet) == (pytest.approx(began + limits.SUSPECT_S), Quiet())
    assert lost_at == pytest.approx(began + limits.DEAD_S)
    closed_with([lost], PeerLost)


def test_silence_is_filled_with_pings() -> None:
    session = opened(now=100.0)
    times = []
    while (due := session.next_deadline()) is not None:
        session.tick(due)
        times += [due for frame in sent(session) if isinstance(frame, Ping)]
    assert times == [101.0, 102.0, 103.0, 104.0]


def test_one_word_ends_the_quiet() -> None:
    session = opened()
    assert silence(session, limits.SUSPECT_S) == [(limits.SUSPECT_S, Quiet())]
    assert session.life.quiet
    assert feed(session, Notify("t"), now=4.9) == [Heard(), Notified("t", b"")]
    assert not session.life.quiet
    assert session.life.last_heard == 4.9
    assert silence(session, 7.39) == []
    assert silence(session, 7.41) == [(pytest.approx(7.4), Quiet())]


def test_a_sleeper_does_not_accuse_others() -> None:
    """A tick that comes late is this machine's fault; what the other sent meanwhile is still to be read."""
    session = opened()
    silence(session, 1.0)
    drain(session)
    assert session.tick(50.0) == []
    assert sent(session) == [Ping(3)]
    # It had meant to look 2 s into the silence and sees the clock go on from there.
    assert silence(session, 60.0)[0] == (50.0 + limits.SUSPECT_S - 2.0, Quiet())


def test_a_peer_that_talks_without_answering_is_left() -> None:
    session = opened()
    at, closing = 0.0, []
    pings = 1
    while not closing and at < 1000:
        at += 0.5
        feed(session, Notify("t"), now=at)
        closing = session.tick(at)
        pings += Counter(type(frame) for frame in sent(session))[Ping]
    assert pings == limits.PINGS_UNANSWERED
    assert f"left {limits.PINGS_UNANSWERED} pings" in closed_with(closing, PeerLost).message
    assert at == limits.PINGS_UNANSWERED * limits.RTT_PING_S


def test_a_late_pong_measures_from_its_own_ping() -> None:
    session = opened()  # ping 1 went out at 0
    session.tick(1.0)
    assert feed(session, Pong(2), now=1.5) == [Measured(0.5)]
    assert feed(session, Pong(1), now=1.6) == []
    assert feed(session, Pong(2), now=1.7) == []
    assert session.life.rtt_s == 0.5


def test_an_answer_to_a_ping_that_was_not_sent_is_refused() -> None:
    """Or a peer could make itself look near."""
    session = opened()
    closed_with(feed(session, Pong(2)), ProtocolError)


def test_an_idle_pair_costs_little_and_both_know_the_round_trip() -> None:
    a = Session(hello=hello("a"), initiator=True, now=0.0)
    b = Session(hello=hello("b"), initiator=False, now=0.0)
    delay, now, minute = 0.01, 0.0, 60.0
    air: list[tuple[float, Session, bytes]] = []
    measured: dict[bool, list[float]] = {True: [], False: []}
    writes = size = 0
    while now < minute:
        for session, other in ((a, b), (b, a)):
            if data := session.data_to_send():
                writes += 1
                size += len(data)
                air.append((now + delay, other, data))
        deadlines = [s.next_deadline() or minute for s in (a, b)]
        now = min([*deadlines, *(at for at, _, _ in air)])
        arrived, air = [x for x in air if x[0] <= now], [x for x in air if x[0] > now]
        for _, session, data in arrived:
            for event in session.receive(data, now):
                assert not isinstance(event, Quiet | Closed)
                if isinstance(event, Measured):
                    measured[session is a].append(now)
                    assert event.rtt_s == pytest.approx(2 * delay)
        assert a.tick(now) == b.tick(now) == []
    # A TLS record adds 22 bytes to each write, TCP and IP at most 72, and its acknowledgement as much again.
    assert (size + writes * (22 + 72 + 72)) / minute <= 1000
    for times in measured.values():
        assert max(later - earlier for earlier, later in itertools.pairwise([*times, minute])) <= 5.5


# ---- Priorities ------------------------------------------------------------------------------------------


def test_a_ping_overtakes_64_mib_of_bulk() -> None:
    wire = wired()
    number = request(wire, bulk=True)
    wire.b.send(number, b"x" * (64 << 20))
    wire.a.receive(wire.b.data_to_send(), 0.0)
    nonce = wire.b.ping(1.0)
    ahead = wire.b.data_to_send()
    assert encode(Ping(nonce)) in ahead[: limits.FRAGMENT_BYTES + 100]
    wire.a.receive(ahead, 1.0)
    wire.b.receive(wire.a.data_to_send(), 1.25)
    assert wire.b.life.rtt_s == 0.25
    wire.settle()
    (message,) = [event for event in wire.at_a if isinstance(event, Received)]
    assert len(message.body) == 64 << 20


def test_a_pong_overtakes_everything_too() -> None:
    session = opened()
    number = session.open("m", b"")
    session.send(number, b"x" * 200_000)
    session.notify("t", b"x" * 60_000)
    feed(session, Ping(77))
    assert frames(session.data_to_send(7)) == [Pong(77)]


def order(session: Session) -> list[int | str]:
    """Who was served, in order."""
    return [frame.topic if isinstance(frame, Notify) else frame.stream for frame in sent(session)]  # type: ignore[union-attr]


def test_news_and_interactive_streams_go_before_bulk() -> None:
    session = opened()
    slow, quick = session.open("m", b"", bulk=True), session.open("m", b"")
    drain(session)
    session.send(slow, b"x" * 100_000)
    session.send(quick, b"y" * 100_000)
    session.end(quick)
    session.notify("t", b"")
    served = order(session)
    assert served[-4:] == [slow] * 4
    assert sorted(map(str, served[:-4])) == sorted(map(str, [quick] * 5 + ["t"]))


@pytest.mark.parametrize("bulk", [False, True])
def test_streams_of_one_class_take_turns(bulk: bool) -> None:
    session = opened()
    first, second, third = (session.open("m", b"", bulk=bulk) for _ in range(3))
    drain(session)
    session.send(first, b"x" * 200_000)
    begun = session.data_to_send(1)
    for number in (second, third):
        session.send(number, b"y" * 100_000)
    served = [frame.stream for frame in frames(begun + drain(session)) if isinstance(frame, Data)]
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
    numbers = [wire.a.open("m", b"x" * (100_000 * (i % 2)), bulk=i % 3 == 0) for i in range(10)]
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
    check(session)
    assert not session._streams


# ---- Credit ----------------------------------------------------------------------------------------------


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
    assert wire.take() == ([Received(quick, b"y" * (1 << 20))], [])
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
    assert at_a == [Received(number, b"x" * (1 << 20))]
    assert wire.a._streams.held_bytes <= (1 << 20) + limits.STREAM_WINDOW_BYTES
    for count in range(1, 10):
        wire.a.consumed(number)
        wire.settle()
        assert len(wire.take()[0]) == 1, count
    wire.a.consumed(number)
    wire.settle()
    credit_is_conserved(wire)
    assert wire.a._streams.held_bytes == 0


def test_empty_message_flood_runs_out_of_credit() -> None:
    wire = wired()
    number = request(wire)
    for _ in range(10_000):
        wire.b.send(number, b"")
    wire.settle()
    assert len(wire.take()[0]) == limits.STREAM_WINDOW_BYTES // limits.FRAGMENT_COST_BYTES


def test_sending_without_credit_ends_the_session() -> None:
    fragments = [Data(2, b"x" * limits.FRAGMENT_BYTES)] * 7
    left = limits.STREAM_WINDOW_BYTES - 7 * cost(fragments[0].body) - limits.FRAGMENT_COST_BYTES
    for size, fine in ((left - 1, True), (left, True), (left + 1, False)):
        session = opened()
        events = feed(session, Open(2, "m"), *fragments, Data(2, b"x" * size))
        assert (session.state is SessionState.OPEN) == fine
        if not fine:
            assert "1 bytes more than its window" in closed_with(events, ProtocolError).message


def test_credit_that_was_not_taken_ends_the_session() -> None:
    for extra in (-1, 0, 1):
        session = opened()
        number = session.open("m", b"")
        session.send(number, b"x" * 1000)
        drain(session)
        events = feed(session, Window(number, cost(b"x" * 1000) + extra))
        if extra == 1:
            closed_with(events, ProtocolError)
        else:
            assert events == []


def test_end_in_the_middle_of_a_message_is_refused() -> None:
    session = opened()
    closed_with(feed(session, Open(2, "m"), Data(2, b"x", True), End(2)), ProtocolError)
    session = opened()
    closed_with(feed(session, Open(2, "m", b"", True), End(2)), ProtocolError)


# ---- Bounds ----------------------------------------------------------------------------------------------


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
            assert at_a == [Received(number, b"x" * 300_000)]
        else:
            cancelled_with(at_a, number, PayloadTooLarge)
            cancelled_with(at_b, number, PayloadTooLarge)
        assert wire.a.state is wire.b.state is SessionState.OPEN
        assert wire.a._streams.held_bytes == (300_000 if fine else 0)
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
        feed(session, Open(2, "m"), Open(4, "m"), Data(2, b"x" * 30_000))
        events = feed(session, Data(4, b"y" * size, more))
        check(session)
        assert session.state is SessionState.OPEN
        if fine:
            assert events == ([] if more else [Received(4, b"y" * size)])
        else:
            assert len(events) == 1
            cancelled_with(events, 4, Overloaded)
            assert session._streams.held_bytes == 30_000
            assert [type(frame) for frame in sent(session)] == [Cancel]


WAYS_TO_SAY: list[Callable[[Session, bytes], object]] = [
    lambda session, body: session.send(1, body),
    lambda session, body: session.notify("t", body),
    lambda session, body: session.open("m", body),
    lambda session, body: session.open("m", body, bulk=True),
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
        assert session._out.queued_bytes == 9000 + size
    else:
        with pytest.raises(Overloaded, match="10001 bytes"):
            say(session, b"y" * size)
    check(session)


def test_the_peers_open_streams_are_bounded() -> None:
    session = opened()
    last = 2 * limits.SESSION_STREAMS
    events = feed(session, *(Open(number, "m") for number in range(2, last, 2)))
    assert len(events) == limits.SESSION_STREAMS - 1
    assert feed(session, Open(last, "m")) == [Requested(last, "m", b"")]
    assert feed(session, Open(last + 2, "m"), Data(last + 2, b"late")) == []
    (refusal,) = sent(session)
    assert isinstance(refusal, Cancel)
    assert (refusal.stream, refusal.code) == (last + 2, "overloaded")
    assert feed(session, Cancel(2, "withdrawn"), Open(last + 4, "m"))[1:] == [Requested(last + 4, "m", b"")]


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
    for number in range(2, 20_000, 2):
        feed(session, Open(number, "m", b"x", True), Cancel(number, "withdrawn"))
    check(session)
    assert not session._streams
    assert drain(session) == b""


def test_news_at_the_limit_pass_and_one_byte_more_does_not() -> None:
    wire = wired()
    for size in (limits.NOTIFY_BYTES - 1, limits.NOTIFY_BYTES):
        wire.a.notify("t", b"x" * size)
        assert wire.settle().take() == ([], [Notified("t", b"x" * size)])
    with pytest.raises(PayloadTooLarge):
        wire.a.notify("t", b"x" * (limits.NOTIFY_BYTES + 1))


# ---- Cancel and Bye --------------------------------------------------------------------------------------


def test_errors_cross_the_wire() -> None:
    for kind in (InvalidValue, Overloaded, errors.OutOfMemory):
        wire = wired()
        number = request(wire)
        wire.b.cancel(number, kind("What.", hint="Do.", param="top_p"))
        error = cancelled_with(wire.settle().take()[0], number, kind)
        assert (error.message, error.hint, error.param) == ("What.", "Do.", "top_p")


def test_an_error_of_a_newer_version_is_a_peer_error() -> None:
    session = opened()
    number = session.open("m", b"")
    drain(session)
    error = cancelled_with(feed(session, Cancel(number, "quantum_noise", "What.")), number, PeerError)
    assert error.message == "What."


def test_withdrawal_needs_no_reason() -> None:
    wire = wired()
    number = request(wire)
    wire.a.cancel(number)
    error = cancelled_with(wire.settle().take()[1], number, PeerError)
    assert "no longer wanted" in error.message


def test_cancel_overtakes_and_forgets_what_was_queued() -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * 200_000)
    wire.b.cancel(number, Overloaded("No."))
    assert [type(frame) for frame in sent(wire.b)] == [Cancel]
    check(wire.b)


def test_frames_that_crossed_a_cancel_are_ignored() -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * 100_000)
    wire.b.end(number)
    wire.a.cancel(number)
    wire.settle()
    at_a, at_b = wire.take()
    assert at_a == []
    cancelled_with(at_b, number, PeerError)
    assert wire.a.state is wire.b.state is SessionState.OPEN


def test_an_unfinished_request_that_is_cancelled_is_never_heard_of() -> None:
    session = opened()
    assert feed(session, Open(2, "m", b"x", True), Cancel(2, "withdrawn")) == []


def test_long_and_broken_texts_are_cut_and_mended() -> None:
    """Paths that are no Unicode reach error messages; they must not break the session that tells them."""
    for size, kept in ((limits.ERROR_TEXT_CHARS, 1024), (limits.ERROR_TEXT_CHARS + 1, 1024), (1023, 1023)):
        wire = wired()
        number = request(wire)
        wire.b.cancel(number, Overloaded("\udcff" * size, hint="h" * size, param="\udcff"))
        error = cancelled_with(wire.settle().take()[0], number, Overloaded)
        assert error.message == "?" * kept
        assert error.hint == "h" * kept
        wire.b.close(PeerError("\udcff" * size))
        assert isinstance(wire.settle().take()[0][-1], Closed)


def test_a_peers_long_text_is_cut_here_too() -> None:
    session = opened()
    number = session.open("m", b"")
    drain(session)
    error = cancelled_with(
        feed(session, Cancel(number, "overloaded", "x" * 9999, "y" * 9999)), number, Overloaded
    )
    assert (len(error.message), len(error.hint)) == (limits.ERROR_TEXT_CHARS, limits.ERROR_TEXT_CHARS)


def test_goodbye_is_heard_before_anything_that_waits() -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * 200_000)
    wire.b.notify("t", b"x")
    assert wire.b.close() == [Closed(None)]
    check(wire.b)
    assert wire.b.state is SessionState.CLOSING
    assert wire.settle().take() == ([Closed(None)], [])
    assert wire.a.state is wire.b.state is SessionState.CLOSED
    assert wire.b.close() == []
    assert wire.a.close() == []


def test_a_frame_half_sent_is_finished_before_the_goodbye() -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * 30_000)
    first = wire.b.data_to_send(1000)
    wire.b.close()
    assert wire.a.receive(first + drain(wire.b), 0.0) == [Received(number, b"x" * 30_000), Closed(None)]


def test_nothing_is_said_to_a_side_that_has_left() -> None:
    session = opened()
    session.notify("t", b"x" * 30_000)
    session.data_to_send(1000)
    feed(session, Ping(1), Bye(GOODBYE))
    assert drain(session) == b""


def test_an_unpaired_machine_is_told() -> None:
    wire = wired()
    events = wire.b.close(NotPaired("This machine was removed from the fleet."))
    closed_with(events, NotPaired)
    error = closed_with(wire.settle().take()[0], NotPaired)
    assert error.message == "mac-b (bbbbbbb) ended the session: This machine was removed from the fleet."


def test_a_session_that_is_over_hears_and_says_nothing() -> None:
    session = opened()
    session.close()
    drain(session)
    assert session.receive(b"\xff" * 100_000, 1.0) == []
    assert len(session._in) == 0
    assert session.tick(1000.0) == []
    assert drain(session) == b""


def test_talk_after_the_fault_in_the_same_bytes_is_not_heard() -> None:
    session = opened()
    events = feed(session, Notify("t"), End(9), Notify("t"))
    assert [type(event) for event in events] == [Notified, Closed]


# ---- Misuse by this side ---------------------------------------------------------------------------------


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
