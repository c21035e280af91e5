"""A doubtful calibration is taken again while its worker has nothing else to do.

In single runs, each no longer than a chunk or two: a request that comes waits for the end of one at most. It
ends the attempt, and the next one begins after the worker was idle for a while again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import mlx.core as mx

from fleetd import limits
from fleetd.engine.measure.calibrate import ONE_SIZE, Calibration, Measurement
from fleetd.engine.protocol import MeasuredAgain, Ready, Report


class IdleCalibration:
    """Args:
    begin: a new measurement.
    facts: with the figures that were measured at load.
    emit: better figures are reported to it: other work makes a device slower, never faster.
    keep: stores them for the next load.
    """

    def __init__(
        self,
        begin: Callable[[], Calibration],
        facts: Ready,
        emit: Callable[[Report], None],
        *,
        keep: Callable[[Measurement], None] = lambda found: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin, self._emit, self._keep, self._clock = begin, emit, keep, clock
        self._prefill_tok_s = facts.speed.prefill_tok_s
        self._wait_s = limits.CALIBRATE_AGAIN_S
        self._due_s: float | None = clock() + self._wait_s if facts.speed.doubt else None
        self._attempt: tuple[Calibration, Iterator[None]] | None = None

    @property
    def due_s(self) -> float | None:
        """When the next run is due if the worker stays idle; None once another one would tell no more."""
        return self._due_s

    def turn(self, *, idle: bool) -> None:
        """Measure one run if it is due. ``idle``: the worker has nothing else to do."""
        now = self._clock()
        if self._due_s is None:
            return
        if not idle:
            self._end(now)
        elif now >= self._due_s:
            calibration, runs = self._attempt = self._attempt or self._new()
            if next(runs, self) is self:
                self._conclude(calibration.found())

    def _new(self) -> tuple[Calibration, Iterator[None]]:
        calibration = self._begin()
        return calibration, calibration.runs()

    def _conclude(self, found: Measurement) -> None:
        speed = found.speed
        self._wait_s = min(limits.CALIBRATE_AGAIN_MOST_S, 2 * self._wait_s)
        self._end(self._clock())
        if speed.prefill_tok_s <= 0:
            return  # its time was up before a chunk was measured: the figures of the load stay
        if not speed.doubt or speed.prefill_tok_s > self._prefill_tok_s:
            self._prefill_tok_s = speed.prefill_tok_s
            self._emit(MeasuredAgain(speed))  # chunks stay as they were chosen at load
            self._keep(found)
        if speed.doubt in ("", ONE_SIZE):
            self._due_s = None

    def _end(self, now: float) -> None:
        self._due_s = now + self._wait_s
        if self._attempt is not None:
            self._attempt = None
            mx.clear_cache()
