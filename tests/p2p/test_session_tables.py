"""Every state of a control session and every frame: what the tables allow, and all that they do not."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from wired import (
    cancelled_with,
    closed_with,
    drain,
    feed,
    hello,
    opened,
    sent,
)

from fleetd import limits
from fleetd.errors import (
    PeerError,
    ProtocolError,
)
from fleetd.p2p.session.events import Closed, Ended, Measured, MessageReceived, Notified, Opened, Requested
from fleetd.p2p.session.frames import (
    Bye,
    CancelFrame,
    DataFrame,
    End,
    Frame,
    Hello,
    NotifyFrame,
    Open,
    Ping,
    Pong,
    WindowFrame,
)
from fleetd.p2p.session.session import GOODBYE, Session, SessionState
from fleetd.p2p.session.states import SESSION_TABLE, STREAM_TABLE, Act, StreamState

STREAM_FRAMES = (Open, DataFrame, End, CancelFrame, WindowFrame)


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
    DataFrame: DataFrame(2, b"x"),
    End: End(2),
    CancelFrame: CancelFrame(2, "internal_error", "m"),
    WindowFrame: WindowFrame(2, 0),
    NotifyFrame: NotifyFrame("t", b"x"),
    Bye: Bye(GOODBYE),
}
DELIVERED = {
    Open: Requested(4, "n", b""),
    DataFrame: MessageReceived(2, b"x"),
    End: Ended(2),
}


@pytest.mark.parametrize(
    ("state", "kind"), list(itertools.product(SessionState, get_args(Frame))), ids=lambda x: str(x)[-12:]
)
def test_every_frame_in_every_session_state(state: SessionState, kind: type[Frame]) -> None:
    session = session_in(state)
    before = session.next_deadline()
    events = feed(session, SENSIBLE[kind], now=0.5)
    session.validate()
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
            assert (events, sent(session)) == ([], [Pong(9, 0.5)])
        case Act.MEASURE:
            assert events == [Measured(0.5)]
            assert session.life.rtt_s == 0.5
        case Act.DELIVER:
            assert events == [Notified("t", b"x")]
        case Act.STREAM if kind is CancelFrame:
            cancelled_with(events, 2, PeerError)
        case Act.STREAM if kind is WindowFrame:
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
    assert session.streams.state(number) is state
    return session, number


@pytest.mark.parametrize("mine", [True, False], ids=["mine", "theirs"])
@pytest.mark.parametrize(
    ("state", "kind"), list(itertools.product(StreamState, STREAM_FRAMES)), ids=lambda x: str(x)[-12:]
)
def test_every_frame_in_every_stream_state(state: StreamState, kind: type[Frame], mine: bool) -> None:
    session, number = stream_in(state, mine=mine)
    waits = state in (StreamState.OPEN, StreamState.REMOTE_ENDED) and kind is WindowFrame
    if waits:
        session.send(number, b"y" * limits.STREAM_WINDOW_BYTES)
        drain(session)
    frame: Frame = {
        Open: Open(number, "m"),
        DataFrame: DataFrame(number, b"x"),
        End: End(number),
        CancelFrame: CancelFrame(number, "internal_error", "m"),
        WindowFrame: WindowFrame(number, limits.STREAM_WINDOW_BYTES // 2 if waits else 0),
    }[kind]
    events = feed(session, frame)
    session.validate()
    act = STREAM_TABLE[state][kind]
    match act:
        case Act.REFUSE | Act.ACCEPT if act is Act.REFUSE or mine:
            closed_with(events, ProtocolError)
            assert [type(said) for said in sent(session)] == [Bye]
            return
        case Act.IGNORE:
            assert events == []
            assert session.streams.state(number) is state
        case Act.ACCEPT:
            assert events == [Requested(number, "m", b"")]
            assert session.streams.state(number) is StreamState.OPEN
        case Act.TAKE:
            assert events == [MessageReceived(number, b"x")]
            assert session.streams.state(number) is state
        case Act.END:
            assert events == [Ended(number)]
            over = state is StreamState.LOCAL_ENDED
            after = StreamState.CLOSED if over else StreamState.REMOTE_ENDED
            assert session.streams.state(number) is after
        case Act.CANCEL:
            cancelled_with(events, number, PeerError)
            assert session.streams.state(number) is StreamState.CLOSED
        case Act.CREDIT:
            assert events == []
            assert bool(drain(session)) == waits
        case other:
            pytest.fail(f"nothing here says what {other} means")
    assert session.state is SessionState.OPEN


def test_frames_for_a_request_that_has_not_left_yet_are_refused() -> None:
    session = opened()
    number = session.open("m", b"")
    closed_with(feed(session, DataFrame(number, b"x")), ProtocolError)


def test_numbers_of_streams_only_grow() -> None:
    session = opened()
    feed(session, Open(6, "m"))
    closed_with(feed(session, Open(4, "m")), ProtocolError)
