"""Whether the other side of a session is there, and how far away: when to ping, to worry, to give up.

Only what a peer sends counts as a sign of life. Whoever has heard nothing for a while asks; the question
breaks the other side's silence as well, so mostly one of the two asks.
"""

from __future__ import annotations

from enum import Enum

from fleetd import limits


class LivenessVerdict(Enum):
    WELL = "well"
    QUIET = "quiet"  # from now on
    SILENT = "silent"
    UNANSWERING = "unanswering"  # talks, but answers no pings


class Liveness:
    """Times are the caller's monotonic clock."""

    def __init__(self, now: float) -> None:
        self.last_heard = now
        self.quiet = False
        self.rtt_s: float | None = None
        # Since when nothing came, as far as this side was awake to notice.
        self._silent_since = now
        self._nonce = 0
        self._pinged = now
        self._unanswered: dict[int, float] = {}

    def heard(self, now: float) -> bool:
        """Bytes came; whether that ends a quiet time."""
        self.last_heard = self._silent_since = now
        was, self.quiet = self.quiet, False
        return was

    def ping(self, now: float) -> int:
        """A ping leaves: its nonce."""
        self._nonce += 1
        self._pinged = now
        self._unanswered[self._nonce] = now
        return self._nonce

    def pong(self, nonce: int, now: float) -> float | None:
        """The round trip; None where an answer to a later ping has told it already.

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
        return self.rtt_s

    @property
    def ping_due(self) -> float:
        wanted = min(self._silent_since + limits.PING_S, self._pinged + limits.RTT_PING_S)
        return max(wanted, self._pinged + limits.PING_S)

    def next_deadline(self) -> float:
        return min(self.ping_due, self._silent_since + (limits.DEAD_S if self.quiet else limits.SUSPECT_S))

    def judge(self, now: float) -> LivenessVerdict:
        """To be asked at `next_deadline`."""
        # A machine that was itself asleep must not accuse others: its own delay is not their silence.
        at = min(now, self.next_deadline())
        # The same sums as in the deadline: a difference can round to just below, time after time.
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
