"""Tickets and sessions of the page, by a clock that the test sets."""

from __future__ import annotations

from pipes import Clock

import pytest

from fleetd import limits
from fleetd.api.http.page_sessions import PageLogin, PageSessions


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> PageSessions:
    return PageSessions(monotonic=clock)


def logged_in(sessions: PageSessions) -> PageLogin:
    login = sessions.redeem(sessions.issue())
    assert login is not None
    return login


def test_a_ticket_makes_one_session(sessions: PageSessions) -> None:
    ticket = sessions.issue()
    login = sessions.redeem(ticket)
    assert login is not None
    assert sessions.use(login.cookie, login.key)
    assert sessions.redeem(ticket) is None


def test_a_ticket_dies_after_its_seconds(sessions: PageSessions, clock: Clock) -> None:
    early, late = sessions.issue(), sessions.issue()
    clock.now = limits.PAGE_TICKET_S - 0.1
    assert sessions.redeem(early) is not None
    clock.now = limits.PAGE_TICKET_S
    assert sessions.redeem(late) is None


def test_neither_secret_opens_anything_alone(sessions: PageSessions) -> None:
    one, other = logged_in(sessions), logged_in(sessions)
    for cookie, key in (
        (one.cookie, ""),
        ("", one.key),
        (one.cookie, other.key),
        (one.key, one.cookie),
        (one.cookie, one.cookie),
    ):
        assert not sessions.use(cookie, key)
    assert sessions.use(one.cookie, one.key)


def test_a_session_ends_when_it_is_not_used(sessions: PageSessions, clock: Clock) -> None:
    used, unused = logged_in(sessions), logged_in(sessions)
    clock.now = limits.PAGE_SESSION_S - 1
    assert sessions.use(used.cookie, used.key)
    clock.now = limits.PAGE_SESSION_S + 1
    assert sessions.use(used.cookie, used.key)
    assert not sessions.use(unused.cookie, unused.key)


def test_logging_out_ends_one_session(sessions: PageSessions) -> None:
    one, other = logged_in(sessions), logged_in(sessions)
    sessions.end(one.cookie)
    assert not sessions.use(one.cookie, one.key)
    assert sessions.use(other.cookie, other.key)


def test_tickets_and_sessions_are_bounded_and_the_oldest_gives_way(sessions: PageSessions) -> None:
    tickets = [sessions.issue() for _ in range(limits.PAGE_TICKETS + 1)]
    assert sessions.redeem(tickets[0]) is None
    assert sessions.redeem(tickets[1]) is not None
    first, *others = [logged_in(sessions) for _ in range(limits.PAGE_SESSIONS + 1)]
    assert not sessions.use(first.cookie, first.key)
    assert all(sessions.use(login.cookie, login.key) for login in others)
