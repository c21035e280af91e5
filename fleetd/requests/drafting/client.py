"""The step of drafting: another worker, here or on another machine, drafts for an answer of this machine.

    Accepted ──► a candidate ──► its engine ready ──► same vocabulary? ──► both workers get an end of a stream
       │                                                                          │
       └──► the answer goes on without waiting ◄──────────── drafts, as long as they come

A failure of a drafter costs drafts and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec

from fleetd import limits
from fleetd.control.prefill_plan import PlanView
from fleetd.control.prefill_trace import DrafterView
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Accepted, DraftFor, DraftReport, Event, Loading, Ready, StreamTag
from fleetd.engine.speculation.local_sources import DRAFTER
from fleetd.errors import EngineDied, EngineError, FleetError, Incompatible, ModelNotFound, PeerLate, PeerLost
from fleetd.models import file_threads, names
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan import load_times
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import BackgroundTasks
from fleetd.requests.drafting import drafters, messages
from fleetd.requests.drafting.drafters import DrafterCandidate, Where
from fleetd.requests.job import Job
from fleetd.requests.members.members import Members
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.placement.placement import canonical
from fleetd.requests.ports import FleetPort, MetricsPort
from fleetd.requests.remote.peer_stream import own_id, require_message, said_by
from fleetd.requests.request import Attempt, Request
from fleetd.requests.timeline import Span, told_spans

log = get_logger("fleetd.drafting")

# The stream's name, as the workers know it (``engine.speculation.draft_messages.DRAFTS``).
DRAFTS = "drafts"
# Tokens ahead of the text if drafter and verifier share one accelerator: there is no round trip to hide,
# and what is drafted in vain takes its time from the verifier.
_BESIDE_TOKENS = 8
# Shorter answers have ended before there is a draft.
_LEAST_TOKENS = 8
# A drafter's own account comes when it sees the stream end, or not at all.
_ACCOUNT_S = 2.0


class AnswerDrafting(PipelineStep):
    """The step that finds a drafter for an answer of this machine.

    Args:
        partners: None for a machine without a fleet.
        model: the name of the model that drafts if a request names none; "" for none.
    """

    events = (Accepted,)

    def __init__(
        self,
        partners: FleetPort | None,
        members: Members,
        pool: EnginePool,
        models: ModelStore,
        metrics: MetricsPort,
        *,
        model: str = "",
        where: Where = "auto",
    ) -> None:
        self.partners = partners
        self.pool = pool
        self.metrics = metrics
        self.members = members
        self._models = models
        self._model = model
        self._where = where
        self._runs: dict[Request, DraftRun] = {}
        self._background = BackgroundTasks()

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        folder = request.folder_here
        if (
            folder is not None
            and request not in self._runs
            and (run := self.begin(request.job, folder)) is not None
        ):
            self._runs[request] = run
        return event

    def drafter_of(self, request: Request) -> DrafterView | None:
        """The drafter of a running answer; None before one is found."""
        run = self._runs.get(request)
        return run.view if run is not None else None

    def attempt_ended(self, request: Request) -> asyncio.Task[None] | None:
        if (drafts := self._runs.pop(request, None)) is None:
            return None
        attempt = request.attempt
        attempt.drafter = drafts.view
        drafts.end()
        if drafts.drafter is None or not drafts.drafter.node_id:
            return None
        return self._background.start(self._conclude(attempt, drafts))

    @staticmethod
    async def _conclude(attempt: Attempt, drafts: DraftRun) -> None:
        """Another machine's own account comes when it sees the text end, or not at all."""
        await asyncio.wait({drafts.task})
        attempt.drafter, attempt.drafts = drafts.view, drafts.steps

    def begin(self, job: Job, folder: ModelFolder) -> DraftRun | None:
        """Look for a drafter for an answer that ``folder``'s engine has accepted; None if none is wanted.

        Returns at once. The caller ends it with the answer.
        """
        model, engine = self._wanted(job), self.pool.engine(folder)
        if not model or engine is None:
            return None
        drafts = DraftRun(self, job, folder.name, model, engine)
        self._background.hold(drafts.task)
        return drafts

    def _wanted(self, job: Job) -> str:
        """The name of the model that is to draft; "" for none."""
        request, how = job.request, job.request.speculate
        few = request.max_tokens is not None and request.max_tokens < _LEAST_TOKENS
        refused = how is not None and not (how.enabled and DRAFTER in (how.sources or [DRAFTER]))
        # What is left of a prompt after a selection is decoded without drafts.
        if few or refused or request.keep is not None:
            return ""
        named = how.draft_model if how is not None else ""
        # No request reaches for files by their path.
        return "" if names.is_path(named) else canonical(named or self._model)

    # ---- for people --------------------------------------------------------------------------------------

    async def plan(self, view: PlanView, folder: ModelFolder) -> PlanView:
        """``view`` with how the answer would be drafted for. No model is loaded for that."""
        engine = self.pool.engine(folder)
        facts = engine.facts if engine is not None else None
        if facts is None:
            return view
        model = canonical(self._model) if facts.vocabulary and await self.is_model(self._model) else ""
        able, no_room = [], ""
        for candidate in self.candidates(folder.name, model, shareable=True) if model else ():
            if not candidate.node_id and await self._is_here(model, besides=folder.name):
                no_room = drafters.no_room(self.members.here(), model, folder.name)
                if no_room:
                    continue
            elif not candidate.node_id:
                continue
            able.append(candidate.name)
        drafts = drafters.view(facts, view.prompt_tokens, model, able)
        return msgspec.structs.replace(view, drafts=msgspec.structs.replace(drafts, no_room=no_room))

    async def _is_here(self, model: str, *, besides: str) -> bool:
        try:
            return (await self.resolve(model)).name != besides
        except FleetError:
            return False

    # ---- who is asked ------------------------------------------------------------------------------------

    def candidates(self, target: str, model: str, *, shareable: bool) -> list[DrafterCandidate]:
        """The machines to ask, the best one first."""
        others = self.members.others("draft") if shareable else []
        return drafters.candidates(others, target, model, self._where)

    async def resolve(self, model: str) -> ModelFolder:
        """The folder of a model on this machine. Raises ModelNotFound."""
        return await file_threads.look(self._models.resolve, model)

    async def is_model(self, model: str) -> bool:
        """False if it is a drafter for hidden states, which runs in the worker of its model."""
        try:
            return drafter_kind((await self.resolve(model)).config) is None
        except FleetError:
            return True

    async def close(self) -> None:
        """End every run."""
        await self._background.close()


class DraftRun:
    """One answer's drafter, from when it is looked for to its end."""

    def __init__(
        self, drafting: AnswerDrafting, job: Job, target: str, model: str, engine: EngineProcess
    ) -> None:
        self.drafter: DrafterCandidate | None = None
        # What it did by its own account, by this machine's clock.
        self.steps: list[Span] = []
        # The last candidate that failed, and why.
        self._lost: tuple[DrafterCandidate, FleetError] | None = None
        self._drafting = drafting
        self._job = job
        self._target = target
        self._model = model
        self._engine = engine
        self.task = asyncio.create_task(self._run())

    @property
    def view(self) -> DrafterView | None:
        """The drafter, once there is one; before that, the last candidate that failed."""
        if self._lost is not None and self.drafter in (None, self._lost[0]):
            lost, error = self._lost
            return DrafterView(lost.model, lost.name, error.code, error.message)
        if (found := self.drafter) is None:
            return None
        return DrafterView(found.model, found.name)

    def end(self) -> None:
        """The answer has ended; the drafter notices by its stream, and in any case by this."""
        if self.drafter is None:
            self.task.cancel()
        else:
            asyncio.get_running_loop().call_later(_ACCOUNT_S, self.task.cancel)

    async def _run(self) -> None:
        facts = self._engine.facts
        if facts is None or not facts.vocabulary or facts.speculation_width < 2:
            return
        if not await self._drafting.is_model(self._model):
            return
        shareable = self._job.shareable
        for candidate in self._drafting.candidates(self._target, self._model, shareable=shareable):
            outcome = "cancelled"
            try:
                await (self._there if candidate.node_id else self._here)(candidate, facts.vocabulary)
            except FleetError as error:
                outcome = error.code
                self._lost = candidate, error
                self._failed(candidate, error)
                if self.drafter is not None:
                    return  # it had begun: this answer goes on without
            except Exception as error:
                # A bug in drafting must not fail the answer.
                outcome = "internal_error"
                log.warning("drafting.bug", type=type(error).__name__)
                return
            else:
                outcome = "done"
                self._drafting.members.succeeded(candidate.node_id, "draft", candidate.digest)
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
        # An EngineError may be this machine's own: one of the two engines is.
        if isinstance(error, PeerLate):
            # It may do everything else well.
            self._drafting.members.late(candidate.node_id, "draft")
        elif candidate.node_id and not isinstance(error, EngineError):
            self._drafting.members.failed(candidate.node_id, "draft", error, candidate.digest)

    async def _here(self, candidate: DrafterCandidate, vocabulary: str) -> None:
        folder = await self._drafting.resolve(candidate.model)
        if folder.name == self._target:
            raise ModelNotFound(f"{folder.name} does not draft for itself on one machine.")
        # Nothing gives way to a drafter that does not fit beside what is loaded.
        async with self._drafting.pool.lent.assisting(folder, 0, 0) as engine:
            check_vocabulary(engine.facts, vocabulary)
            follow = DraftFor(own_id(self._job.request.id), _BESIDE_TOKENS)
            async with aclosing(engine.follow(follow)) as events:
                await await_accepted(events)
                near, far = socket.socketpair()
                key = os.urandom(32)
                try:
                    await self._give(near, key, "connector")
                finally:
                    await engine.give_stream(StreamTag(follow.id, DRAFTS, key, "acceptor"), far)
                self.drafter = candidate
                await draft_report(events)

    async def _there(self, candidate: DrafterCandidate, vocabulary: str) -> None:
        if (partners := self._drafting.partners) is None:
            raise PeerLost("It is not there any more.")
        ask = messages.DraftQuestion(candidate.model, candidate.digest, self._job.request.id, vocabulary)
        try:
            stream = partners.request(candidate.node_id, messages.FOLLOW, messages.encode(ask))
            try:
                await self._follow_there(partners, candidate, vocabulary, stream)
            finally:
                stream.cancel()
        except FleetError as error:
            raise said_by(candidate.name, error) from error

    async def _follow_there(
        self, partners: FleetPort, candidate: DrafterCandidate, vocabulary: str, stream: PeerStream
    ) -> None:
        load_s, asked_s = candidate.load_s, time.monotonic()
        offer = await _offer(stream, load_times.stall_s(load_s) if load_s else limits.DRAFT_OFFER_S)
        # Both ends compare, so neither depends on the other's care.
        if offer.vocabulary != vocabulary:
            raise Incompatible("Its model has another vocabulary.", param="vocabulary")
        sock = await partners.connect(candidate.node_id, offer.invitation)
        await self._give(sock, offer.invitation.key, "connector")
        self.drafter = candidate
        done = messages.decode(await require_message(stream), messages.DraftDone)
        offset_s = self._drafting.members.clock_offset_s(candidate.node_id)
        self.steps = told_spans(done.steps, candidate.name, offset_s, (asked_s, time.monotonic()))

    async def _give(self, sock: socket.socket, key: bytes, role: Literal["connector", "acceptor"]) -> None:
        await self._engine.give_stream(StreamTag(self._job.request.id, DRAFTS, key, role), sock)


async def _offer(stream: PeerStream, within_s: float) -> messages.DraftOffer:
    """Raises PeerLate for a machine that only says that it is alive: another one may draft."""
    try:
        async with asyncio.timeout(within_s):
            return messages.decode(await require_message(stream), messages.DraftOffer)
    except TimeoutError:
        raise PeerLate(f"It has offered no drafter within {within_s:.0f} s.") from None


# ---- what both the machine that answers and one that drafts for others do --------------------------------


def check_vocabulary(facts: Ready | None, vocabulary: str) -> None:
    """Raises Incompatible, naming the field, if the same token ids mean other words in the two models."""
    if facts is None:
        raise EngineDied("The engine that was to draft has just ended.")
    if facts.vocabulary != vocabulary:
        raise Incompatible(
            "The drafting model's vocabulary is not the answering model's.",
            hint="Let a model of the same family draft: its token ids must mean the same.",
            param="vocabulary",
        )


async def await_accepted(events: AsyncGenerator[Event, None]) -> None:
    """Wait until the engine has accepted the work. Raises the error with which it refuses."""
    if not isinstance(await anext(events, None), Accepted):
        raise EngineDied("The engine did not take the work.")


async def draft_report(events: AsyncGenerator[Event, None]) -> DraftReport:
    """Wait for the drafter's report at the end of the text. Raises EngineDied if it ends without one."""
    async for event in events:
        if isinstance(event, DraftReport):
            return event
    raise EngineDied("The engine stopped drafting without a word.")
