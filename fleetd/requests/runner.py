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
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import RequestCounts
from fleetd.control.fleet_change import RunningRequest
from fleetd.control.prefill_trace import Trace
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Accepted, Event, Finished, Generate, Loading
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    Draining,
    EngineDied,
    EngineError,
    FleetError,
    Incompatible,
    ModelNotFound,
    ModelRefused,
    ModelUnsupported,
    Overloaded,
    PeerError,
    PeerWrong,
)
from fleetd.models import file_threads
from fleetd.models.catalog import check_served
from fleetd.models.model_names import ModelNames, untagged
from fleetd.models.model_store import ModelStore
from fleetd.plan import load_times
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.refusals import THIS_NODE
from fleetd.process.observe import LineBudget, get_logger
from fleetd.requests.drafting.client import DrafterService
from fleetd.requests.job import LOCAL, THIS_NAME, Job, Planned
from fleetd.requests.kv_fetching.client import BlockFetching
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts
from fleetd.requests.kv_fetching.prompt_survey import PromptSurvey
from fleetd.requests.ledger import Ledger, Reservation
from fleetd.requests.members.members import Members, SentRequests, expected_load_s
from fleetd.requests.pipeline import Pipeline
from fleetd.requests.placement.placement import AnswerTokens, Placement, Placer, PromptPlaces, canonical
from fleetd.requests.ports import MetricsPort
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.pulls import ModelSource, Pulls
from fleetd.requests.read_prompts import ReadPrompts
from fleetd.requests.remote.peer_stream import said_by
from fleetd.requests.remote.remote import RemoteJob
from fleetd.requests.remote_traces import RemoteTraces
from fleetd.requests.request import LocatedModel, Request
from fleetd.requests.request_trace import trace_of
from fleetd.requests.running import running_request
from fleetd.requests.smart_prefill.client import SmartPrefill

log = get_logger("fleetd.requests")

# What a client is told to wait before anything was measured, and the bounds of what it is told later.
_RETRY_S, _RETRY_MAX_S = 5.0, 60.0
# Weight of the newest request in the moving average of request times.
_EWMA = 0.2


# What another machine would say as well, if it is true: trying more than one of them only makes people wait
# longer for the same answer. Of these, what may well differ between machines: memory, and versions.
_DETERMINISTIC = (BadRequest, ModelRefused, ModelUnsupported)
_DIFFERS = (ContextLengthExceeded, ModelUnsupported)


class RequestRunner:
    """All requests of one daemon.

    Args:
        names: the models that aliases stand for.
        embedded: model reference → its canonical name if that model travels with fleetd; these, and only
            these, are fetched by a request itself.
        source: where downloads come from; ``models`` itself if not given.
        placing: chooses the machine; None if all requests run here.
        sharing: lets other machines compute parts of a prompt; None if none may.
        smart: shortens prompts that ask for it; None if all are read whole.
        kept: records which prompts are read here.
        survey: asks, before a prompt is placed, where it is kept.
        fetching: brings keys and values that other machines have of a prompt.
        drafting: finds drafters for answers that are decoded here.
        speeds: learns from each answer that was computed here.
        members: learns which machine answered, and how fast.
        record: keeps the trace of a request that has ended (``traces.Traces.record``).
    """

    def __init__(
        self,
        *,
        pool: EnginePool,
        models: ModelStore,
        ledger: Ledger,
        metrics: MetricsPort,
        names: ModelNames,
        embedded: Callable[[str], str | None],
        source: ModelSource | None = None,
        placing: Placer | None = None,
        sharing: PrefillSharing | None = None,
        smart: SmartPrefill | None = None,
        drafting: DrafterService | None = None,
        fetching: BlockFetching | None = None,
        kept: KeptPrompts | None = None,
        survey: PromptSurvey | None = None,
        speeds: ModelSpeeds | None = None,
        members: Members | None = None,
        record: Callable[[Trace], None] = lambda trace: None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.pulls = Pulls(source or models)
        self._pool = pool
        self._models = models
        self._ledger = ledger
        self._metrics = metrics
        self._names = names
        self._embedded = embedded
        self._placing = placing
        self._smart = smart
        # Helpers are agreed on before a drafter is looked for; smart prefill labels what they announced.
        self._remote_traces = RemoteTraces()
        self._members = members or Members()
        own = (self._remote_traces, ReadPrompts(self._members))
        self._survey = survey
        steps = [step for step in (kept, fetching, sharing, drafting, smart, *own) if step is not None]
        self._pipeline = Pipeline(steps, record, monotonic=monotonic)
        self._speeds = speeds or ModelSpeeds()
        self._monotonic = monotonic
        self._failure_lines = LineBudget(limits.FAILURES_LOGGED, monotonic)
        self._now = now
        self._open = 0
        self._requests: set[Request] = set()
        self._members.requests_at = self._requests_at
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
        running = sum(request.running for request in self._requests)
        return RequestCounts(running, self._open - running, self._completed, self._failed)

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
        await self.pulls.close()
        await self._remote_traces.close()

    # ---- one job -----------------------------------------------------------------------------------------

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Yield where a job runs, then its events, the last of them Finished.

        Raises FleetError before or between them. Planned comes again when the job moves to another machine,
        or goes on without its helpers, which it does only while nothing of its answer has been yielded.
        Before the first one there may be Loading.
        """
        self._admit()
        arrived_s, at_s = self._monotonic(), self._now()
        request: Request | None = None
        reservation: Reservation | None = None
        try:
            model = await file_threads.look(self.locate, job.model, job.digest)
            places = await self._survey.of_job(job, model.name) if self._survey is not None else {}
            placement = self._choose(job, model, frozenset(), model.missing, places)
            request = Request(
                job, model, placement, self._metrics, arrived_s=arrived_s, at_s=at_s, places=places
            )
            self._requests.add(request)
            node = _node_of(placement.planned)
            reservation = Reservation(request.id, model.name, node, job.route, at_s)
            await self._ledger.reserve(reservation)
            counted: Planned | None = None
            async with aclosing(self._attempts(request)) as events:
                async for event in events:
                    if isinstance(event, Planned):
                        reservation = replace(reservation, node=_node_of(event))
                        if not request.expecting:
                            counted = self._count_plan(event, counted)
                    if isinstance(event, Finished):
                        self._answered(request, event)
                        # Settled before it is passed on: the client may not read on after the last event.
                        break
                    yield event
            if request.finished is None:
                raise EngineDied("The engine ended the answer without finishing it.", hint="Try again.")
        except (asyncio.CancelledError, GeneratorExit):
            if request is not None:
                self._given_up(request)
            self._settle(request, reservation, "cancelled")
            raise
        except Exception as error:
            failure = self._explain(error)
            self._refund(reservation, failure.code, job)
            if failure is error:
                raise
            raise failure from error
        else:
            self._settle(request, reservation, request.finished.reason)
        finally:
            self._leave(request)
        yield request.finished

    def _count_plan(self, planned: Planned, counted: Planned | None) -> Planned:
        """Count a request's plan unless its last one, ``counted``, was of the same kind and reason."""
        if counted is None or (counted.kind, counted.reason) != (planned.kind, planned.reason):
            self._metrics.plan(planned.kind, "fallback" if planned.reason else "only")
        return planned

    async def _attempts(self, request: Request) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The request's events from the first attempt that gives any of its answer."""
        tried: set[str] = set()
        try:
            if self._smart is not None and request.asked.smart is not None:
                async with aclosing(self._smart.shorten(request)) as progress:
                    async for step in progress:
                        if request.planned is None:
                            # A stream's headers leave with the first progress: what they say has to stand.
                            yield request.expected()
                        yield step
                self._place_again(request)
            while True:
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
                    self._try_again(request, tried, failure)
                else:
                    return
        finally:
            self._pipeline.ended(request)

    def _source(self, request: Request) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Where the events of this attempt come from."""
        placement, folder = request.placement, request.folder_here
        if placement.node_id != THIS_NODE and self._placing is not None:
            there, busy = self._members.model_at(placement.node_id, request.model.name)
            request.attempt.remote = RemoteJob(
                partial(self._placing.request, placement.node_id),
                request.job,
                request.model.name,
                placement.digest,
                placement.planned,
                there.context_tokens if there is not None else 0,
                busy=busy,
                prefill_s=placement.prefill_s,
                load_within_s=load_times.stall_s(expected_load_s(there) if there is not None else 0.0),
                unaided=self._members.unaided(),
            )
            events = request.attempt.remote.events()
            return self._woken(request, events) if placement.asleep else events
        return self._pulled(request) if folder is None else self._pool.stream(folder, self._asked(request))

    def _asked(self, request: Request) -> Generate:
        """What this machine's engine is asked for."""
        local_only = self._members.local_only or not request.job.shareable
        return msgspec.structs.replace(request.attempt.generate, local_only=local_only)

    async def _woken(
        self, request: Request, events: AsyncGenerator[Planned | Loading | Event, None]
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The events of a machine that is woken first."""
        placement = request.placement
        if self._placing is not None and self._placing.wake is not None:
            yield Loading(f"waking {placement.planned.nodes[0]}")
            await self._placing.wake(placement.node_id)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _pulled(self, request: Request) -> AsyncGenerator[Loading | Event, None]:
        """Events of a model that is downloaded first."""
        ref = request.model.ref
        async with aclosing(self.pulls.watch(ref)) as steps:
            async for step in steps:
                stage = f"{step.stage or 'downloading'} {step.file}".strip()
                yield Loading(stage, step.done_bytes, step.total_bytes)
        folder = await file_threads.look(self._models.resolve, ref)
        async with aclosing(self._pool.stream(folder, self._asked(request))) as events:
            async for event in events:
                yield event

    # ---- what is learned of machines -----------------------------------------------------------------------

    @property
    def unread_tokens(self) -> int:
        """Tokens that are left of the prompts which this machine's engines prefill now."""
        here = (each for each in self._requests if each.running and each.placement.node_id == THIS_NODE)
        return sum(request.unread_tokens for request in here)

    def _requests_at(self, node_id: str) -> SentRequests:
        there = [request for request in self._requests if request.placement.node_id == node_id]
        return SentRequests(len(there), sum(request.unread_tokens for request in there))

    def _answered(self, request: Request, finished: Finished) -> None:
        """A machine has answered: note what it took there, by this machine's clock."""
        placement, remote_job = request.placement, request.attempt.remote
        self._members.succeeded(placement.node_id, "answer", placement.digest)
        self._served_after_refusal(request)
        if remote_job is not None and _had_less(request, finished):
            # Whatever it says of other prompts is not asked for a while, and does not draw them there.
            self._members.late(placement.node_id, "fetch")
        first_at_s = request.first_token_s
        alone = request.planned is not None and len(request.planned.nodes) == 1
        if self._placing is None or remote_job is None or first_at_s is None or request.kept_tokens:
            return
        if placement.asleep:
            return  # the time until it was awake says nothing of its speed
        first_s, decode_s = first_at_s - request.attempt.began_s, self._monotonic() - first_at_s
        usage, client_s = finished.usage, request.first_client_s
        # With helpers, or with a queue there, the time says little about that machine.
        tells = alone and not remote_job.busy and not _client_was_slow(client_s, first_s)
        read = usage.prompt_tokens - usage.cached_tokens if tells else 0
        slow = _client_was_slow(remote_job.client_s - client_s, decode_s)
        tokens = AnswerTokens(usage.cached_tokens, read, 0 if slow else usage.completion_tokens - 1)
        self._placing.answered(placement, request.model.wanted, tokens, first_s, decode_s)

    def _served_after_refusal(self, request: Request) -> None:
        """The machine that refused it as wrong is left out: every request that it gets would end so."""
        if request.refusal is not None:
            refused_by, said = request.refusal
            kind = Incompatible if isinstance(said, _DIFFERS) else PeerWrong
            error = kind(f"It refused what another machine served ({said}).")
            self._members.failed(refused_by.node_id, "answer", error, refused_by.digest)

    def _given_up(self, request: Request) -> None:
        """The client has left: a machine that had sent nothing for long counts as late."""
        job = request.attempt.remote
        placement = request.placement
        if job is None or request.answering or placement.asleep or placement.node_id == THIS_NODE:
            return
        allowed_s = limits.JOB_CANCELLED_S + limits.JOB_LATE * (job.prefill_s or 0.0)
        if not job.busy and self._monotonic() - request.attempt.began_s > allowed_s:
            self._members.late(placement.node_id, "answer")

    # ---- where, and what is tried next -------------------------------------------------------------------

    def _try_again(self, request: Request, tried: set[str], failure: FleetError) -> None:
        """Prepare the next attempt. Raises the failure, naming its machine, where none is left to make."""
        try:
            self._move(request, tried, failure)
        except FleetError as error:
            # The whole prompt is another one: a machine that failed at the shortened one may serve it.
            tried.clear()
            self._try_whole(request, error)

    def _move(self, request: Request, tried: set[str], failure: FleetError) -> None:
        """Move the request to another machine. Raises FleetError if none is left."""
        placement = request.placement
        error = _with_machine(failure, placement)
        if self._placing is not None:
            self._placing.failed(placement.node_id, failure, placement.digest)
        tried.add(placement.node_id)
        if request.answering or len(tried) >= limits.ATTEMPTS:
            raise error from failure
        if isinstance(error, _DETERMINISTIC):
            found = self._to_confirm(request, tried, error)
        else:
            found = self._choose(request.job, request.model, frozenset(tried), error, request.places)
        log.warning("request.elsewhere", request=request.id, left=placement.planned.nodes[0], code=error.code)
        request.placement = found
        self._metrics.fallback(error.code)

    def _to_confirm(self, request: Request, tried: set[str], refused: FleetError) -> Placement:
        """Where to ask once more whether a request is wrong. Raises what was said, where that is enough.

        One that is wrong is not to have a model loaded for it, unless the machine that says so has served
        nothing yet.
        """
        placement, model = request.placement, replace(request.model, can_pull=False)
        if placement.node_id == THIS_NODE or request.refusal is not None:
            raise refused
        found = self._choose(request.job, model, frozenset(tried), refused, request.places)
        if self._members.proven(placement.node_id) and not self._members.has_loaded(
            found.node_id, model.name
        ):
            raise refused
        request.refusal = placement, refused
        return found

    def _place_again(self, request: Request) -> None:
        """After the prompt has changed. Raises FleetError where no machine is left.

        Less to read may be read faster elsewhere. But where single tokens are left out, only the machine that
        was chosen for that knows which.
        """
        if request.job.request.keep is not None:
            return
        try:
            request.placement = self._choose(
                request.job, request.model, frozenset(), request.model.missing, request.places
            )
        except FleetError as error:
            self._try_whole(request, error)

    def _try_whole(self, request: Request, error: FleetError) -> None:
        """Prepare an attempt with the whole prompt after a shortened one failed, or raise the error."""
        if self._smart is None or not self._smart.try_whole(request, error):
            raise error
        request.refusal = None
        self._place_again(request)

    def _choose(
        self,
        job: Job,
        model: LocatedModel,
        tried: frozenset[str],
        why: FleetError | None,
        places: PromptPlaces,
    ) -> Placement:
        """Choose the machine. ``why``: the failure of those that were ``tried``. Raises FleetError where no
        machine is left."""
        if self._placing is None:
            if why is not None and not (model.can_pull and not tried):
                raise why
            return Placement(THIS_NODE, LOCAL)
        return self._placing.choose(job, model.wanted, tried=tried, why=why, places=places)

    def locate(self, named: str, digest: str = "") -> LocatedModel:
        """Where the model is on this machine, if it is, and with that content if it matters. Blocks.

        Raises ModelUnsupported, ModelCorrupt, InvalidValue.
        """
        ref = untagged(self._names.named(named))
        check_served(ref)
        try:
            folder = self._models.resolve(ref)
        except ModelNotFound as error:
            real = self._names.alias(ref)
            # What an alias stands for is not looked up as an alias again: settings could name a circle.
            if real is not None and self._names.alias(real) is None:
                return self.locate(real, digest)
            if (name := self._embedded(ref)) is not None:
                return LocatedModel(ref, name, None, can_pull=True, missing=error)
            missing = error
            if self._models.needs_pull(ref):
                missing = ModelNotFound(
                    f"The model {ref} is not on this machine.",
                    hint=f"Get it with `fleetctl models pull {ref}`.",
                    param="model",
                )
            return LocatedModel(ref, canonical(ref), None, can_pull=False, missing=missing)
        if digest and str(self._models.digest(folder)) != digest:
            other = ModelNotFound(
                f"This machine has other files under the name {folder.name} than the ones asked for.",
                hint="The two copies come from different revisions; pull one of them again.",
            )
            return LocatedModel(ref, folder.name, None, can_pull=False, missing=other)
        return LocatedModel(ref, folder.name, folder, can_pull=False, missing=None)

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

    def _leave(self, request: Request | None) -> None:
        if request is not None:
            request.leave()
            self._requests.discard(request)
        self._open -= 1
        if self._open == 0:
            self._idle.set()

    def _settle(self, request: Request | None, reservation: Reservation | None, reason: str) -> None:
        if request is None:
            return
        now_s = self._monotonic()
        took_s = now_s - request.arrived_s
        usage, timings = request.so_far(now_s)
        if reservation is not None:
            trace = trace_of(request)
            self._ledger.settle(
                reservation, usage, timings, reason, first_s=trace.ttft_s, saved_s=trace.saved_s or 0.0
            )
        self._metrics.finished(request.model.name, reason, usage, timings, took_s)
        if reason == "cancelled":
            return
        if reservation is not None and reservation.node == THIS_NAME:
            if request.finished is not None and request.finished.speculation is not None:
                self._metrics.speculated(request.finished.speculation)
            self._speeds.ran(
                request.model.name,
                prompt_tokens=request.kept_tokens or usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                prefill_s=timings.prefill_s,
                decode_s=0.0 if timings.decode_interleaved else timings.decode_s,
                now_s=now_s,
                shared=request.shared or timings.prefill_interleaved,
            )
        self._completed += 1
        known_s = took_s if self._request_s is None else self._request_s
        self._request_s = known_s + _EWMA * (took_s - known_s)

    def _refund(self, reservation: Reservation | None, code: str, job: Job) -> None:
        self._failed += 1
        self._metrics.failed(code)
        if reservation is not None:
            self._ledger.refund(reservation, code)
        if (left_out := self._failure_lines.spend()) is not None:
            more = {"left_out": left_out} if left_out else {}
            log.info("request.failed", request=job.request.id, code=code, route=job.route, **more)

    def _explain(self, error: Exception) -> FleetError:
        """The error as the client shall see it."""
        if self._abandoned and isinstance(error, EngineError):
            return Draining("The daemon stopped before the answer was complete.", hint="Ask again shortly.")
        if isinstance(error, FleetError):
            return error
        # A bug: its text may hold anything, so only its type goes out and into the log.
        log.error("request.bug", type=type(error).__name__)
        return FleetError(f"Internal error ({type(error).__name__}).", hint="Please report it.")


def _node_of(planned: Planned) -> str:
    """The machine that answers, as the ledger has it."""
    return THIS_NAME if planned.answered_here else planned.nodes[0]


def _had_less(request: Request, finished: Finished) -> bool:
    """True if the machine that answered had clearly less of the prompt than it said before."""
    place = request.places.get(request.placement.node_id)
    said = max(place.memory_tokens, place.disk_tokens) if place is not None else 0
    return said >= limits.FETCH_LEAST_TOKENS and finished.usage.cached_tokens < said * limits.FETCH_BELIEVED


def _client_was_slow(client_s: float, took_s: float) -> bool:
    """True if so much of the time passed while the client read that the rest says little of a machine."""
    return client_s > limits.ANSWER_CLIENT_SHARE * took_s


def _with_machine(error: FleetError, placement: Placement) -> FleetError:
    """The error with the name of the machine whose fault it is; as it is if it is no other machine's."""
    if placement.node_id == THIS_NODE or not isinstance(error, PeerError):
        return error
    return said_by(placement.planned.nodes[0], error)
