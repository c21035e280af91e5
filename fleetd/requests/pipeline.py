"""The steps that every request passes, and the one place that watches its events.

    prepare ─► engine or other machine ─► on_event, step by step ─► request ─► client
                       └ Accepted ─► decide                  attempt_ended ◄── in any way
                                                             request_ended ◄── after the last one: one trace

A step is a feature: it may change what the engine is asked, hold back or change an event, and announce
another plan. It keeps what it knows of a request in the ``Request``. A step waits for nothing but ``decide``,
once for each attempt: an event, of which there is one for each token, passes without a coroutine, and only
through the steps that name its type.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import Accepted, Delta, Event, Failed, Loading, ToolCall, ToolCallPiece
from fleetd.errors import FleetError, from_code
from fleetd.requests.job import Job, Planned
from fleetd.requests.request import Request
from fleetd.requests.request_views import attempt_of, trace_of

# The events of which a client sees some of the answer.
ANSWER = (Delta, ToolCallPiece, ToolCall)


class PipelineStep:
    """One feature's part in requests; each method does nothing unless a feature overrides it."""

    # The types of the events that ``on_event`` is given.
    events: ClassVar[tuple[type[Loading | Event], ...]] = ()

    async def examine(self, request: Request) -> None:
        """Before each attempt, for what takes a look at files. Raises FleetError."""

    def prepare(self, request: Request) -> None:
        """Before each attempt."""

    def loads(self, request: Request) -> None:
        """The model is being loaded, or waits for that. Before each event that says so."""

    async def decide(self, request: Request, accepted: Accepted) -> None:
        """Before the Accepted is passed on: the engine may wait with the prompt until this returns."""

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        """The event as it is passed on; None for one that the client does not see."""
        return event

    def attempt_ended(self, request: Request) -> asyncio.Task[None] | None:
        """After each attempt, however it ended. A task: the trace waits for what it will find out."""
        return None

    def request_ended(self, request: Request) -> None:
        """After the last attempt."""


class Pipeline:
    """Args:
    steps: in the order in which they see an event.
    record: keeps what came of a request (``traces.Traces.record``).
    """

    def __init__(
        self,
        steps: Sequence[PipelineStep] = (),
        record: Callable[[Trace], None] = lambda trace: None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        kinds = {kind for step in steps for kind in step.events}
        self._steps_of = {kind: [step for step in steps if kind in step.events] for kind in kinds}
        self._record = record
        self._monotonic = monotonic

    async def examine(self, request: Request) -> None:
        """Let the steps look at files; before ``attempt``. Raises FleetError."""
        for step in self._steps:
            await step.examine(request)

    @contextmanager
    def attempt(self, request: Request) -> Iterator[None]:
        """Around the events of one attempt. Notes a FleetError in the request and raises it."""
        request.begin(self._monotonic())
        for step in self._steps:
            step.prepare(request)
        if not request.attempt.generate.shared and not request.undecided:
            # Otherwise it is decided, and said, once the model is loaded or the prompt is tokenized.
            request.announce(request.placement.planned)
        try:
            yield
        except FleetError as error:
            request.failed(error)
            raise
        finally:
            tasks = [task for step in self._steps if (task := step.attempt_ended(request)) is not None]
            if tasks:
                request.attempt.concluding = asyncio.gather(*tasks, return_exceptions=True)
            if request.attempt.error is not None:
                request.failed_trace = attempt_of(request, self._monotonic())

    async def decide(self, request: Request, accepted: Accepted) -> None:
        """Let the steps decide how the prompt is read; before ``on_event`` is given its Accepted."""
        for step in self._steps:
            await step.decide(request, accepted)

    def on_event(self, request: Request, event: Planned | Loading | Event) -> list[Planned | Loading | Event]:
        """What the client is told for it, in order. Raises FleetError for a Failed."""
        if isinstance(event, Failed):
            raise from_code(event.code, event.message, hint=event.hint, param=event.param)
        if isinstance(event, Planned):
            request.announce(event)
            return [*request.take_announced()]
        if isinstance(event, Loading):
            for step in self._steps:
                step.loads(request)
            if request.planned is None and request.asked.origin != "peer":
                return [event] if request.undecided else [request.expected(), event]
        for step in self._steps_of.get(type(event), ()):
            passed = step.on_event(request, event)
            if passed is None:
                return [*request.take_announced()]
            event = passed
        request.on_event(event, self._monotonic())
        return [*request.take_announced(), event]

    def end(self, request: Request) -> None:
        """The request is over: write down what came of it, once that is known."""
        request.ended_s = self._monotonic()
        for step in self._steps:
            step.request_ended(request)
        if request.attempt.concluding is None:
            self._write(request)
        else:
            request.attempt.concluding.add_done_callback(lambda _: self._write(request))

    def write(self, job: Job, trace: Trace) -> None:
        """Keep what came of a job, and tell it to the machine that asked."""
        self._record(trace)
        if job.traced is not None:
            job.traced(trace)

    def _write(self, request: Request) -> None:
        self.write(request.asked, trace_of(request))
