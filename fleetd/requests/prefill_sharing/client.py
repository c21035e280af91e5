"""The step of shared prefill: whether other machines help with a prompt, and what happens if one fails.

    possible? ──no──► the request runs as if there were no helpers
        │ yes
    Generate(shared) ─► Accepted ─► planned ─► local ──────────────────────► PrefillAlone
                                       └─────► all helpers agree? ──no─────► PrefillAlone
                                                 └─yes─► PrefillWithHelpers ─► one fails ► PrefillAlone, from
                                                           │                          what is verified
                                                           └────► PrefillReport

No failure of a helper fails the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from fleetd import limits
from fleetd.control.model_facts import WireBits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    Accepted,
    Event,
    Loading,
    PrefillReport,
    PrefillWithHelpers,
    StepTime,
    Tokenized,
)
from fleetd.errors import FleetError, Incompatible, from_code
from fleetd.models.folder import ModelFolder
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.choice import plan_prefill
from fleetd.plan.prefill.options import HelperSpec, Load, PlanChoice, PrefillOption
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.prefill.split import WarmRows
from fleetd.plan.refusals import THIS_NODE
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import BackgroundTasks
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, THIS_NAME, Job, PlanKind, Planned
from fleetd.requests.members.members import Members, eligible
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.planner_facts import PartOfSplit
from fleetd.requests.ports import FleetPort, MetricsPort
from fleetd.requests.prefill_sharing import messages
from fleetd.requests.prefill_sharing.agreement import Agreement, SharingTerms
from fleetd.requests.prefill_sharing.warm_notes import WarmNotes
from fleetd.requests.request import Request
from fleetd.requests.row_origins import Labels, no_label
from fleetd.requests.timeline import Span, told_spans

log = get_logger("fleetd.sharing")

# Least time allowed for set-up, even if the plan would save less: busy machines answer late.
_SETUP_LEAST_S = 0.5
# For the helpers' own accounts of what they did; they come with the last bytes or not at all.
_ACCOUNTS_S = 2.0
_WARM_WITHIN_S = 5.0
# A hand-off that takes longer than so many times what was planned, and this, casts doubt on the links.
_LATE, _LATE_S = 2.0, 0.5


class PrefillSharing(PipelineStep):
    """The step that lets other machines compute a part of a prefill.

    Args:
        members: the machines that could help, and what was learned of them.
        speeds: of this machine's own models.
        label: under which what comes from a machine is kept.
    """

    events = (Tokenized, PrefillReport)

    def __init__(
        self,
        partners: FleetPort,
        pool: EnginePool,
        members: Members,
        metrics: MetricsPort,
        speeds: ModelSpeeds | None = None,
        *,
        label: Labels = no_label,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partners = partners
        self.pool = pool
        self.metrics = metrics
        self.monotonic = monotonic
        self.label = label
        self.members = members
        self.speeds = speeds or ModelSpeeds()
        self.warm_notes = WarmNotes()
        self._runs: dict[Request, SharingRun] = {}
        self._warmed: dict[tuple[str, str], float] = {}
        self.background = BackgroundTasks()

    # ---- one prompt --------------------------------------------------------------------------------------

    def possible(self, job: Job, folder: ModelFolder) -> bool:
        """True if a helper might speed up this prompt. Cheap: it runs before every request."""
        if not job.shareable or job.images:
            return False
        members = self.members.others("prefill")
        if not members or (own := self.held(folder.name)) is None:
            return False
        engine = self.pool.engine(folder)
        if engine is not None and engine.facts is not None and engine.facts.shape.unshareable:
            return False
        if all(eligible(member, own.digest, even_left_out=True) for member in members):
            return False
        return len(job.prompt_text) // CHARS_PER_TOKEN >= limits.SHARE_LEAST_TOKENS

    def prepare(self, request: Request) -> None:
        folder = request.folder_here
        if folder is not None and self.possible(request.job, folder):
            own = self.held(folder.name)
            request.attempt.generate = msgspec.structs.replace(
                request.attempt.generate, shared=True, warm=self.warm_notes.rows(own.digest) if own else []
            )
            self._runs[request] = SharingRun(self, folder, request)

    async def decide(self, request: Request, accepted: Accepted) -> None:
        """Announce the plan that is chosen for the prompt, once its helpers have agreed."""
        if (run := self._runs.get(request)) is not None:
            request.announce(await run.decide(accepted))

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        run = self._runs.get(request)
        if run is None:
            return event
        if isinstance(event, PrefillReport) and (planned := run.reported(event)) is not None:
            # The request goes on without its helpers.
            request.announce(planned)
        # A Tokenized would let the client's headers go out, which name the plan that Accepted decides.
        return None

    def attempt_ended(self, request: Request) -> asyncio.Task[None] | None:
        run = self._runs.pop(request, None)
        return run.end() if run is not None else None

    # ---- for prompts -------------------------------------------------------------------------------------

    def held(self, name: str) -> ModelCard | None:
        """The model on this machine, once its files are hashed."""
        model = self.members.here().model(name)
        return model if model is not None and model.digest else None

    def choose(self, own: ModelCard, asked: PrefillSize, *, exact: bool) -> PlanChoice:
        """The planner's choice. ``exact``: of helpers that compute the bytes of this machine."""
        here, *helpers = planner_facts.corrected(self.machines(own, exact=exact), self.members, own.digest)
        if exact:
            asked = planner_facts.as_held(asked)
        return plan_prefill(asked, here, helpers, self.members.last_prefill.get(own.name))

    def machines(self, own: ModelCard, *, exact: bool) -> list[HelperSpec]:
        """This machine first, all by their own figures."""
        here, helping = self.members.here(), self.members.others("prefill")
        if exact:
            helping = [each for each in helping if planner_facts.alike(here.card, each.card, own.name)]
        return planner_facts.chain_of(here, helping, own)

    def chose(self, choice: PlanChoice, own: ModelCard) -> None:
        """Remember it, and let helpers load what would have made this one faster."""
        self.members.last_prefill[own.name] = choice.best
        for load in choice.warm:
            self.warm(load, own)

    def warm(self, load: Load, own: ModelCard) -> None:
        """Ask a machine to load a model for later prompts, unless it was asked a short while ago."""
        now_s = self.monotonic()
        before_s = self._warmed.get((load.node_id, own.digest), float("-inf"))
        if now_s - before_s >= limits.SHARE_WARM_S:
            self._warmed[load.node_id, own.digest] = now_s
            self.background.start(self._warm(load, own))

    def learn(self, model: str, digest: str, parts: Iterable[tuple[PartOfSplit, Sequence[StepTime]]]) -> None:
        """Note the seconds that each machine took for its part, in the order of the chain."""
        for part, steps in parts:
            took_s = sum(step.seconds for step in steps if step.name == step_names.COMPUTED)
            self.members.computed(
                part.node_id, digest, part.token_s, expected_s=part.expected_s, took_s=took_s
            )
            if part.node_id == THIS_NODE:
                self.speeds.part_ran(model, expected_s=part.expected_s, took_s=took_s, now_s=self.monotonic())

    def blame(self, shared: Agreement, digest: str) -> None:
        """Leave out for a while the helpers that failed."""
        for helper in shared.helpers:
            if helper.failed is not None:
                self.members.failed(helper.node_id, "prefill", helper.failed, digest)

    async def close(self) -> None:
        """End what still runs in the background."""
        await self.background.close()

    async def _warm(self, load: Load, own: ModelCard) -> None:
        try:
            body = messages.encode(messages.WarmModel(own.name, own.digest, load.first, load.last))
            await self.partners.ask(load.node_id, messages.WARM, body, within_s=_WARM_WITHIN_S)
        except FleetError as error:
            log.info("share.not_warmed", peer=load.node_id[:7], model=own.name, reason=str(error))


class SharingRun:
    """One prompt that may be shared, from its Accepted to the end of its helpers' work."""

    def __init__(self, sharing: PrefillSharing, folder: ModelFolder, request: Request) -> None:
        self._sharing = sharing
        self._folder = folder
        self._request = request
        self._attempt = request.attempt
        self._outcome = request.attempt.sharing
        self._alone = request.placement.planned
        self._agreement: Agreement | None = None
        self._parts: list[PartOfSplit] = []
        self._digest = ""
        self._cold: Callable[[], PlanChoice] | None = None
        # The client has left: what becomes of the helpers is no fault of theirs.
        self._left = False
        # When the engine began to share it, and how long that took until all had arrived.
        self._began_s = self._took_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._planned: asyncio.Future[Planned] = asyncio.get_running_loop().create_future()

    async def decide(self, accepted: Accepted) -> Planned:
        """Choose, agree, and tell the engine; it prefills when this returns."""
        engine = self._sharing.pool.engine(self._folder)
        if not accepted.waits or engine is None:
            return self._alone
        try:
            return await self._decide(engine, accepted)
        except Exception as error:
            # A bug in sharing must not fail the request.
            log.warning("share.bug", type=type(error).__name__)
            engine.alone(accepted.id)
            return self._alone

    async def _decide(self, engine: EngineProcess, accepted: Accepted) -> Planned:
        name, facts = self._folder.name, engine.facts
        own = self._sharing.held(name)
        if facts is None or own is None:
            engine.alone(accepted.id)
            return self._alone
        own = planner_facts.loaded_here(own, facts)
        asked = planner_facts.prompt(
            own.shape,
            accepted.prompt_tokens,
            accepted.cached,
            accepted.chunk,
            places=accepted.places,
            states=accepted.states,
        )
        told = self._request.attempt.generate.warm
        matching = [told[at] for at in accepted.warm if at < len(told)]
        # What is exact so far stays so.
        warm = dict(self._sharing.warm_notes.of(own.digest, matching, exact=accepted.exact))
        asked = msgspec.structs.replace(asked, warm=tuple(warm.items()))
        exact = self._request.attempt.generate.exact
        choice = self._sharing.choose(own, asked, exact=exact)
        self._request.decided(choice, accepted, self._sharing.monotonic())
        split = choice.best.split
        if split is None or facts.arithmetic is None:
            engine.alone(accepted.id)
            self._sharing.chose(choice, own)
            return self._alone_because()
        own_chunks = split.chunk == accepted.chunk
        terms = SharingTerms(
            accepted.id,
            name,
            own.digest,
            split,
            facts.arithmetic,
            own_chunks,
            facts.shape.kv_bits,
            choice.best.wire_bits,
            accepted.exact and not choice.best.wire_bits,
        )
        self._digest = own.digest
        self._parts = planner_facts.parts(choice.best, self._sharing.machines(own, exact=exact))
        chain = list(zip(choice.best.helpers, choice.best.names, strict=True))
        self._agreement = Agreement(self._sharing.partners, engine, terms, chain, warm)
        # What would be chosen if helpers no longer had what they kept.
        self._cold = partial(self._sharing.choose, own, msgspec.structs.replace(asked, warm=()), exact=exact)
        within_s = min(limits.SHARE_SETUP_S, max(_SETUP_LEAST_S, _gain_s(choice)))
        self._task = asyncio.create_task(
            self._agree_and_watch(engine, self._agreement, choice.best, terms, within_s)
        )
        self._sharing.chose(choice, own)
        # Awaiting the future itself would cancel it if this request is cancelled.
        await asyncio.wait({self._planned})
        return self._planned.result()

    async def _agree_and_watch(
        self,
        engine: EngineProcess,
        agreed: Agreement,
        option: PrefillOption,
        terms: SharingTerms,
        within_s: float,
    ) -> None:
        """Agree, tell the engine, watch the helpers. After a failure the engine goes on alone at once."""
        try:
            exact = await agreed.reach(within_s)
            if self._request.attempt.generate.exact and not exact:
                raise Incompatible("The helpers round in another order, and the answer is to be exact.")
            self._check_warm(agreed, terms)
            origins = [await self._sharing.label(helper.node_id) for helper in agreed.helpers]
            self._began_s = self._sharing.monotonic()
            warm = [helper.warm for helper in agreed.helpers]
            engine.share(
                PrefillWithHelpers(
                    terms.id,
                    terms.split,
                    _left_s(option),
                    exact,
                    origins,
                    warm if any(warm) else [],
                    terms.wire_bits,
                )
            )
            self._outcome.agreed_exact, self._outcome.agreed_at_s = exact, self._began_s
            names = (*option.names, THIS_NAME)
            shared = Planned(_kind(option), names, self._request.exactness, wire_bits=terms.wire_bits)
            self._planned.set_result(shared)
            await agreed.watch()
        except FleetError as error:
            if self._left:
                return  # the engine has no use for them any more
            if self._outcome.report is None:
                engine.alone(terms.id, error.message)
                self._attempt.code, self._attempt.reason = error.code, error.message
            # Else the engine noticed first, and the client has been told its reason: the trace says the same.
            self._sharing.blame(agreed, terms.digest)
            log.warning("share.failed", request=terms.id, code=error.code, reason=error.message)
        except Exception as error:
            engine.alone(terms.id, "internal error")
            log.warning("share.bug", type=type(error).__name__)
        finally:
            if not self._planned.done():
                self._planned.set_result(self._alone_because())

    def _check_warm(self, agreed: Agreement, terms: SharingTerms) -> None:
        """Raises Incompatible if a helper has lost what it kept, and the plan does not pay without."""
        lost = [helper for helper in agreed.helpers if helper.expected is not None and helper.warm is None]
        for helper in lost:
            if helper.expected is not None:
                self._sharing.warm_notes.gone(terms.digest, helper.node_id, helper.expected)
        if not lost or self._cold is None:
            return
        cold = self._cold().best
        if (cold.split, cold.wire_bits) != (terms.split, terms.wire_bits):
            raise Incompatible(f"{lost[0].name} no longer has the rows of the turn before.")

    def _note_warm(self, agreed: Agreement) -> None:
        """Remember what the helpers keep of this prompt."""
        report = self._outcome.report
        if report is None or len(report.prefixes) != len(agreed.helpers):
            return
        split, exact = agreed.split, agreed.terms.exact
        for helper, prefix in zip(agreed.helpers, report.prefixes, strict=True):
            if helper.kept:
                layers = split.layers_of(helper.rank)
                rows = WarmRows(
                    split.tokens_of(helper.rank).stop, layers.start, layers.stop, prefix, exact=exact
                )
                # That all helpers compute the same bytes, they do not know of each other.
                self._sharing.warm_notes.note(
                    self._digest, helper.node_id, rows, exact=exact and bool(self._outcome.agreed_exact)
                )

    def reported(self, report: PrefillReport) -> Planned | None:
        """The shared prefill has ended. The new plan if the engine goes on alone, else None."""
        attempt = self._attempt
        self._outcome.report, self._outcome.reported_s = report, self._sharing.monotonic()
        self._took_s = self._outcome.reported_s - self._began_s
        if not report.code:
            attempt.code = attempt.reason = ""
        elif not attempt.code:
            attempt.code, attempt.reason = report.code, report.reason
        agreed, task = self._agreement, self._task
        if agreed is None or task is None:
            return None
        if not report.code:
            for helper in agreed.helpers:
                self._sharing.members.succeeded(helper.node_id, "prefill", self._digest)
            return None
        if all(helper.failed is None for helper in agreed.helpers):
            # The engine found a fault in what came, or missed something; it cannot know whose fault it was.
            for helper in agreed.helpers:
                helper.failed = from_code(report.code, report.reason)
            self._sharing.blame(agreed, self._digest)
        # Stop the watcher before dismissing helpers, or it would count them as failed.
        task.cancel()
        agreed.close()
        self._sharing.metrics.fallback(attempt.code)
        return self._alone_because()

    def _alone_because(self) -> Planned:
        reason = self._attempt.reason or self._alone.reason
        return Planned("local", LOCAL.nodes, self._request.exactness, reason, wire_bits=self._wire_bits)

    @property
    def _wire_bits(self) -> WireBits:
        """Bits of the keys and values from helpers that this machine goes on from alone; 0 is as computed."""
        report, accepted, agreed = self._outcome.report, self._attempt.accepted, self._agreement
        if report is None or accepted is None or agreed is None or report.verified <= accepted.cached:
            return 0
        return agreed.terms.wire_bits

    def end(self) -> asyncio.Task[None] | None:
        """The answer has ended, in any way. A task if helpers' accounts may still come."""
        if self._task is None or self._agreement is None:
            self._count()
        elif self._outcome.went_well and (self._attempt.error is None or self._request.answering):
            return self._sharing.background.start(self._conclude(self._task, self._agreement))
        elif self._client_left:
            self._sharing.background.start(self._go_on(self._task, self._agreement))
        else:
            # Also after an attempt that may be made again: the request forgets it then.
            self._close(self._task, self._agreement)
        return None

    @property
    def _client_left(self) -> bool:
        """True if the request ended while its helpers computed, and nothing had failed."""
        return bool(self._began_s) and self._outcome.report is None and self._attempt.error is None

    async def _go_on(self, task: asyncio.Task[None], agreed: Agreement) -> None:
        """The engine may read the prompt to its end, for a client that asks again. If it does not, it closes
        the streams, and the helpers end."""
        self._left = True
        try:
            await asyncio.wait({task}, timeout=limits.SHARE_LEFT_S * limits.SHARE_LATE)
        finally:
            self._close(task, agreed)

    async def _conclude(self, task: asyncio.Task[None], agreed: Agreement) -> None:
        """The helpers' own accounts come with the last bytes, or not at all."""
        try:
            await asyncio.wait({task}, timeout=_ACCOUNTS_S)
        finally:
            self._close(task, agreed)

    def _close(self, task: asyncio.Task[None], agreed: Agreement) -> None:
        task.cancel()
        agreed.close()
        self._outcome.spans = self._told(agreed)
        self._count()
        if self._outcome.went_well:
            steps = [*(helper.steps or () for helper in agreed.helpers), self._outcome.own_steps]
            self._sharing.learn(self._folder.name, self._digest, zip(self._parts, steps, strict=False))
            self._carried(agreed)
            self._note_warm(agreed)

    def _told(self, agreed: Agreement) -> list[Span]:
        """What all machines did by their own accounts, by this machine's clock."""
        clock_offset_s, here = self._sharing.members.clock_offset_s, self._request.here
        within = (self._began_s, self._began_s + self._took_s)
        accounts = [
            (helper.name, clock_offset_s(helper.node_id), (helper.steps or ())[: limits.SHARE_STEPS])
            for helper in agreed.helpers
        ]
        accounts.append((here, 0.0, self._outcome.own_steps))
        return [
            span
            for machine, offset_s, steps in accounts
            for span in told_spans(steps, machine, offset_s, within)
        ]

    def _carried(self, agreed: Agreement) -> None:
        """Note how fast the helpers' paths are at least, by what they sent, and if one was far slower."""
        choice = self._outcome.choice
        planned = dict(choice.best.steps) if choice is not None else {}
        exposed_s = sum(step.seconds for step in self._outcome.own_steps if step.name == step_names.EXPOSED)
        late = exposed_s > _LATE * planned.get(step_names.EXPOSED, 0.0) + _LATE_S
        received = _n_bytes(self._outcome.own_steps, step_names.WAITED)
        for helper in agreed.helpers:
            # It may tell any number, so no more counts than came here from all of them.
            count = min(_n_bytes(helper.steps or (), step_names.COMPUTED), received)
            self._sharing.partners.carried(helper.node_id, count, self._took_s, late=late)

    def _count(self) -> None:
        if (choice := self._outcome.choice) is not None:
            # By this machine's own account: helpers may tell any number, and count the same bytes again.
            n_bytes = sum(step.n_bytes for step in self._outcome.own_steps)
            self._sharing.metrics.share(choice.best.kind, self._request.prefill_outcome, n_bytes)


def _n_bytes(steps: Sequence[StepTime], name: str) -> int:
    return sum(step.n_bytes for step in steps if step.name == name)


def _gain_s(choice: PlanChoice) -> float:
    """Seconds that the chosen way saves over staying here."""
    local_s = [option.predicted_s for option in choice.rejected if option.kind == "local"]
    return sum(local_s) - choice.best.predicted_s


def _left_s(option: PrefillOption) -> float:
    """Seconds that the plan expects from the agreement to the end of the prefill."""
    others = sum(seconds for name, seconds in option.steps if name in (step_names.AGREED, step_names.DECODED))
    return option.predicted_s - others


def _kind(option: PrefillOption) -> PlanKind:
    if option.kind == "any":
        raise ValueError("a machine that cannot help is no way to compute")
    return option.kind
