"""Runs a job: find the model, reserve a ledger row, fetch the embedded default if need be, stream, settle.

    admitted ─▶ located ─▶ reserved ─▶ (pulled) ─▶ streaming ─▶ settled: finished or cancelled
        │           └ ModelNotFound         └────────────┴────▶ refunded: an error, no tokens billed
        └ Draining, Overloaded

Leaving the generator at any point (``aclose()``, a cancelled task) cancels the engine's work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from fleetd import limits
from fleetd.engine.protocol import Event, Failed, Finished, Generate, Loading, Timings, Usage
from fleetd.errors import Draining, EngineDied, EngineError, FleetError, ModelNotFound, Overloaded, from_code
from fleetd.jobs.flight import Flight, Gauges
from fleetd.jobs.job import Job
from fleetd.jobs.pulls import Pulls, Source
from fleetd.ledger import Ledger, Reservation
from fleetd.observe import get_logger

log = get_logger("fleetd.jobs")

# What a client is told to wait before anything was measured, and the bounds of what it is told later.
_RETRY_S, _RETRY_MAX_S = 5.0, 60.0
# Weight of the newest request in the moving average of request times.
_EWMA = 0.2


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests now, and since start; a cancelled one is neither completed nor failed."""

    running: int = 0
    waiting: int = 0
    completed: int = 0
    failed: int = 0


class Folder(Protocol):
    """``fleetd.models.folder.ModelFolder``, as far as this module looks into it."""

    @property
    def name(self) -> str: ...


class Models(Source, Protocol):
    def resolve(self, ref: str) -> Any: ...
    def needs_pull(self, ref: str) -> bool: ...


class Pool(Protocol):
    def stream(self, folder: Any, request: Generate) -> AsyncGenerator[Loading | Event, None]: ...


class Metrics(Gauges, Protocol):
    def finished(self, model: str, reason: str, usage: Usage, timings: Timings, e2e_s: float) -> None: ...
    def failed(self, code: str) -> None: ...
    def plan(self, kind: str, reason: str) -> None: ...


class Runner:
    """All requests of one daemon.

    Args:
        embedded: model reference → its canonical name if it is one that travels with fleetd; these, and only
            these, are fetched by a request itself.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        models: Models,
        ledger: Ledger,
        metrics: Metrics,
        default_model: str,
        embedded: Callable[[str], str | None],
        node: str = "this",
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.pulls = Pulls(models)
        self._pool = pool
        self._models = models
        self._ledger = ledger
        self._metrics = metrics
        self._default_model = default_model
        self._embedded = embedded
        self._node = node
        self._monotonic = monotonic
        self._now = now
        self._open = 0
        self._flights: set[Flight] = set()
        self._completed = 0
        self._failed = 0
        self._request_s: float | None = None
        self._draining = False
        self._abandoned = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- the daemon's view -------------------------------------------------------------------------------

    @property
    def counts(self) -> RequestCounts:
        running = sum(flight.running for flight in self._flights)
        return RequestCounts(running, self._open - running, self._completed, self._failed)

    @property
    def draining(self) -> bool:
        return self._draining

    def begin_drain(self) -> None:
        """Refuse what comes from now on; what runs goes on."""
        self._draining = True

    async def drained(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    async def abandon(self) -> None:
        """End what still runs: call this, then close the pool; streams end with Draining."""
        self._draining = self._abandoned = True
        await self.pulls.close()

    # ---- one job -----------------------------------------------------------------------------------------

    async def run(self, job: Job) -> AsyncGenerator[Loading | Event, None]:
        """Yield a job's events, the last of them Finished; raises FleetError before or between them."""
        self._admit()
        arrived_s, at_s = self._monotonic(), self._now()
        flight: Flight | None = None
        reservation: Reservation | None = None
        try:
            ref = self._default_model if job.model in ("", "default") else job.model
            folder, name = await asyncio.to_thread(self._locate, ref)
            flight = Flight(name, self._metrics, arrived_s)
            self._flights.add(flight)
            reservation = Reservation(job.request.id, name, self._node, job.route, at_s)
            await self._ledger.reserve(reservation)
            self._metrics.plan("local", "only")
            async with aclosing(self._events(ref, folder, job.request)) as events:
                async for event in events:
                    flight.see(event, self._monotonic())
                    if isinstance(event, Finished):
                        # Settled before it is passed on: whoever reads the last event may never come back.
                        break
                    yield event
            if flight.finished is None:
                raise EngineDied("The engine ended the answer without finishing it.", hint="Try again.")
        except (asyncio.CancelledError, GeneratorExit):
            self._settle(flight, reservation, "cancelled", arrived_s)
            raise
        except Exception as error:
            failure = self._explain(error)
            self._refund(reservation, failure.code, job)
            if failure is error:
                raise
            raise failure from error
        else:
            self._settle(flight, reservation, flight.finished.reason, arrived_s)
        finally:
            self._leave(flight)
        yield flight.finished

    async def _events(
        self, ref: str, folder: Any | None, request: Generate
    ) -> AsyncGenerator[Loading | Event, None]:
        if folder is None:
            async with aclosing(self.pulls.watch(ref)) as steps:
                async for step in steps:
                    stage = f"{step.stage or 'downloading'} {step.file}".strip()
                    yield Loading(stage, step.done_bytes, step.total_bytes)
            folder = await asyncio.to_thread(self._models.resolve, ref)
        async with aclosing(self._pool.stream(folder, request)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise from_code(event.code, event.message, hint=event.hint, param=event.param)
                yield event

    def _locate(self, ref: str) -> tuple[Any | None, str]:
        """The model's folder and canonical name; no folder if it is still to be fetched. Blocks."""
        try:
            folder = self._models.resolve(ref)
        except ModelNotFound:
            if (name := self._embedded(ref)) is not None:
                return None, name
            if self._models.needs_pull(ref):
                raise ModelNotFound(
                    f"The model {ref} is not on this machine.",
                    hint=f"Get it with `fleetctl models pull {ref}`.",
                    param="model",
                ) from None
            raise
        return folder, folder.name

    # ---- admission and accounts --------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._draining:
            raise Draining("The daemon is stopping and takes no new work.", hint="Retry in a moment.")
        waiting = self.counts.waiting
        if waiting >= limits.QUEUED_REQUESTS:
            raise Overloaded(
                f"{waiting} requests are already waiting; the limit is {limits.QUEUED_REQUESTS}.",
                hint="Retry later, or send fewer at once.",
                retry_after_s=min(self._request_s or _RETRY_S, _RETRY_MAX_S),
            )
        self._open += 1
        self._idle.clear()

    def _leave(self, flight: Flight | None) -> None:
        if flight is not None:
            flight.end()
            self._flights.discard(flight)
        self._open -= 1
        if self._open == 0:
            self._idle.set()

    def _settle(
        self, flight: Flight | None, reservation: Reservation | None, reason: str, arrived_s: float
    ) -> None:
        if flight is None:
            return
        now_s = self._monotonic()
        took_s = now_s - arrived_s
        usage, timings = flight.so_far(now_s)
        if reservation is not None:
            self._ledger.settle(reservation, usage, timings, reason)
        self._metrics.finished(flight.model, reason, usage, timings, took_s)
        if reason != "cancelled":
            self._completed += 1
            known_s = took_s if self._request_s is None else self._request_s
            self._request_s = known_s + _EWMA * (took_s - known_s)

    def _refund(self, reservation: Reservation | None, code: str, job: Job) -> None:
        self._failed += 1
        self._metrics.failed(code)
        if reservation is not None:
            self._ledger.refund(reservation, code)
        log.info("request.failed", request=job.request.id, code=code, route=job.route)

    def _explain(self, error: Exception) -> FleetError:
        """The error as the client shall see it."""
        if self._abandoned and isinstance(error, EngineError):
            return Draining("The daemon stopped before the answer was complete.", hint="Ask again shortly.")
        if isinstance(error, FleetError):
            return error
        # A bug: its text may hold anything, so only its type goes out and into the log.
        log.error("request.bug", type=type(error).__name__)
        return FleetError(f"Internal error ({type(error).__name__}).", hint="Please report it.")
