"""A control session and its streams end, by either side, at any moment."""

from __future__ import annotations

import pytest
from wired import (
    cancelled_with,
    closed_with,
    drain,
    feed,
    opened,
    request,
    sent,
    wired,
)

from fleetd import errors, limits
from fleetd.errors import (
    InvalidValue,
    NotPaired,
    Overloaded,
    PeerError,
)
from fleetd.p2p.session.events import Closed, MessageReceived, Notified
from fleetd.p2p.session.frames import Bye, CancelFrame, End, NotifyFrame, Open, Ping
from fleetd.p2p.session.session import GOODBYE, SessionState

KIB = limits.KIB


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
    error = cancelled_with(feed(session, CancelFrame(number, "quantum_noise", "What.")), number, PeerError)
    assert error.message == "What."


@pytest.mark.parametrize("code", ["config_error", "invalid_api_key", "internal_error", "request_timeout"])
def test_attack_an_error_that_no_request_of_a_machine_ends_with_is_the_machines(code: str) -> None:
    session = opened()
    number = session.open("m", b"")
    drain(session)
    error = cancelled_with(feed(session, CancelFrame(number, code, "What.")), number, PeerError)
    assert error.code == "peer_error"


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
    assert [type(frame) for frame in sent(wire.b)] == [CancelFrame]
    wire.b.validate()


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
    assert feed(session, Open(2, "m", b"x", True), CancelFrame(2, "withdrawn")) == []


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
        feed(session, CancelFrame(number, "overloaded", "x" * 9999, "y" * 9999)), number, Overloaded
    )
    assert (len(error.message), len(error.hint)) == (limits.ERROR_TEXT_CHARS, limits.ERROR_TEXT_CHARS)


def test_goodbye_is_heard_before_anything_that_waits() -> None:
    wire = wired()
    number = request(wire)
    wire.b.send(number, b"x" * 200_000)
    wire.b.notify("t", b"x")
    assert wire.b.close() == [Closed(None)]
    wire.b.validate()
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
    assert wire.a.receive(first + drain(wire.b), 0.0) == [
        MessageReceived(number, b"x" * 30_000),
        Closed(None),
    ]


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
    assert session.buffered_bytes == 0
    assert session.tick(1000.0) == []
    assert drain(session) == b""


def test_talk_after_the_fault_in_the_same_bytes_is_not_heard() -> None:
    session = opened()
    events = feed(session, NotifyFrame("t"), End(9), NotifyFrame("t"))
    assert [type(event) for event in events] == [Notified, Closed]
