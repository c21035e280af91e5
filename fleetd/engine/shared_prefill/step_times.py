"""Where the time of a shared prefill goes, on an injected clock."""

from __future__ import annotations

from collections.abc import Callable

from fleetd.engine.protocol import StepTime
from fleetd.plan.prefill import step_names


class SpentTime:
    """Seconds spent on one kind of work, and when that began and ended."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.began_s = self.ended_s = 0.0

    def add(self, began_s: float, ended_s: float) -> None:
        if not self.ended_s:
            self.began_s = began_s
        self.ended_s = ended_s
        self.seconds += ended_s - began_s

    def step(self, name: str, n_bytes: int = 0) -> StepTime:
        return StepTime(name, self.seconds, n_bytes, self.began_s, self.ended_s)


class WaitClock:
    """How long there was nothing to do but wait for other machines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.since: float | None = None
        self._past = SpentTime()

    @property
    def total_s(self) -> float:
        """Until the present wait began."""
        return self._past.seconds

    def idle(self, idle: bool) -> None:
        if idle and self.since is None:
            self.since = self._clock()
        elif not idle and self.since is not None:
            self._past.add(self.since, self._clock())
            self.since = None

    def until(self, now: float) -> float:
        return self.total_s + (0.0 if self.since is None else now - self.since)

    def step(self, now: float, n_bytes: int) -> StepTime:
        """The waits until ``now``."""
        past, since = self._past, self.since
        if since is None:
            return past.step(step_names.WAITED, n_bytes)
        return StepTime(
            step_names.WAITED, self.until(now), n_bytes, past.began_s if past.ended_s else since, now
        )


class HomeTimes:
    """Times of the home worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self.waits = WaitClock(clock)
        self._sent: float | None = None
        self._computed = SpentTime()
        # When nothing was left to compute here, and when all had arrived.
        self._own_end: float | None = None
        self._end: float | None = None
        # Of the first tokens, and of later ones.
        self.checked, self.later = SpentTime(), SpentTime()
        self.to_send = 0
        self.received = 0

    def sent(self) -> None:
        """What the helpers need has left this machine."""
        if self._sent is None:
            self._sent = self._clock()

    def computed(self, began_s: float, *, last: bool) -> None:
        now = self._clock()
        self._computed.add(began_s, now)
        if last:
            self._own_end = now

    def finished(self) -> None:
        if self._end is None:
            self._end = self._clock()

    def steps(self) -> list[StepTime]:
        end = self._clock() if self._end is None else self._end
        own_end = end if self._own_end is None else min(self._own_end, end)
        tail_s = max(0.0, end - own_end - self.later.seconds)
        sent = end if self._sent is None else self._sent
        waited = self.waits.step(end, self.received)
        # Waits at the end are the exposed hand-off.
        waited_s = max(0.0, waited.seconds - tail_s)
        waited_until = max(waited.began_s, min(waited.ended_s, own_end))
        return [
            StepTime(step_names.PREFIX_SENT, sent - self._begun, self.to_send, self._begun, sent),
            self.checked.step(step_names.SPOT_CHECK),
            StepTime(step_names.WAITED, waited_s, self.received, waited.began_s, waited_until),
            self._computed.step(step_names.COMPUTED),
            StepTime(step_names.EXPOSED, tail_s, 0, own_end, end),
            self.later.step(step_names.LATER_CHECK),
        ]


class HelperTimes:
    """Times of a helper."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waits = WaitClock(clock)
        self.computed = SpentTime()
        self.received = 0
        self.sent = 0

    def steps(self) -> list[StepTime]:
        return [
            self.waits.step(self._clock(), self.received),
            self.computed.step(step_names.COMPUTED, self.sent),
        ]
