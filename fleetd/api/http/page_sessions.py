"""Who has opened the page: one-use tickets, and the sessions that they become.

    fleetctl open ─▶ ticket ─ within PAGE_TICKET_S, once ─▶ cookie + key ─ unused for PAGE_SESSION_S ─▶ ended

A session has two secrets. Browsers send a cookie to every port of a host, so that another user's server on
127.0.0.1 could read it: alone it opens nothing. The key is kept by the page, which browsers separate by port,
and comes in a header, which no other page can send. Pure: the clock and the random source are arguments.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fleetd import limits


class PageLogin(msgspec.Struct, frozen=True):
    """The two secrets of a session, told once."""

    cookie: str
    key: str


@dataclass(slots=True)
class _OpenPage:
    key_digest: bytes
    ends_s: float


class PageSessions:
    """Tickets and sessions of one daemon, in memory: they end with it. Holds digests, no secret."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        secret: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self._monotonic = monotonic
        self._secret = secret
        self._tickets: dict[bytes, float] = {}
        self._sessions: dict[bytes, _OpenPage] = {}

    def issue(self) -> str:
        """A new ticket. The oldest one is forgotten where there are too many."""
        self._forget()
        ticket = self._secret()
        self._tickets[_digest(ticket)] = self._monotonic() + limits.PAGE_TICKET_S
        while len(self._tickets) > limits.PAGE_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        return ticket

    def redeem(self, ticket: str) -> PageLogin | None:
        """A session for a ticket; None if it was used before, is too old, or never was one."""
        self._forget()
        if self._tickets.pop(_digest(ticket), None) is None:
            return None
        login = PageLogin(self._secret(), self._secret())
        ends_s = self._monotonic() + limits.PAGE_SESSION_S
        self._sessions[_digest(login.cookie)] = _OpenPage(_digest(login.key), ends_s)
        while len(self._sessions) > limits.PAGE_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return login

    def use(self, cookie: str, key: str) -> bool:
        """True for the two secrets of one session, which then lasts PAGE_SESSION_S from now."""
        self._forget()
        found = self._sessions.get(_digest(cookie))
        if found is None or not hmac.compare_digest(found.key_digest, _digest(key)):
            return False
        found.ends_s = self._monotonic() + limits.PAGE_SESSION_S
        return True

    def end(self, cookie: str) -> None:
        """Log out."""
        self._sessions.pop(_digest(cookie), None)

    def _forget(self) -> None:
        now_s = self._monotonic()
        self._tickets = {each: ends_s for each, ends_s in self._tickets.items() if ends_s > now_s}
        self._sessions = {each: one for each, one in self._sessions.items() if one.ends_s > now_s}


def _digest(secret: str) -> bytes:
    # Looked up by digest, so that the time of a look-up says nothing of a secret.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
