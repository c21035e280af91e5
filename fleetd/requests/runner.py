"""Runs a job: find the model, reserve a ledger row, choose a machine, stream, settle.

    admitted ─▶ located ─▶ reserved ─▶ placed ─▶ (pulled) ─▶ streaming ─▶ settled: finished or cancelled
        │                              │   ▲                     │
        └ Draining, Overloaded         │   └── another machine ◄─┤ failed before its first token
                                       └ ModelNotFound,          └─▶ refunded: an error, no tokens billed
                                         NoMachine

A job that asks for it has its prompt shortened first, which fails no job. Each attempt passes the steps of
the pipeline: one that runs here may have its prefill shared with other machines. That is decided once its
prompt is tokenized, so only then is it known, and said, how it runs.

Leaving the generator at any point (``aclose()``, a cancelled task) cancels the work, wherever it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import RequestCounts, RunningRequest
from fleetd.control.prefill_trace import Trace
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Accepted, Event, Finished, Generate, Loading
from fleetd.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDied,
    EngineError,
    FleetError,
    Overloaded,
    PeerError,
)
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.images import no_images
from fleetd.models.purposes import check_catalog, check_purpose
from fleetd.plan import load_times
from fleetd.plan.refusals import THIS_NODE
from fleetd.process.observe import get_logger
from fleetd.requests import longer_contexts
from fleetd.requests.accounts import Account, Accounts
from fleetd.requests.answering_machines import AnsweringMachines
from fleetd.requests.attempts import Attempts, RefusedRequest
from fleetd.requests.job import LOCAL, THIS_NAME, Job, Planned
from fleetd.requests.kv_fetching.prompt_survey import PromptSurvey
from fleetd.requests.members.members import Members, SentRequests, expected_load_s
from fleetd.requests.model_locator import ModelLocator
from fleetd.requests.pipeline import Pipeline, PipelineStep
from fleetd.requests.placement.placement import Placement, Placer, PromptPlaces
from fleetd.requests.remote.peer_stream import said_by
from fleetd.requests.remote.remote import RemoteJob
from fleetd.requests.request import LocatedModel, Request
from fleetd.requests.request_views import refused_trace, running_request
from fleetd.requests.smart_prefill.client import SmartPrefill

log = get_logger("fleetd.requests")

# What a client is told to wait before anything was measured, and the bounds of what it is told later.
_RETRY_S, _RETRY_MAX_S = 5.0, 60.0


class RequestRunner:
    """All requests of one daemon: the order of what is done for each.

    Args:
        features: the steps of the pipeline, in the order in which they see an event: helpers are agreed on
            before a drafter is looked for. ``smart`` follows them, since it labels what they announced.
        placer: chooses the machine; None if all requests run here.
        smart: shortens prompts that ask for it; None if all are read whole.
        survey: asks, before a prompt is placed, where it is kept.
        record: keeps the trace of a request that has ended (``traces.Traces.record``).
        name: of this machine.
    """

    def __init__(
        self,
        pool: EnginePool,
        locator: ModelLocator,
        accounts: Accounts,
        members: Members,
        features: Sequence[PipelineStep] = (),
        *,
        placer: Placer | None = None,
        smart: SmartPrefill | None = None,
        survey: PromptSurvey | None = None,
        record: Callable[[Trace], None] = lambda trace: None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        name: str = THIS_NAME,
    ) -> None:
        self._name = name
        self._pool = pool
        self._locator = locator
        self._accounts = accounts
        self._members = members
        self._placer = placer
        self._smart = smart
        self._survey = survey
        self._answering = AnsweringMachines(members, placer, monotonic=monotonic)
        last = (self._answering,) if smart is None else (smart, self._answering)
        self._pipeline = Pipeline([*features, *last], record, monotonic=monotonic)
        self._monotonic = monotonic
        self._now = now
        self._open = 0
        self._requests: set[Request] = set()
        members.requests_at = self._requests_at
        self._draining = False
        self._abandoned = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- the daemon's view -------------------------------------------------------------------------------

    @property
    def counts(self) -> RequestCounts:
        running = sum(request.running for request in self._requests)
        return RequestCounts(running, self._open - running, self._accounts.completed, self._accounts.failed)

    def running(self) -> list[RunningRequest]:
        """The requests that have not ended, oldest first, as the page shows them."""
        now_s = self._monotonic()
        found = [running_request(request, now_s) for request in self._requests]
        return sorted(found, key=lambda request: request.at_s)

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
        await self._locator.close()
        await self._answering.close()

    # ---- one job -----------------------------------------------------------------------------------------

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Yield where a job runs, then its events, the last of them Finished.

        Raises FleetError before or between them. Planned comes again when the job moves to another machine,
        or goes on without its helpers, which it does only while nothing of its answer has been yielded.
        Before the first one there may be Loading.
        """
        self._admit()
        arrived_s, at_s = self._monotonic(), self._now()
        account, request = self._accounts.open(job), None
        try:
            request = await self._placed(job, arrived_s=arrived_s, at_s=at_s)
            self._requests.add(request)
            await account.reserve(request)
            async with aclosing(self._attempts(request)) as events:
                async for event in events:
                    if isinstance(event, Planned):
                        account.planned(event, expecting=request.expecting)
                    if isinstance(event, Finished):
                        # Settled before it is passed on: the client may not read on after the last event.
                        break
                    yield event
            if request.finished is None:
                raise EngineDied("The engine ended the answer without finishing it.", hint="Try again.")
        except (asyncio.CancelledError, GeneratorExit):
            if request is not None:
                account.settle(request, "cancelled")
            raise
        except Exception as error:
            failure = self._explain(error)
            if isinstance(failure, ContextLengthExceeded) and request is not None:
                failure = await self._advised(failure, request)
            if request is not None:
                request.ended_badly(failure)
            else:
                self._refused(job, account, failure, arrived_s=arrived_s, at_s=at_s)
            account.refund(failure.code)
            if failure is error:
                raise
            raise failure from error
        else:
            account.settle(request, request.finished.reason)
        finally:
            if request is not None:
                self._pipeline.end(request)
            self._leave(request)
        yield request.finished

    def _refused(
        self, job: Job, account: Account, error: FleetError, *, arrived_s: float, at_s: float
    ) -> None:
        """Write down a request for which no model or no machine was found: each failure that is counted has
        a row."""
        name = self._locator.named(job.model)[: limits.CARD_TEXT_CHARS]
        account.refused(name, at_s)
        times = (arrived_s, self._monotonic())
        self._pipeline.write(job, refused_trace(job, name, self._name, error, at_s=at_s, times=times))

    async def _placed(self, job: Job, *, arrived_s: float, at_s: float) -> Request:
        """The request, its model located and its first machine chosen. Raises FleetError."""
        model = await file_threads.look(self._locator.locate, job.model, job.digest)
        self._check_answers(model, job)
        places = await self._survey.of_job(job, model.name) if self._survey is not None else {}
        placement = self._choose(job, model, places)
        metrics = self._accounts.metrics
        return Request(
            job, model, placement, metrics, arrived_s=arrived_s, at_s=at_s, places=places, here=self._name
        )

    def _check_answers(self, model: LocatedModel, job: Job) -> None:
        """Raises ModelUnsupported for a model that answers no chats, wherever it is, and UnsupportedParameter
        for images to one that reads none."""
        if model.folder is not None:
            check_purpose(model.name, model.folder.shape.purpose, "chat")
            if job.images and not model.folder.images:
                raise no_images(model.name, "messages")
            return
        check_catalog(model.name, "chat")
        for member in self._members.others("answer"):
            if (card := member.model(model.name)) is not None:
                check_purpose(model.name, card.shape.purpose, "chat")
                if job.images and not card.shape.images:
                    raise no_images(model.name, "messages", f"{member.name} says so.")

    async def _attempts(self, request: Request) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The request's events from the first attempt that gives any of its answer."""
        if self._smart is not None and request.asked.smart is not None:
            async with aclosing(self._smart.shorten(request)) as progress:
                async for step in progress:
                    if request.planned is None:
                        # A stream's headers leave with the first progress: what they say has to stand.
                        yield request.expected()
                    yield step
            self._place_again(request)
        while True:
            await self._pipeline.examine(request)
            try:
                with self._pipeline.attempt(request):
                    for planned in request.take_announced():
                        yield planned
                    async with aclosing(self._source(request)) as events:
                        async for event in events:
                            if isinstance(event, Accepted):
                                await self._pipeline.decide(request, event)
                            for passed in self._pipeline.on_event(request, event):
                                yield passed
            except FleetError as failure:
                self._try_again(request, failure)
            else:
                return

    def _source(self, request: Request) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Where the events of this attempt come from."""
        placement, folder = request.placement, request.folder_here
        if placement.node_id != THIS_NODE and self._placer is not None:
            there, busy = self._members.model_at(placement.node_id, request.model.name)
            request.attempt.remote = RemoteJob(
                partial(self._placer.request, placement.node_id),
                request.job,
                request.model.name,
                placement.digest,
                placement.planned,
                there.shape.context_tokens if there is not None else 0,
                busy=busy,
                prefill_s=placement.prefill_s,
                load_within_s=load_times.stall_s(expected_load_s(there) if there is not None else 0.0),
                unaided=self._members.unaided(),
            )
            events = request.attempt.remote.events()
            return self._woken(request, events) if placement.asleep else events
        return self._pulled(request) if folder is None else self._loaded(request, folder)

    def _loaded(self, request: Request, folder: ModelFolder) -> AsyncGenerator[Loading | Event, None]:
        """Events of this machine's engine, with the machines that the request names."""
        return self._pool.stream(folder, self._asked(request), request.placement.over)

    def _asked(self, request: Request) -> Generate:
        """What this machine's engine is asked for."""
        local_only = self._members.local_only or not request.job.shareable
        return msgspec.structs.replace(request.attempt.generate, local_only=local_only)

    async def _woken(
        self, request: Request, events: AsyncGenerator[Planned | Loading | Event, None]
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The events of a machine that is woken first."""
        placement = request.placement
        if self._placer is not None and self._placer.wake is not None:
            yield Loading(f"waking {placement.planned.nodes[0]}")
            await self._placer.wake(placement.node_id)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _pulled(self, request: Request) -> AsyncGenerator[Loading | Event, None]:
        """Events of a model that is downloaded first."""
        async with aclosing(self._locator.pull(request.model.ref)) as steps:
            async for step in steps:
                if isinstance(step, Loading):
                    yield step
                else:
                    folder = step
        async with aclosing(self._loaded(request, folder)) as events:
            async for event in events:
                yield event

    @property
    def unread_tokens(self) -> int:
        """Tokens that are left of the prompts which this machine's engines prefill now."""
        here = (each for each in self._requests if each.running and each.placement.node_id == THIS_NODE)
        return sum(request.unread_tokens for request in here)

    def _requests_at(self, node_id: str) -> SentRequests:
        there = [request for request in self._requests if request.placement.node_id == node_id]
        return SentRequests(len(there), sum(request.unread_tokens for request in there))

    # ---- where, and what is tried next -------------------------------------------------------------------

    def _try_again(self, request: Request, failure: FleetError) -> None:
        """Prepare the next attempt. Raises the failure, naming its machine, if none is left to make."""
        try:
            self._move(request, failure)
        except FleetError as error:
            self._try_whole(request, error)

    def _move(self, request: Request, failure: FleetError) -> None:
        """Move the request to another machine. Raises FleetError if none is left."""
        placement, attempts = request.placement, request.attempts
        error = _with_machine(failure, placement)
        if self._placer is not None:
            self._placer.failed(placement.node_id, failure, placement.digest)
        proven = self._members.proven(placement.node_id)
        following = attempts.after(placement.node_id, error, answering=request.answering, proven=proven)
        if following == "stop":
            raise error from failure
        confirms = following != "elsewhere"
        # No model is downloaded for a request that may be wrong.
        model = replace(request.model, can_pull=False) if confirms else request.model
        found = self._choose(request.job, model, request.places, attempts.tried, error)
        if following == "confirm_loaded" and not self._members.has_loaded(found.node_id, model.name):
            raise error from failure
        if confirms:
            attempts.refusal = RefusedRequest(placement.node_id, placement.digest, error)
        log.warning("request.elsewhere", request=request.id, left=placement.planned.nodes[0], code=error.code)
        request.placement = found
        self._accounts.metrics.fallback(error.code)

    def _place_again(self, request: Request) -> None:
        """After the prompt has changed. Raises FleetError if no machine is left.

        Less to read may be read faster elsewhere. But if single tokens are left out, only the machine that
        was chosen for that knows which.
        """
        if request.job.request.keep is not None:
            return
        try:
            request.placement = self._choose(request.job, request.model, request.places)
        except FleetError as error:
            self._try_whole(request, error)

    def _try_whole(self, request: Request, error: FleetError) -> None:
        """Prepare an attempt with the whole prompt after a shortened one failed, or raise the error."""
        if self._smart is None or not self._smart.try_whole(request, error):
            raise error
        # The whole prompt is another one: a machine that failed at the shortened one may serve it.
        request.attempts = Attempts()
        self._place_again(request)

    def _choose(
        self,
        job: Job,
        model: LocatedModel,
        places: PromptPlaces,
        tried: frozenset[str] = frozenset(),
        why: FleetError | None = None,
    ) -> Placement:
        """Choose the machine.

        Args:
            tried: machines that are left out.
            why: what the last of them failed with.

        Raises FleetError if no machine is left: ``why``, or why the model is missing.
        """
        why = why or model.missing
        if self._placer is not None:
            return self._placer.choose(job, model.wanted, tried=tried, why=why, places=places)
        if why is not None and not (model.can_pull and not tried):
            raise why
        return Placement(THIS_NODE, LOCAL)

    # ---- admission -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._draining:
            raise Draining("The daemon is stopping and takes no new work.", hint="Retry in a moment.")
        waiting = self.counts.waiting
        if waiting >= limits.QUEUED_REQUESTS:
            raise Overloaded(
                f"{waiting} requests are already waiting; the limit is {limits.QUEUED_REQUESTS}.",
                hint="Retry later, or send fewer at once.",
                retry_after_s=min(self._accounts.request_s or _RETRY_S, _RETRY_MAX_S),
            )
        self._open += 1
        self._idle.clear()

    def _leave(self, request: Request | None) -> None:
        if request is not None:
            request.leave()
            self._requests.discard(request)
        self._open -= 1
        if self._open == 0:
            self._idle.set()

    def _explain(self, error: Exception) -> FleetError:
        """The error as the client shall see it."""
        if self._abandoned and isinstance(error, EngineError):
            return Draining("The daemon stopped before the answer was complete.", hint="Ask again shortly.")
        if isinstance(error, FleetError):
            return error
        # A bug: its text may hold anything, so only its type goes out and into the log.
        log.error("request.bug", type=type(error).__name__)
        return FleetError(f"Internal error ({type(error).__name__}).", hint="Please report it.")

    async def _advised(self, error: ContextLengthExceeded, request: Request) -> FleetError:
        """The error, with the models of this machine that take the prompt."""
        try:
            installed = await file_threads.look(self._locator.installed)
        except FleetError:
            return error
        return longer_contexts.advised(
            error, request.model.name, installed, smart=request.asked.smart is not None
        )


def _with_machine(error: FleetError, placement: Placement) -> FleetError:
    """The error with the name of the machine whose fault it is; as it is if it is no other machine's."""
    if placement.node_id == THIS_NODE or not isinstance(error, PeerError):
        return error
    return said_by(placement.planned.nodes[0], error)
