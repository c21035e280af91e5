"""Computes the vectors or scores of one request on all machines that are worth it.

    its turn ─► located ─► reserved ─► parts: machine 1: part, part, … ─┐
                                              machine 2: part, …       ─┴─► checked, as they come ─► settled

A part of a machine that fails, leaves or sends what cannot be goes to another one. A machine that answers a
chat gets a part only if no other is there, then a small one, and then rests. Leaving the generator at any
point cancels all parts, wherever they run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from fleetd import limits
from fleetd.control.daemon_status import RunningRequest
from fleetd.control.prefill_trace import Trace
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Finished, Loading, TextsEmbedded, TextsReranked, Timings, Usage
from fleetd.errors import BadRequest, Draining, FleetError, ModelError, NoMachine, Overloaded, ProtocolError
from fleetd.models.folder import ModelFolder
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan import load_times
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import cancel_all
from fleetd.requests.job import THIS_NAME
from fleetd.requests.ledger import Ledger, Reservation
from fleetd.requests.model_locator import ModelLocator
from fleetd.requests.ports import MetricsPort
from fleetd.requests.remote.peer_stream import next_message, said_by
from fleetd.requests.vectors import messages
from fleetd.requests.vectors.job import MachineRun, TextsDone, VectorJob
from fleetd.requests.vectors.machines import EncoderModel, VectorMachines
from fleetd.requests.vectors.messages import TextsRequest, VectorPart, texts_of
from fleetd.requests.vectors.part_answer import PartAnswer
from fleetd.requests.vectors.parts import Share, Unclaimed, VectorMachine, shares
from fleetd.requests.vectors.record import VectorRecord

log = get_logger("fleetd.requests.vectors")

# How often machines are looked at while parts are computed.
_LOOK_S = 0.1
_RETRY_S = 5.0


@dataclass(slots=True)
class _GivenPart:
    """A part that a machine has."""

    machine: VectorMachine
    texts: tuple[int, ...]
    estimate: int
    begun_s: float
    # True while its model is being loaded.
    loads: bool = False
    # When its model was loaded; None if it was before.
    loaded_s: float | None = None


@dataclass(slots=True)
class _Spread:
    """The state of one job while parts are computed. ``lost``: by node id, why machines are not asked
    again."""

    job: VectorJob
    record: VectorRecord
    model: EncoderModel
    unclaimed: Unclaimed
    lost: dict[str, FleetError] = field(default_factory=dict)
    running: dict[asyncio.Task[PartAnswer], _GivenPart] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def working(self) -> frozenset[str]:
        return frozenset(part.machine.node_id for part in self.running.values())

    @property
    def failure(self) -> FleetError:
        """Why the job ends without its vectors: what is wrong with the request rather than a machine."""
        errors = list(self.lost.values())
        wrong = next((error for error in errors if isinstance(error, BadRequest | ModelError)), None)
        last = errors[-1] if errors else NoMachine(f"No machine can compute with {self.model.name} now.")
        return wrong or last


class VectorService:
    """Args:
    request: begins a request at another machine: its id, a method and a body; None without a fleet.
    draining: True once the daemon is stopping.
    record: keeps the trace of a job that has ended (``traces.Traces.record``).
    name: of this machine.
    """

    def __init__(
        self,
        pool: EnginePool,
        locator: ModelLocator,
        machines: VectorMachines,
        ledger: Ledger,
        metrics: MetricsPort,
        request: Callable[[str, str, bytes], PeerStream] | None = None,
        *,
        record: Callable[[Trace], None] = lambda trace: None,
        name: str = THIS_NAME,
        draining: Callable[[], bool] = lambda: False,
        failed: Callable[[str, FleetError, str], None] = lambda node_id, error, model: None,
        succeeded: Callable[[str, str], None] = lambda node_id, model: None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._locator = locator
        self._machines = machines
        self._ledger = ledger
        self._metrics = metrics
        self._request = request
        self._keep = record
        self._name = name
        self._draining = draining
        self._failed = failed
        self._succeeded = succeeded
        self._monotonic = monotonic
        self._now = now
        # All that have not ended, what they hold, and the turns of those that are at work.
        self._open: dict[VectorJob, VectorRecord] = {}
        self._held = 0
        # The long jobs of clients whose next request may come, by client and their id there.
        self._long: dict[tuple[str, str], VectorRecord] = {}
        self._turns = asyncio.Semaphore(limits.VECTOR_JOBS)
        # Set once any part is over, and then another one.
        self._part_over = asyncio.Event()

    def running(self) -> list[RunningRequest]:
        """The jobs that have not ended, as the page shows them."""
        now_s = self._monotonic()
        return [record.running(now_s) for record in self._open.values()]

    async def run(self, job: VectorJob) -> AsyncGenerator[Loading | TextsDone, None]:
        """Yield parts in any order until each text has been in one. Raises FleetError."""
        held = job.held
        self._admit(held)
        self._held += held
        record = self._open[job] = self._record(job)
        error: FleetError | None = None
        cancelled = True
        try:
            async with self._turns, aclosing(self._computed(record)) as parts:
                async for part in parts:
                    yield part
            cancelled = False
        except FleetError as failure:
            error, cancelled = failure, False
            raise
        finally:
            del self._open[job]
            self._held -= held
            self._ended_job(record, error, cancelled=cancelled)

    def _record(self, job: VectorJob) -> VectorRecord:
        """A new one, or that of the long job that the request is a part of, if none of its others is open."""
        known = self._long.pop((job.client, job.part_of.id), None) if job.part_of is not None else None
        if known is None:
            return VectorRecord(job, self._name, self._now(), self._monotonic())
        known.goes_on(job)
        return known

    def _ended_job(self, record: VectorRecord, error: FleetError | None, *, cancelled: bool) -> None:
        """Count and write down a job that has ended."""
        job, now_s = record.job, self._monotonic()
        if error is not None:
            self._metrics.failed(error.code)
        else:
            reason, took_s = "cancelled" if cancelled else "stop", now_s - record.arrived_s
            self._metrics.texts(job.name or job.model, reason, job.done, job.tokens, took_s)
            if job.done:
                self._metrics.plan(job.kind, "fallback" if job.lost else "only")
        self._keep(record.trace(now_s, error, cancelled=cancelled))
        if job.part_of is not None:
            self._long[job.client, job.part_of.id] = record
            if len(self._long) > limits.VECTOR_LONG_JOBS:
                del self._long[next(iter(self._long))]

    async def _computed(self, record: VectorRecord) -> AsyncGenerator[Loading | TextsDone, None]:
        """The parts of a job whose turn it is. Raises FleetError."""
        job = record.job
        model = await self._machines.model(job)
        job.name = model.name
        row = Reservation(job.id, model.name, THIS_NAME, job.route, record.at_s)
        with self._running(model.name):
            async with self._ledger.entry(row) as spent:
                if model.can_pull:
                    async with aclosing(self._locator.pull(job.model or model.name)) as steps:
                        async for step in steps:
                            if isinstance(step, Loading):
                                record.loads(THIS_NAME, self._monotonic())
                                job.loading = step
                                yield step
                            else:
                                model = EncoderModel(step.name, folder=step)
                job.own_kind = self._machines.own_kind(model)
                spread = _Spread(job, record, model, Unclaimed(job.estimated_tokens()))
                async with aclosing(self._spread(spread)) as parts:
                    async for part in parts:
                        yield part
                spent.usage = Usage(prompt_tokens=job.tokens)
                spent.timings = Timings(prefill_s=self._monotonic() - record.arrived_s)

    @contextmanager
    def _running(self, name: str) -> Iterator[None]:
        """The model's figure of running requests has one more."""
        self._metrics.running(name, 1)
        try:
            yield
        finally:
            self._metrics.running(name, -1)

    def _admit(self, held: int) -> None:
        """Raises Draining, Overloaded. ``held``: what the job would hold, as ``VectorJob.held``."""
        if self._draining():
            raise Draining("The daemon is stopping and takes no new work.", hint="Retry in a moment.")
        most = limits.VECTOR_JOBS + limits.VECTOR_JOBS_WAITING
        if len(self._open) >= most:
            why = f"{len(self._open)} requests for vectors are open; the limit is {most}."
        elif self._open and self._held + held > limits.VECTOR_HELD_CHARS:
            why = f"Requests for vectors hold {limits.VECTOR_HELD_CHARS} characters; that is the limit."
        else:
            return
        hint = "Retry later, or send more texts in one request."
        self._metrics.failed(Overloaded.code)
        raise Overloaded(why, hint=hint, retry_after_s=_RETRY_S)

    # ---- parts -------------------------------------------------------------------------------------------

    async def _spread(self, spread: _Spread) -> AsyncGenerator[Loading | TextsDone, None]:
        told: Loading | None = None
        try:
            while spread.unclaimed or spread.running:
                self._hand_out(spread)
                if not spread.running:
                    await self._wait_for_machine(spread)
                    continue
                done, _ = await asyncio.wait(
                    spread.running, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if (found := self._ended(spread, task)) is not None:
                        yield found
                if spread.job.loading is not None and spread.job.loading is not told:
                    told = spread.job.loading
                    yield told
        finally:
            await cancel_all(spread.running)

    async def _wait_for_machine(self, spread: _Spread) -> None:
        """Wait a little, as no machine may be given a part now. Raises FleetError if there is none."""
        able = self._able(spread)
        if not able:
            raise spread.failure
        began_s = self._monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._part_over.wait()
        if any(machine.chats for machine in able):
            spread.record.left_to_chats(began_s, self._monotonic())

    def _able(self, spread: _Spread) -> list[VectorMachine]:
        able = self._machines.able(spread.job, spread.model, spread.lost)
        if not spread.job.exact:
            return able
        # This machine decides which kind; if it has not the model, those that began, or the first one.
        begun = [run.machine for run in spread.job.finished]
        begun += [part.machine for part in spread.running.values()]
        kinds = [spread.job.own_kind] if spread.job.own_kind else [each.kind for each in (*begun, *able)]
        return [machine for machine in able if machine.kind == kinds[0]]

    def _hand_out(self, spread: _Spread) -> None:
        """Give parts to machines that are free."""
        if not spread.unclaimed:
            return
        for share in shares(self._able(spread), spread.working, spread.unclaimed.tokens):
            self._begin(spread, share)

    def _begin(self, spread: _Spread, share: Share) -> None:
        before = spread.unclaimed.tokens
        texts = spread.unclaimed.take(share.tokens)
        if not texts:
            return
        machine, now_s = share.machine, self._monotonic()
        part = _GivenPart(machine, texts, before - spread.unclaimed.tokens, now_s)
        spread.job.ran.setdefault(machine.node_id, MachineRun(machine, now_s))
        if machine.load_s:
            spread.record.loads(machine.name, now_s)
        else:
            spread.record.reads(machine.name, now_s)
        request = spread.job.part(texts, f"{spread.job.id}.{next(spread.numbers)}")
        task = asyncio.create_task(self._ask(spread, part, request))
        spread.running[task] = part
        self._machines.gives(machine, part.estimate)
        task.add_done_callback(partial(self._returned, part))

    def _returned(self, part: _GivenPart, task: asyncio.Task[PartAnswer]) -> None:
        """A part is over, however it has ended: requests that wait for a machine look again."""
        self._machines.returns(part.machine, part.estimate)
        over, self._part_over = self._part_over, asyncio.Event()
        over.set()

    def _ended(self, spread: _Spread, task: asyncio.Task[PartAnswer]) -> TextsDone | None:
        """What a part's task has come to; None if it failed. Raises FleetError if others would fail too."""
        part = spread.running.pop(task)
        machine = part.machine
        try:
            answer = task.result()
        except FleetError as error:
            self._lose(spread, part, error)
            return None
        job, model = spread.job, spread.model
        now_s = self._monotonic()
        tokens, seconds = sum(answer.tokens), now_s - (part.loaded_s or part.begun_s)
        self._machines.learn(machine, model, tokens, seconds)
        if not machine.here:
            self._succeeded(machine.node_id, model.key)
        run = job.ran[machine.node_id]
        if not run.parts:
            # Named in the order in which they had something.
            job.ran[machine.node_id] = job.ran.pop(machine.node_id)
        run.parts += 1
        run.texts += len(part.texts)
        run.tokens += tokens
        run.ended_s, run.computed_s = now_s, run.computed_s + seconds
        job.width, job.loading = answer.width, None
        return TextsDone(part.texts, answer.found)

    def _lose(self, spread: _Spread, part: _GivenPart, error: FleetError) -> None:
        """Leave the machine out of this job, and its texts to others."""
        machine = part.machine
        spread.unclaimed.give_back(part.texts)
        if machine.here and isinstance(error, BadRequest | ModelError):
            raise error
        if not machine.here:
            self._failed(machine.node_id, error, spread.model.key)
            error = said_by(machine.name, error)
        spread.lost[machine.node_id] = spread.job.ran[machine.node_id].lost = error
        log.warning("vectors.machine_lost", request=spread.job.id, node=machine.name, code=error.code)

    # ---- one part ----------------------------------------------------------------------------------------

    async def _ask(self, spread: _Spread, part: _GivenPart, request: TextsRequest) -> PartAnswer:
        """The answer of one machine for one part. Raises FleetError."""
        folder = spread.model.folder
        answer = PartAnswer(request, spread.job.width)
        progress = partial(self._loads, spread, part)
        if part.machine.here and folder is not None:
            await self._ask_here(folder, request, answer, progress)
        else:
            await self._ask_there(spread, part, request, answer, progress)
        if not answer.whole:
            raise ProtocolError(f"Vectors of {len(answer.found)} of {len(texts_of(request))} texts came.")
        return answer

    def _loads(self, spread: _Spread, part: _GivenPart, step: Loading | None) -> None:
        """Note the progress of a load; None: it is over."""
        job, machine = spread.job, part.machine
        if step is not None:
            part.loads, job.loading = True, step
            spread.record.loads(machine.name, self._monotonic())
        elif part.loads:
            part.loads, part.loaded_s, job.loading = False, self._monotonic(), None
            job.ran[machine.node_id].loaded_s += part.loaded_s - part.begun_s
            job.load_s = job.load_s or part.loaded_s - part.begun_s
        if step is None:
            spread.record.reads(machine.name, self._monotonic())

    async def _ask_here(
        self,
        folder: ModelFolder,
        request: TextsRequest,
        answer: PartAnswer,
        progress: Callable[[Loading | None], None],
    ) -> None:
        async with aclosing(self._pool.vectors(folder, request)) as events:
            async for event in events:
                if isinstance(event, Loading):
                    progress(event)
                    continue
                progress(None)
                if isinstance(event, TextsEmbedded | TextsReranked):
                    answer.feed(event)

    async def _ask_there(
        self,
        spread: _Spread,
        part: _GivenPart,
        request: TextsRequest,
        answer: PartAnswer,
        progress: Callable[[Loading | None], None],
    ) -> None:
        if self._request is None:
            raise NoMachine("It is not there any more.")
        machine, model = part.machine, spread.model
        body = messages.encode(VectorPart(model.name, model.digest, request))
        stream = self._request(machine.node_id, messages.VECTORS, body)
        within_s = load_times.stall_s(machine.load_s) + limits.JOB_LATE * machine.seconds(part.estimate)
        due_s = asyncio.get_running_loop().time() + within_s + limits.VECTOR_GRACE_S
        ended = False
        try:
            stream.end()
            while (said := await next_message(stream, "the vectors", lambda: due_s)) is not None:
                event = messages.decode_event(said)
                progress(event if isinstance(event, Loading) else None)
                if isinstance(event, Finished):
                    break
                if not isinstance(event, Loading):
                    answer.feed(event)
            ended = True
        finally:
            if not ended:
                stream.cancel()
