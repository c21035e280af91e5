"""Decides from silence and pings whether the other side of a session is alive, and measures the round trip.

Every byte of the other side is a sign of life. A side that has received nothing for a while sends a ping; the
ping also ends the silence that the other side sees, so mostly only one of the two sends it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from fleetd import limits

# Clocks drift apart by some milliseconds in an hour, so old estimates are forgotten.
_OFFSETS = 8


class LivenessVerdict(Enum):
    WELL = "well"
    QUIET = "quiet"  # from now on
    SILENT = "silent"
    UNANSWERING = "unanswering"  # sends bytes, but no answers to pings


class Liveness:
    """Times are the caller's monotonic clock."""

    def __init__(self, now: float) -> None:
        self.quiet = False
        self.rtt_s: float | None = None
        # The begin of the silence, less the time during which this machine slept.
        self._silent_since = now
        self._nonce = 0
        self._pinged = now
        self._unanswered: dict[int, float] = {}
        # Of the newest pings: the round trip and the other clock less this one, in seconds.
        self._offsets: deque[tuple[float, float]] = deque(maxlen=_OFFSETS)

    def received(self, now: float) -> bool:
        """Bytes arrived; True if that ends a quiet time."""
        self._silent_since = now
        was, self.quiet = self.quiet, False
        return was

    def ping(self, now: float) -> int:
        """A ping is sent; returns its nonce."""
        self._nonce += 1
        self._pinged = now
        self._unanswered[self._nonce] = now
        return self._nonce

    @property
    def clock_offset_s(self) -> float | None:
        """The other side's monotonic clock less this side's, in seconds; None if it never told its time.

        As NTP has it: the answer is taken to have been given in the middle of the round trip, and the
        shortest of the newest round trips, which leaves the least room for error, counts.
        """
        return min(self._offsets)[1] if self._offsets else None

    def pong(self, nonce: int, now: float, at_s: float = 0.0) -> float | None:
        """The round trip in seconds; None if a later ping was answered already.

        Args:
            at_s: when the other side answered, by its clock; 0 if it does not tell.

        Raises:
            ValueError: no such ping was sent.
        """
        if nonce > self._nonce:
            raise ValueError(f"ping {nonce} was not sent")
        asked = self._unanswered.get(nonce)
        if asked is None:
            return None
        self._unanswered = {later: at for later, at in self._unanswered.items() if later > nonce}
        self.rtt_s = now - asked
        if at_s:
            self._offsets.append((self.rtt_s, at_s - (asked + now) / 2))
        return self.rtt_s

    @property
    def ping_due(self) -> float:
        wanted = min(self._silent_since + limits.PING_S, self._pinged + limits.RTT_PING_S)
        return max(wanted, self._pinged + limits.PING_S)

    def next_deadline(self) -> float:
        return min(self.ping_due, self._silent_since + (limits.DEAD_S if self.quiet else limits.SUSPECT_S))

    def judge(self, now: float) -> LivenessVerdict:
        """The verdict at ``now``; call it at `next_deadline`."""
        # This machine may have slept: its own delay is not the other side's silence.
        at = min(now, self.next_deadline())
        # The same sums as in next_deadline: a difference could round to just below, again and again.
        silent = at >= self._silent_since + limits.DEAD_S
        suspect = at >= self._silent_since + limits.SUSPECT_S
        self._silent_since = min(now, self._silent_since + (now - at))
        if silent:
            return LivenessVerdict.SILENT
        if len(self._unanswered) >= limits.PINGS_UNANSWERED:
            return LivenessVerdict.UNANSWERING
        if suspect and not self.quiet:
            self.quiet = True
            return LivenessVerdict.QUIET
        return LivenessVerdict.WELL
