"""Where the time of a shared prefill goes, on an injected clock."""

from __future__ import annotations

from collections.abc import Callable

from fleetd.engine.protocol import StepTime
from fleetd.plan.prefill import step_names


class WaitClock:
    """How long there was nothing to do but wait for other machines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.since: float | None = None
        # Until the present wait began.
        self.total_s = 0.0

    def idle(self, idle: bool) -> None:
        if idle and self.since is None:
            self.since = self._clock()
        elif not idle and self.since is not None:
            self.total_s += self._clock() - self.since
            self.since = None

    def until(self, now: float) -> float:
        return self.total_s + (0.0 if self.since is None else now - self.since)


class HomeTimes:
    """Times of the home worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self.waits = WaitClock(clock)
        self._sent_s: float | None = None
        self._computed_s = 0.0
        # When nothing was left to compute here, and when all had arrived.
        self._own_end: float | None = None
        self._end: float | None = None
        # Of the first tokens, and of later ones.
        self.checked_s = self.later_s = 0.0
        self.to_send = 0
        self.received = 0

    def sent(self) -> None:
        """What the helpers need has left this machine."""
        if self._sent_s is None:
            self._sent_s = self._clock() - self._begun

    def computed(self, seconds: float, *, last: bool) -> None:
        self._computed_s += seconds
        if last:
            self._own_end = self._clock()

    def finished(self) -> None:
        if self._end is None:
            self._end = self._clock()

    def steps(self) -> list[StepTime]:
        end = self._clock() if self._end is None else self._end
        tail_s = 0.0 if self._own_end is None else max(0.0, end - self._own_end - self.later_s)
        sent_s = end - self._begun if self._sent_s is None else self._sent_s
        return [
            StepTime(step_names.PREFIX_SENT, sent_s, self.to_send),
            StepTime(step_names.SPOT_CHECK, self.checked_s),
            StepTime(step_names.WAITED, max(0.0, self.waits.until(end) - tail_s), self.received),
            StepTime(step_names.COMPUTED, self._computed_s),
            StepTime(step_names.EXPOSED, tail_s),
            StepTime(step_names.LATER_CHECK, self.later_s),
        ]


class HelperTimes:
    """Times of a helper."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waits = WaitClock(clock)
        self.computed_s = 0.0
        self.received = 0
        self.sent = 0

    def steps(self) -> list[StepTime]:
        return [
            StepTime(step_names.WAITED, self.waits.until(self._clock()), self.received),
            StepTime(step_names.COMPUTED, self.computed_s, self.sent),
        ]
