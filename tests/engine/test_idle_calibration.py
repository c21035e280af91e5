"""A doubtful calibration is taken again in idle time, and never in a request's way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fakes import FACTS
from nested_fields import changed

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.measure.calibrate import ONE_SIZE, Measurement
from fleetd.engine.measure.idle_calibration import IdleCalibration
from fleetd.engine.protocol import MeasuredAgain, Report

DOUBT = "other programs had 60 % of the processor"
RUNS = 5
QUIET = Measurement(MeasuredSpeed(1000.0, 50.0, 1e-6, 0.01))
BUSY = Measurement(MeasuredSpeed(300.0, 20.0, 1e-6, 0.01, DOUBT))
BUSIER = Measurement(MeasuredSpeed(200.0, 10.0, 1e-6, 0.01, DOUBT))


class Attempt:
    """A measurement of so many runs with a known end."""

    def __init__(self, found: Measurement) -> None:
        self._found, self.done = found, 0

    def runs(self) -> Iterator[None]:
        for _ in range(RUNS):
            self.done += 1
            yield

    def found(self) -> Measurement:
        assert self.done == RUNS
        return self._found


class CalibratedWorker:
    """A worker that was measured beside other work, on a clock of its own; its attempts end as scripted."""

    def __init__(self, *ends: Measurement, doubt: str = DOUBT) -> None:
        self.now = 100.0
        self.ends = iter(ends)
        self.attempts: list[tuple[float, Attempt]] = []
        self.told: list[Report] = []
        facts: Any = changed(FACTS, prefill_tok_s=BUSY.speed.prefill_tok_s, doubt=doubt)
        self.idle = IdleCalibration(self.begin, facts, self.told.append, clock=lambda: self.now)

    def begin(self) -> Any:
        self.attempts.append((self.now, Attempt(next(self.ends))))
        return self.attempts[-1][1]

    def until_due(self) -> None:
        assert self.idle.due_s is not None
        self.now = max(self.now, self.idle.due_s)

    def attempt(self) -> None:
        self.until_due()
        for _ in range(RUNS + 1):
            self.idle.turn(idle=True)


def test_figures_that_can_be_believed_are_left_alone() -> None:
    worker = CalibratedWorker(doubt="")
    assert worker.idle.due_s is None
    worker.now += 1e6
    worker.idle.turn(idle=True)
    assert not worker.attempts


def test_an_idle_worker_measures_again_and_tells_what_it_found() -> None:
    worker = CalibratedWorker(QUIET)
    worker.idle.turn(idle=True)
    assert not worker.attempts, "it has not been idle for long"
    worker.attempt()
    assert worker.told == [MeasuredAgain(MeasuredSpeed(1000.0, 50.0, 1e-6, 0.01))]
    assert worker.idle.due_s is None


def test_a_request_ends_the_attempt_and_the_next_one_waits_as_long_again() -> None:
    worker = CalibratedWorker(BUSIER, QUIET)
    worker.until_due()
    for _ in range(RUNS):
        worker.idle.turn(idle=True)
    worker.now += 1.0
    worker.idle.turn(idle=False)
    assert worker.idle.due_s == worker.now + limits.CALIBRATE_AGAIN_S
    assert worker.attempts[0][1].done == RUNS, "all but its end"
    worker.attempt()
    assert [type(report) for report in worker.told] == [MeasuredAgain]
    assert worker.attempts[1][1].done == RUNS


def test_attempts_in_doubt_too_come_less_and_less_often_and_tell_only_what_is_faster() -> None:
    better = Measurement(MeasuredSpeed(400.0, 30.0, doubt=DOUBT))
    worker = CalibratedWorker(BUSIER, better, *[BUSY] * 20)
    for _ in range(22):
        worker.attempt()
    # Other work makes a device slower, never faster.
    assert worker.told == [MeasuredAgain(MeasuredSpeed(400.0, 30.0, 0.0, 0.0, DOUBT))]
    begun = [at for at, _ in worker.attempts]
    waits = [after - before for before, after in itertools.pairwise(begun)]
    assert waits[0] == 2 * limits.CALIBRATE_AGAIN_S
    assert waits == sorted(waits)
    assert waits[-1] == limits.CALIBRATE_AGAIN_MOST_S


def test_an_attempt_that_measured_no_chunk_takes_no_figure_away() -> None:
    worker = CalibratedWorker(Measurement(MeasuredSpeed(0.0, 50.0)), QUIET)
    worker.attempt()
    assert worker.told == []
    worker.attempt()
    assert worker.told == [MeasuredAgain(MeasuredSpeed(1000.0, 50.0, 1e-6, 0.01))]


def test_a_device_that_is_too_slow_for_a_second_size_of_chunk_is_not_measured_for_ever() -> None:
    slow = Measurement(MeasuredSpeed(19.0, 2.0, doubt=ONE_SIZE))
    worker = CalibratedWorker(BUSIER, slow, doubt=ONE_SIZE)
    worker.attempt()
    assert worker.idle.due_s is not None, "other programs were in the way"
    worker.attempt()
    assert worker.idle.due_s is None
    assert worker.told == []
