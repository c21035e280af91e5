"""Tickets for bulk connections: a ticket at the peer port proves that a session agreed on the connection.

Sans-IO. A ticket is 32 random bytes that are valid once, for seconds. It is a random 256-bit key of a
dictionary, so the time of a look-up does not help to guess another, and no comparison needs constant time. It
is no secret either: a thief who uses it before its owner still lacks the key of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from fleetd import limits
from fleetd.errors import Overloaded

Purpose = TypeVar("Purpose")

PREFACE = b"FLT1"
TICKET_BYTES = 32
KEY_BYTES = 32


class Tickets(Generic[Purpose]):
    """The tickets that this daemon accepts; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[float, Purpose]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def issue(
        self, purpose: Purpose, now: float, random_bytes: Callable[[int], bytes]
    ) -> tuple[bytes, bytes]:
        """A fresh ticket and a fresh key for its stream. Raises Overloaded."""
        self._expire(now)
        if len(self._open) >= limits.TICKETS:
            raise Overloaded(
                f"{limits.TICKETS} streams are about to be opened already.",
                hint="Try again in a moment.",
                retry_after_s=limits.TICKET_S,
            )
        ticket, key = random_bytes(TICKET_BYTES), random_bytes(KEY_BYTES)
        self._open[ticket] = (now + limits.TICKET_S, purpose)
        return ticket, key

    def take(self, ticket: bytes, now: float) -> Purpose | None:
        """The purpose of a ticket, which is used up; None for one that is unknown, used or expired."""
        self._expire(now)
        found = self._open.pop(ticket, None)
        return found[1] if found is not None else None

    def _expire(self, now: float) -> None:
        """Drop what has expired, and what would last longer than it may, because the clock went back."""
        for ticket, (expires, _) in list(self._open.items()):
            if not 0 < expires - now <= limits.TICKET_S:
                del self._open[ticket]


def preface(ticket: bytes) -> bytes:
    """The first bytes of a bulk connection, before its first sealed chunk."""
    return PREFACE + ticket
