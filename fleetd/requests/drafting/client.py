"""Answers of this machine that another worker drafts for: one here, or one on another machine.

    Accepted ──► who drafts? ──► its engine ready ──► same vocabulary? ──► both workers get an end of a stream
       │                                                                          │
       └──► the answer goes on, and waits for nothing of this ◄── drafts, as long as they come

Whatever goes wrong here costs drafts and nothing else: no failure of a drafter reaches the answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Literal, Protocol

import msgspec

from fleetd.control.prefill_plan import PlanView
from fleetd.control.prefill_trace import DrafterView, Trace
from fleetd.engine.protocol import Accepted, DraftFor, Event, Followed, Loading, Ready, StreamTag
from fleetd.errors import EngineDied, FleetError, Incompatible, ModelNotFound, PeerError
from fleetd.models import names
from fleetd.models.model_store import ModelStore
from fleetd.observe import get_logger
from fleetd.p2p.link_prober import Invitation
from fleetd.requests.concurrency import cancel_all
from fleetd.requests.drafting import drafters, messages
from fleetd.requests.drafting.drafters import DRAFTER, DrafterCandidate, Where
from fleetd.requests.job import Job, Planned
from fleetd.requests.members import Members
from fleetd.requests.placement import canonical
from fleetd.requests.prefill_sharing.agreement import require_message
from fleetd.requests.prefill_sharing.record import SharingRecord
from fleetd.requests.remote import Stream, own_id, said_by

log = get_logger("fleetd.drafting")

# The stream's name, which the workers know as ``engine.spec.draft_wire.DRAFTS``.
DRAFTS = "drafts"
# Tokens ahead of the text where drafter and verifier share one accelerator: there is no round trip to hide,
# and what is drafted in vain takes its time from the verifier.
_BESIDE_TOKENS = 8
# Shorter answers have ended before there is a draft.
_LEAST_TOKENS = 8
# A drafter's own account comes when it sees the stream end, or not at all.
_ACCOUNT_S = 2.0


class Engine(Protocol):
    """``fleetd.engine.supervisor.EngineProcess``."""

    @property
    def facts(self) -> Ready | None: ...
    def follow(self, follow: DraftFor) -> AsyncGenerator[Event, None]: ...
    async def give_stream(self, tag: StreamTag, sock: socket.socket) -> None: ...


class Pool(Protocol):
    def engine(self, folder: Any) -> Engine | None: ...
    def assisting(self, folder: Any, first: int, last: int) -> AbstractAsyncContextManager[Engine]: ...


class Partners(Protocol):
    """``fleetd.fleet.Fleet``."""

    def request(self, node_id: str, method: str, body: bytes) -> Stream: ...
    async def connect(self, node_id: str, invited: Invitation) -> socket.socket: ...


class Metrics(Protocol):
    def drafter(self, where: str, outcome: str) -> None: ...


class DrafterService:
    """Args:
    partners: None for a machine without a fleet.
    model: what drafts where a request does not say; "" for nobody.
    record: keeps what came of an answer (``traces.Traces.record``).
    remembers: workers here draft from past answers as well.
    """

    def __init__(
        self,
        partners: Partners | None,
        members: Members,
        pool: Pool,
        models: ModelStore,
        metrics: Metrics,
        *,
        model: str = "",
        where: Where = "auto",
        record: Callable[[Trace], None] = lambda trace: None,
        remembers: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.partners = partners
        self.pool = pool
        self.metrics = metrics
        self.monotonic = monotonic
        self.members = members
        self._models = models
        self._model = model
        self._where = where
        self._record = record
        self._remembers = remembers
        self._now = now
        # Of answers that run, by request.
        self._answers: dict[str, DraftRun] = {}
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, job: Job, folder: Any) -> DraftRun | None:
        """Look for a drafter for an answer that ``folder``'s engine has accepted; None where none is wanted.

        Returns at once. The caller closes it when the answer has ended.
        """
        model, engine = self._wanted(job), self.pool.engine(folder)
        if not model or engine is None:
            return None
        drafts = DraftRun(self, job, folder.name, model, engine)
        self._running.add(drafts.task)
        drafts.task.add_done_callback(self._running.discard)
        return drafts

    def _wanted(self, job: Job) -> str:
        """The model that is to draft; "" for none."""
        request, how = job.request, job.request.speculate
        few = request.max_tokens is not None and request.max_tokens < _LEAST_TOKENS
        refused = how is not None and not (how.enabled and DRAFTER in (how.sources or [DRAFTER]))
        # What is left of a prompt after a selection is decoded without drafts.
        if few or refused or request.keep is not None:
            return ""
        named = how.draft_model if how is not None else ""
        # No request reaches for files by their path.
        return "" if names.is_path(named) else canonical(named or self._model)

    async def stream(
        self,
        job: Job,
        folder: Any,
        events: AsyncGenerator[Planned | Loading | Event, None],
        *,
        traced_since_s: float | None = None,
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The answer's events as they are, with a drafter from its Accepted to its end.

        Args:
            traced_since_s: when the request came, on ``monotonic``, where nobody else writes down what comes
                of it: then an answer that was drafted for leaves a trace.
        """
        drafts: DraftRun | None = None
        record: SharingRecord | None = None
        if traced_since_s is not None:
            record = SharingRecord(job.request.id, folder.name, self._now(), traced_since_s)
        try:
            async with aclosing(events) as each:
                async for event in each:
                    if isinstance(event, Accepted) and drafts is None:
                        drafts = self.begin(job, folder)
                        if drafts is not None:
                            self._answers[job.request.id] = drafts
                    if record is not None and not isinstance(event, Planned):
                        record.on_event(event, self.monotonic())
                    yield event
        except FleetError as error:
            if record is not None:
                record.failed(error)
            raise
        finally:
            if record is not None:
                record.drafted(self.drafter(job.request.id))
                if (trace := record.trace(())) is not None:
                    self._record(trace)
            if drafts is not None:
                self._answers.pop(job.request.id, None)
                drafts.close()

    # ---- for people --------------------------------------------------------------------------------------

    def drafter(self, request_id: str) -> DrafterView | None:
        """Who drafts for an answer that runs."""
        drafts = self._answers.get(request_id)
        found = drafts.drafter if drafts is not None else None
        return DrafterView(found.model, found.name) if found is not None else None

    async def plan(self, view: PlanView, folder: Any) -> PlanView:
        """The same, and how the answer would be drafted for. Nothing is loaded for that."""
        engine = self.pool.engine(folder)
        facts = engine.facts if engine is not None else None
        if facts is None:
            return view
        model = canonical(self._model) if facts.vocabulary else ""
        able = [
            candidate.name
            for candidate in (self.candidates(folder.name, model, shareable=True) if model else ())
            if candidate.node_id or await self._is_here(model, besides=folder.name)
        ]
        drafts = drafters.view(facts, view.prompt_tokens, model, able, remembers=self._remembers)
        return msgspec.structs.replace(view, drafts=drafts)

    async def _is_here(self, model: str, *, besides: str) -> bool:
        try:
            return bool((await self.resolve(model)).name != besides)
        except FleetError:
            return False

    # ---- who is asked ------------------------------------------------------------------------------------

    def candidates(self, target: str, model: str, *, shareable: bool) -> list[DrafterCandidate]:
        """The machines to ask, in this order."""
        others = self.members.others("draft") if shareable else []
        return drafters.candidates(others, target, model, self._where)

    async def resolve(self, model: str) -> Any:
        """Raises ModelNotFound."""
        return await asyncio.to_thread(self._models.resolve, model)

    async def close(self) -> None:
        """End all of them."""
        await cancel_all(self._running)


class DraftRun:
    """One answer's drafter, from when it is looked for to its end."""

    def __init__(self, drafting: DrafterService, job: Job, target: str, model: str, engine: Engine) -> None:
        self.drafter: DrafterCandidate | None = None
        self.followed: Followed | None = None
        self._drafting = drafting
        self._job = job
        self._target = target
        self._model = model
        self._engine = engine
        self._partners: Any = drafting.partners  # there where a candidate is a peer
        self.task = asyncio.create_task(self._run())

    def close(self) -> None:
        """The answer has ended; the drafter notices by its stream, and in any case by this."""
        if self.drafter is None:
            self.task.cancel()
        else:
            asyncio.get_running_loop().call_later(_ACCOUNT_S, self.task.cancel)

    async def _run(self) -> None:
        facts = self._engine.facts
        if facts is None or not facts.vocabulary or facts.speculation_width < 2:
            return
        shareable = self._job.shareable
        for candidate in self._drafting.candidates(self._target, self._model, shareable=shareable):
            outcome = "cancelled"
            try:
                await (self._there if candidate.node_id else self._here)(candidate, facts.vocabulary)
            except FleetError as error:
                outcome = error.code
                self._failed(candidate, error)
                if self.drafter is not None:
                    return  # it had begun: this answer goes on without
            except Exception as error:
                # A bug here must not cost anybody an answer.
                outcome = "internal_error"
                log.warning("drafting.bug", type=type(error).__name__)
                return
            else:
                outcome = "done"
                self._drafting.members.succeeded(candidate.node_id, "draft")
                return
            finally:
                self._drafting.metrics.drafter(candidate.where, outcome)

    def _failed(self, candidate: DrafterCandidate, error: FleetError) -> None:
        log.info(
            "drafting.failed",
            request=self._job.request.id,
            drafter=candidate.name,
            model=candidate.model,
            code=error.code,
            reason=error.message,
        )
        if candidate.node_id and isinstance(error, PeerError):
            self._drafting.members.failed(candidate.node_id, "draft", error)

    async def _here(self, candidate: DrafterCandidate, vocabulary: str) -> None:
        folder = await self._drafting.resolve(candidate.model)
        if folder.name == self._target:
            raise ModelNotFound(f"{folder.name} does not draft for itself on one machine.")
        # Where it does not fit beside what is loaded, nothing gives way to it.
        async with self._drafting.pool.assisting(folder, 0, 0) as engine:
            check_vocabulary(engine.facts, vocabulary)
            follow = DraftFor(own_id(self._job.request.id), _BESIDE_TOKENS)
            async with aclosing(engine.follow(follow)) as events:
                await accepted(events)
                near, far = socket.socketpair()
                key = os.urandom(32)
                try:
                    await self._give(near, key, "connector")
                finally:
                    await engine.give_stream(StreamTag(follow.id, DRAFTS, key, "acceptor"), far)
                self.drafter = candidate
                self.followed = await ended(events)

    async def _there(self, candidate: DrafterCandidate, vocabulary: str) -> None:
        ask = messages.DraftQuestion(candidate.model, candidate.digest, self._job.request.id, vocabulary)
        try:
            stream = self._partners.request(candidate.node_id, messages.FOLLOW, messages.encode(ask))
            try:
                await self._follow_there(candidate, vocabulary, stream)
            finally:
                stream.cancel()
        except FleetError as error:
            raise said_by(candidate.name, error) from error

    async def _follow_there(self, candidate: DrafterCandidate, vocabulary: str, stream: Stream) -> None:
        offer = messages.decode(await require_message(stream), messages.DraftOffer)
        # Both ends compare, so neither depends on the other's care.
        if offer.vocabulary != vocabulary:
            raise Incompatible("Its model has another vocabulary.", param="vocabulary")
        sock = await self._partners.connect(candidate.node_id, offer.invitation)
        await self._give(sock, offer.invitation.key, "connector")
        self.drafter = candidate
        done = messages.decode(await require_message(stream), messages.DraftDone)
        self.followed = Followed("", done.drafted, done.judged, done.right)

    async def _give(self, sock: socket.socket, key: bytes, role: Literal["connector", "acceptor"]) -> None:
        await self._engine.give_stream(StreamTag(self._job.request.id, DRAFTS, key, role), sock)


# ---- what both the machine that answers and one that drafts for others do --------------------------------


def check_vocabulary(facts: Ready | None, vocabulary: str) -> None:
    """Raises Incompatible, naming the field, where the drafts would be other words."""
    if facts is None:
        raise EngineDied("The engine that was to draft has just ended.")
    if facts.vocabulary != vocabulary:
        raise Incompatible(
            "The drafting model's vocabulary is not the answering model's.",
            hint="Let a model of the same family draft: its token ids must mean the same.",
            param="vocabulary",
        )


async def accepted(events: AsyncGenerator[Event, None]) -> None:
    """Raises what the engine refuses with."""
    if not isinstance(await anext(events, None), Accepted):
        raise EngineDied("The engine did not take the work.")


async def ended(events: AsyncGenerator[Event, None]) -> Followed:
    async for event in events:
        if isinstance(event, Followed):
            return event
    raise EngineDied("The engine stopped drafting without a word.")
