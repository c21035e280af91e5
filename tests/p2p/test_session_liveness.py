"""A control session notices a peer that is silent, or gone, and no other."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wired import (
    closed_with,
    drain,
    feed,
    hello,
    opened,
    sent,
)

from fleetd import limits
from fleetd.errors import (
    PeerLost,
    ProtocolError,
)
from fleetd.p2p.session.events import Closed, Event, Measured, Notified, Quiet, Resumed
from fleetd.p2p.session.frames import NotifyFrame, Ping, Pong
from fleetd.p2p.session.liveness import Liveness, LivenessVerdict
from fleetd.p2p.session.session import Session, SessionState

KIB = limits.KIB


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


@given(st.integers(2, 40), st.floats(0, 3), st.floats(0, 0.01))
@example(10, 1.7, 0.0)
def test_a_silent_peer_is_found_dead_whatever_the_clock_shows(
    power: int, before_s: float, late_s: float
) -> None:
    """Just before a power of two, sums and differences of times round differently."""
    now = began = 2.0**power - before_s
    life = Liveness(began)
    verdicts = []
    for _ in range(20):
        now = max(now, life.next_deadline()) + late_s
        if now >= life.ping_due:
            life.ping(now)
        verdicts.append(life.judge(now))
        if verdicts[-1] is LivenessVerdict.SILENT:
            break
    assert verdicts.count(LivenessVerdict.QUIET) == 1
    assert verdicts[-1] is LivenessVerdict.SILENT
    assert abs(now - began - limits.DEAD_S) <= 20 * late_s + 0.01


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
    assert feed(session, NotifyFrame("t"), now=4.9) == [Resumed(), Notified("t", b"")]
    assert not session.life.quiet
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
        feed(session, NotifyFrame("t"), now=at)
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


def test_the_shortest_round_trip_tells_how_far_the_other_clock_is_ahead() -> None:
    """As NTP has it: half of the round trip is the most that an estimate can be wrong."""
    session = opened()  # ping 1 went out at 0
    assert session.life.clock_offset_s is None
    feed(session, Pong(1, 1000.9), now=1.0)
    assert session.life.clock_offset_s == pytest.approx(1000.4)
    session.tick(1.0 + limits.RTT_PING_S)
    at = 1.0 + limits.RTT_PING_S
    feed(session, Pong(2, 1000.0 + at + 0.05), now=at + 0.1)
    assert session.life.clock_offset_s == pytest.approx(1000.0)


def test_a_machine_that_does_not_tell_its_time_has_no_offset() -> None:
    session = opened()
    feed(session, Pong(1), now=1.0)
    assert (session.life.rtt_s, session.life.clock_offset_s) == (1.0, None)


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
