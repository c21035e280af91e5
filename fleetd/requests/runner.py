"""Runs a job: find the model, reserve a ledger row, choose a machine, stream, settle.

    admitted ─▶ located ─▶ reserved ─▶ placed ─▶ (pulled) ─▶ streaming ─▶ settled: finished or cancelled
        │                              │   ▲                     │
        └ Draining, Overloaded         │   └── another machine ◄─┤ failed before its first token
                                       └ ModelNotFound,          └─▶ refunded: an error, no tokens billed
                                         NoMachine

A job that asks for it has its prompt shortened first (``smart``), which fails no job. One that runs here may
have its prefill shared with other machines (``sharing``); that is decided once its prompt is tokenized, so
only then is it known, and said, how it runs.

Leaving the generator at any point (``aclose()``, a cancelled task) cancels the work, wherever it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from fleetd import limits
from fleetd.control.daemon_status import RequestCounts
from fleetd.control.prefill_trace import Speculated
from fleetd.engine.protocol import Delta, Event, Failed, Finished, Generate, Loading, Timings, ToolCall, Usage
from fleetd.errors import (
    BadRequest,
    Draining,
    EngineDied,
    EngineError,
    FleetError,
    ModelNotFound,
    ModelRefused,
    ModelUnsupported,
    Overloaded,
    PeerError,
    from_code,
)
from fleetd.ledger import Ledger, Reservation
from fleetd.observe import get_logger
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests import remote
from fleetd.requests.drafting.client import DrafterService
from fleetd.requests.job import LOCAL, THIS_NAME, Job, Planned
from fleetd.requests.members import Members
from fleetd.requests.placement import Placement, Placer, canonical
from fleetd.requests.progress import Gauges, RequestProgress
from fleetd.requests.pulls import ModelSource, Pulls
from fleetd.requests.smart_prefill.client import AnsweringModel, SmartPrefill

log = get_logger("fleetd.requests")

# What a client is told to wait before anything was measured, and the bounds of what it is told later.
_RETRY_S, _RETRY_MAX_S = 5.0, 60.0
# Weight of the newest request in the moving average of request times.
_EWMA = 0.2


@dataclass(frozen=True, slots=True)
class _Located:
    """``name`` is canonical. No folder: not on this machine; ``can_pull`` if a request may fetch it."""

    ref: str
    name: str
    folder: Any | None
    can_pull: bool
    missing: FleetError | None


class Folder(Protocol):
    """``fleetd.models.folder.ModelFolder``, as far as this module looks into it."""

    @property
    def name(self) -> str: ...


class Models(ModelSource, Protocol):
    def resolve(self, ref: str) -> Any: ...
    def needs_pull(self, ref: str) -> bool: ...
    def digest(self, folder: Any) -> object: ...


class Pool(Protocol):
    def stream(self, folder: Any, request: Generate) -> AsyncGenerator[Loading | Event, None]: ...


class Sharer(Protocol):
    """``fleetd.requests.prefill_sharing.client.PrefillSharing``."""

    def possible(self, job: Job, folder: Any) -> bool: ...
    def stream(
        self, job: Job, folder: Any, alone: Planned, arrived_s: float
    ) -> AsyncGenerator[Planned | Loading | Event, None]: ...


class Metrics(Gauges, Protocol):
    def finished(self, model: str, reason: str, usage: Usage, timings: Timings, e2e_s: float) -> None: ...
    def failed(self, code: str) -> None: ...
    def plan(self, kind: str, reason: str) -> None: ...
    def speculated(self, told: Speculated) -> None: ...
    def fallback(self, reason: str) -> None: ...


# What another machine would say as well: trying there only makes people wait longer for the same answer.
_DETERMINISTIC = (BadRequest, ModelRefused, ModelUnsupported)


class Runner:
    """All requests of one daemon.

    Args:
        embedded: model reference → its canonical name if it is one that travels with fleetd; these, and only
            these, are fetched by a request itself.
        source: where downloads come from; ``models`` itself if not given.
        placing: None for a machine that runs everything itself.
        sharing: None for one whose prompts nobody helps with.
        smart: shortens prompts that ask for it; without, they are read whole.
        drafting: finds drafters for answers that are decoded here.
        speeds: told what each answer that was computed here took.
        members: told which machine answered.
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
        source: ModelSource | None = None,
        placing: Placer | None = None,
        sharing: Sharer | None = None,
        smart: SmartPrefill | None = None,
        drafting: DrafterService | None = None,
        speeds: ModelSpeeds | None = None,
        members: Members | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.pulls = Pulls(source or models)
        self._pool = pool
        self._models = models
        self._ledger = ledger
        self._metrics = metrics
        self._default_model = default_model
        self._embedded = embedded
        self._placing = placing
        self._sharing = sharing
        self._smart = smart
        self._drafting = drafting
        self._speeds = speeds or ModelSpeeds()
        self._members = members or Members()
        self._monotonic = monotonic
        self._now = now
        self._open = 0
        self._flights: set[RequestProgress] = set()
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

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Yield where a job runs, then its events, the last of them Finished.

        Raises FleetError before or between them. Planned comes again when the job moves to another machine,
        or goes on without its helpers, which it does only while nothing of its answer has been yielded.
        Before the first one there may be Loading.
        """
        self._admit()
        arrived_s, at_s = self._monotonic(), self._now()
        flight: RequestProgress | None = None
        reservation: Reservation | None = None
        try:
            ref = self._default_model if job.model in ("", "default") else job.model
            located = await asyncio.to_thread(self._locate, ref, job.digest)
            choice = self._choose(job, located, frozenset(), located.missing)
            flight = RequestProgress(located.name, self._metrics, arrived_s)
            self._flights.add(flight)
            reservation = Reservation(job.request.id, located.name, self._node_of(choice), job.route, at_s)
            await self._ledger.reserve(reservation)
            told: Planned | None = None
            async with aclosing(self._answer(job, located, choice, arrived_s)) as events:
                async for event in events:
                    if isinstance(event, Planned):
                        reservation = replace(reservation, node=self._named(event))
                        if told is None or (told.kind, told.reason) != (event.kind, event.reason):
                            self._metrics.plan(event.kind, "fallback" if event.reason else "only")
                        told = event
                        flight.shared = flight.shared or event.shared
                        yield event
                        continue
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

    def _answer(
        self, job: Job, located: _Located, choice: Placement, arrived_s: float
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The job's events, its prompt shortened first where that is asked for."""
        if self._smart is None or job.smart is None:
            return self._attempts(job, located, choice, arrived_s)

        def attempts(this: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
            # Less to read may be read faster elsewhere; but which tokens to leave out, the machine that was
            # chosen for it knows.
            where = choice
            if this.request.keep is None:
                where = self._choose(this, located, frozenset(), located.missing)
            return self._attempts(this, located, where, arrived_s)

        target = AnsweringModel(located.name, located.folder, choice)
        return self._smart.stream(job, job.smart, target, arrived_s, attempts)

    async def _attempts(
        self, job: Job, located: _Located, choice: Placement, arrived_s: float
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The job's events from the first machine that gives any of its answer."""
        tried: set[str] = set()
        while True:
            answering = False
            try:
                async with aclosing(self._source(job, located, choice, arrived_s)) as events:
                    async for event in events:
                        answering = answering or isinstance(event, Delta | ToolCall)
                        if isinstance(event, Finished):
                            self._members.answered(choice.node_id, located.name, job)
                        yield event
            except FleetError as failure:
                error = _of(failure, choice)
                if self._placing is not None:
                    self._placing.failed(choice.node_id, failure)
                tried.add(choice.node_id)
                if answering or isinstance(error, _DETERMINISTIC) or len(tried) >= limits.ATTEMPTS:
                    raise error from failure
                log.warning(
                    "request.elsewhere", request=job.request.id, left=choice.planned.nodes[0], code=error.code
                )
                choice = self._choose(job, located, frozenset(tried), error)
                self._metrics.fallback(error.code)
            else:
                return

    async def _source(
        self, job: Job, located: _Located, choice: Placement, arrived_s: float
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        traced = self._smart is not None and job.smart is not None
        if choice.node_id != THIS_NODE and self._placing is not None:
            events = remote.run(
                partial(self._placing.request, choice.node_id),
                job,
                located.name,
                choice.digest,
                choice.planned,
            )
        elif (sharing := self._sharing) and located.folder and sharing.possible(job, located.folder):
            traced = True
            events = sharing.stream(job, located.folder, choice.planned, arrived_s)
        else:
            yield choice.planned
            events = self._events(located.ref, located.folder, job.request)
        if choice.node_id == THIS_NODE and located.folder is not None and self._drafting is not None:
            since_s = None if traced else arrived_s
            events = self._drafting.stream(job, located.folder, events, traced_since_s=since_s)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Failed):
                    raise from_code(event.code, event.message, hint=event.hint, param=event.param)
                yield event

    def _choose(
        self, job: Job, located: _Located, tried: frozenset[str], why: FleetError | None
    ) -> Placement:
        """Raises FleetError where no machine is left."""
        here = located.folder is not None
        if self._placing is None:
            if why is not None and not (located.can_pull and not tried):
                raise why
            return Placement(THIS_NODE, LOCAL)
        return self._placing.choose(
            job, located.name, here=here, can_pull=located.can_pull, tried=tried, why=why
        )

    def _node_of(self, choice: Placement) -> str:
        return self._named(choice.planned)

    def _named(self, planned: Planned) -> str:
        return THIS_NAME if planned.answered_here else planned.nodes[0]

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
                yield event

    def _locate(self, ref: str, digest: str) -> _Located:
        """Where the model is on this machine, if it is, and with that content if it matters. Blocks."""
        try:
            folder = self._models.resolve(ref)
        except ModelNotFound as error:
            if (name := self._embedded(ref)) is not None:
                return _Located(ref, name, None, can_pull=True, missing=error)
            missing = error
            if self._models.needs_pull(ref):
                missing = ModelNotFound(
                    f"The model {ref} is not on this machine.",
                    hint=f"Get it with `fleetctl models pull {ref}`.",
                    param="model",
                )
            return _Located(ref, canonical(ref), None, can_pull=False, missing=missing)
        if digest and str(self._models.digest(folder)) != digest:
            other = ModelNotFound(
                f"This machine has other files under the name {folder.name} than the ones asked for.",
                hint="The two copies come from different revisions; pull one of them again.",
            )
            return _Located(ref, folder.name, None, can_pull=False, missing=other)
        return _Located(ref, folder.name, folder, can_pull=False, missing=None)

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

    def _leave(self, flight: RequestProgress | None) -> None:
        if flight is not None:
            flight.end()
            self._flights.discard(flight)
        self._open -= 1
        if self._open == 0:
            self._idle.set()

    def _settle(
        self, flight: RequestProgress | None, reservation: Reservation | None, reason: str, arrived_s: float
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
            if reservation is not None and reservation.node == THIS_NAME:
                if flight.finished is not None and flight.finished.speculation is not None:
                    self._metrics.speculated(flight.finished.speculation)
                self._speeds.ran(
                    flight.model,
                    prompt_tokens=flight.kept or usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=usage.completion_tokens,
                    prefill_s=timings.prefill_s,
                    decode_s=timings.decode_s,
                    shared=flight.shared,
                )
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


def _of(error: FleetError, choice: Placement) -> FleetError:
    """The same, saying which machine it was, where it is a machine's doing."""
    if choice.node_id == THIS_NODE or not isinstance(error, PeerError):
        return error
    return remote.said_by(choice.planned.nodes[0], error)
