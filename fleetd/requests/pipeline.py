"""The steps that every request passes, and the one place that watches its events.

    prepare ─► engine or other machine ─► on_event, step by step ─► request ─► client
                                                     closed ◄── the attempt ends, in any way
                                                     ended  ◄── the request ends: one trace

A step is a feature: it may change what the engine is asked, hold back or change an event, and announce
another plan. It keeps what it knows of a request in the ``Request``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import Event, Failed, Loading
from fleetd.errors import FleetError, from_code
from fleetd.requests.job import Planned
from fleetd.requests.request import Request
from fleetd.requests.request_trace import attempt_of, trace_of


class PipelineStep:
    """One feature's part in requests; each method does nothing unless a feature overrides it."""

    def prepare(self, request: Request) -> None:
        """Before each attempt."""

    async def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        """The event as it is passed on; None for one that the client does not see."""
        return event

    def closed(self, request: Request) -> asyncio.Task[None] | None:
        """After each attempt, however it ended. A task: the trace waits for what it will find out."""
        return None

    def ended(self, request: Request) -> None:
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
        self._record = record
        self._monotonic = monotonic

    @contextmanager
    def attempt(self, request: Request) -> Iterator[None]:
        """Around the events of one attempt. Notes a FleetError in the request and raises it."""
        request.begin()
        request.began_s = self._monotonic()
        for step in self._steps:
            step.prepare(request)
        if not request.generate.shared:
            # Otherwise it is decided, and said, once the prompt is tokenized.
            request.announce(request.placement.planned)
        try:
            yield
        except FleetError as error:
            request.failed(error)
            raise
        finally:
            tasks = [task for step in self._steps if (task := step.closed(request)) is not None]
            if tasks:
                request.concluding = asyncio.gather(*tasks, return_exceptions=True)
            if request.error is not None:
                request.failed_trace = attempt_of(request, self._monotonic())

    async def on_event(
        self, request: Request, event: Planned | Loading | Event
    ) -> list[Planned | Loading | Event]:
        """What the client is told for it, in order. Raises FleetError for a Failed."""
        if isinstance(event, Failed):
            raise from_code(event.code, event.message, hint=event.hint, param=event.param)
        if isinstance(event, Planned):
            request.announce(event)
            return [*request.take_announced()]
        if isinstance(event, Loading) and request.planned is None and request.asked.origin != "peer":
            return [request.expected(), event]
        for step in self._steps:
            passed = await step.on_event(request, event)
            if passed is None:
                return [*request.take_announced()]
            event = passed
        request.on_event(event, self._monotonic())
        return [*request.take_announced(), event]

    def ended(self, request: Request) -> None:
        """The request is over: write down what came of it, once that is known."""
        request.ended_s = self._monotonic()
        for step in self._steps:
            step.ended(request)
        if request.concluding is None:
            self._write(request)
        else:
            request.concluding.add_done_callback(lambda _: self._write(request))

    def _write(self, request: Request) -> None:
        trace = trace_of(request)
        self._record(trace)
        if request.asked.traced is not None:
            request.asked.traced(trace)
