"""The step of smart prefill: a small model scores a long prompt, and what does not matter is not prefilled.

    asked? ─► long enough ─► gate ─► a scorer, worth it? ─► scored ─► selected ─► text or sparse ─► runs
       any "no", any failure, any delay ───────────────────────────────────► the whole prompt runs

No failure of smart prefill fails the request: the whole prompt is prefilled, and the client is told why.
Scores that were not used are not billed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.compression.document import Document
from fleetd.compression.history import History
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.selection import Selection
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.control.smart_prefill_result import Form, SmartPrefillResult
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Accepted, Event, Generate, Loading, Ready, TextPrompt, Tokenized
from fleetd.errors import FleetError
from fleetd.models.folder import ModelFolder
from fleetd.plan.beginnings import KeptBeginning, from_disk
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.prefill import step_names
from fleetd.plan.prompt_forms import FormChoice, sooner_form
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import RouteQuestion
from fleetd.plan.scoring import SmartPrefillQuestion
from fleetd.plan.ways import Way, Ways
from fleetd.process.observe import get_logger
from fleetd.requests.job import CHARS_PER_TOKEN, THIS_NAME, Job, prompt_text
from fleetd.requests.members.members import Members
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.placement.placement import (
    ANSWER_TOKENS,
    KnownTokens,
    Placement,
    Placer,
    PromptPlaces,
    WantedModel,
)
from fleetd.requests.placement.way_views import way_views
from fleetd.requests.ports import MetricsPort
from fleetd.requests.request import Request, Shortening
from fleetd.requests.request_views import ways_in_front
from fleetd.requests.smart_prefill import shortened_prompts as smart_prompt
from fleetd.requests.smart_prefill.bill import ScoringBill
from fleetd.requests.smart_prefill.compression_job import (
    CompressionJob,
    CompressionPrice,
    CompressionService,
    decide_unscored,
    kept_share,
)
from fleetd.requests.smart_prefill.skip import SkipCompression
from fleetd.requests.timeline import Span

log = get_logger("fleetd.compression")

_NOWHERE: PromptPlaces = {}


class AnsweringModel(msgspec.Struct, frozen=True):
    """What answers: ``choice`` says where, ``folder`` is the model on this machine.

    ``admitted``: for a request, which waits here already. ``places``: what machines keep of the whole prompt.
    ``beside_tokens``: those of it that are not in its document, about.
    """

    name: str
    folder: ModelFolder | None
    choice: Placement
    admitted: bool = False
    places: PromptPlaces = {}
    beside_tokens: int = 0


class SmartPrefill(PipelineStep):
    """The step that shortens prompts which ask for it.

    Args:
        placer: prices all ways to read a prompt; without it, the machine that answers reads it alone.
    """

    events = (Tokenized, Accepted)

    def __init__(
        self,
        compressing: CompressionService,
        members: Members,
        pool: EnginePool,
        metrics: MetricsPort,
        *,
        placer: Placer | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compressing = compressing
        self._pool = pool
        self._metrics = metrics
        self._placer = placer
        self._monotonic = monotonic
        self._history = History()
        # Of prompts that came lately.
        self._forms: OrderedDict[bytes, Form] = OrderedDict()
        self._members = members
        # Open until the end of the request: scores that were of no use are not paid for.
        self._bills: dict[Request, ScoringBill] = {}

    # ---- one request -------------------------------------------------------------------------------------

    async def shorten(self, request: Request) -> AsyncGenerator[Loading, None]:
        """Progress, while ``request.job`` becomes the job as it is to run, for a job with ``smart``.

        Raises nothing but cancellation: whatever goes wrong, the prompt stays whole and the reason is told.
        """
        shortening = request.smart = Shortening()
        bill = self._bills[request] = self.compressing.bill(request.id)
        request.job = self.whole(request.asked)
        ended = False
        try:
            try:
                async with aclosing(self._shorten(request, shortening, bill)) as steps:
                    async for progress in steps:
                        yield progress
            except SkipCompression as skip:
                self._skip(request, shortening, skip.code, skip.reason)
            except FleetError as error:
                self._skip(request, shortening, error.code, error.message)
            except Exception as error:
                # A bug in smart prefill must not fail the request.
                log.warning("smart.bug", type=type(error).__name__)
                self._skip(request, shortening, "failed", f"Internal error ({type(error).__name__}).")
            ended = True
        finally:
            if not ended:
                self._bills.pop(request).close("cancelled")
                shortening.plan = None
        result = shortening.result
        log.info("smart.prepared", request=request.id, form=result.form, code=result.code)

    @staticmethod
    def whole(job: Job) -> Job:
        """The job with all of its prompt: the same one if that has no marks, so that what is known of its
        prompt still holds."""
        request = smart_prompt.plain(job.request)
        return job if request is job.request else replace(job, request=request)

    def try_whole(self, request: Request, error: FleetError) -> bool:
        """After a shortened prompt failed: True if the whole one is to be tried, which is then the job."""
        if request.smart is None or not request.shortened or request.answering:
            return False
        self._skip(request, request.smart, error.code, error.message)
        log.warning("smart.whole", request=request.id, code=error.code)
        request.job = self.whole(request.asked)
        return True

    def _skip(self, request: Request, shortening: Shortening, code: str, reason: str) -> None:
        """The prompt is read whole."""
        score_s = shortening.result.score_s or self._monotonic() - request.arrived_s
        shortening.result = msgspec.structs.replace(
            shortening.result, form="", code=code, reason=reason, score_s=score_s
        )

    async def _shorten(
        self, request: Request, shortening: Shortening, bill: ScoringBill
    ) -> AsyncGenerator[Loading, None]:
        """Raises SkipCompression, FleetError; then the job stays as it is."""
        job, policy = request.asked, request.asked.smart
        if policy is None:
            raise SkipCompression("failed", "Nothing was asked for.")
        # Work that takes longer the longer a prompt is runs in a thread.
        found, tokens = await asyncio.to_thread(_document, job)
        beside_tokens = await asyncio.to_thread(smart_prompt.beside_tokens, job.request)
        target = AnsweringModel(
            request.model.name,
            request.model.folder,
            request.placement,
            admitted=True,
            places=request.places,
            beside_tokens=beside_tokens,
        )
        if tokens < policy.min_prompt_tokens:
            raise _short(tokens, policy)
        compression = CompressionJob(request.id, found, tokens, policy, bill, not job.shareable)
        compression.aged = self._history.find(smart_prompt.said(job.request), policy)
        loaded = list[Span]()
        try:
            # The rules that need no scores come first: nothing is loaded for a prompt that stays whole.
            await asyncio.to_thread(decide_unscored, compression)
            if compression.selection is not None:
                self._check(job, compression, policy)
            compression.target = self._may_give_way(target)
            first = compression.selection is None and await self._scored_first(job, target, compression)
            if target.choice.node_id == THIS_NODE and target.folder is not None and not first:
                # It has to be loaded anyway, and only then says which forms it takes; and loaded in this
                # order, it is the compressor for which there may be no room.
                began_s, loads = self._monotonic(), False
                async with aclosing(self._pool.loading(target.folder, over=target.choice.over)) as steps:
                    async for progress in steps:
                        loads = True
                        yield progress
                if loads:
                    # What it kept of prompts in memory before is lost.
                    self._members.lost_prompts(THIS_NODE, target.name)
                    loaded = [Span(step_names.LOADED, THIS_NAME, began_s, self._monotonic())]
                if compression.selection is None:
                    await self._count(target.folder, compression)
                    tokens = compression.tokens
                    if tokens < policy.min_prompt_tokens:
                        raise _short(tokens, policy)
            choice = self._form_of(job, target, compression, policy)
            form = choice.chosen
            self._remember(compression, target, form)
            compression.policy = msgspec.structs.replace(policy, mode=form)
            compression.price = lambda tokens, ratio: self._price(job, target, choice, tokens, ratio)
            if compression.selection is None:
                async with aclosing(self.compressing.score(compression)) as steps:
                    async for progress in steps:
                        yield progress
        finally:
            _note(shortening, compression, loaded)
        selection = self._check(job, compression, policy, form)
        make = smart_prompt.shortened if form == "text" else smart_prompt.sparse
        shortened = await asyncio.to_thread(make, job.request, found, selection)
        shortening.result = msgspec.structs.replace(
            shortening.result,
            form=form,
            # As text it has lines that say what is missing.
            compressed_tokens=selection.text_tokens if form == "text" else selection.kept_tokens,
            score_s=self._monotonic() - request.arrived_s,
        )
        request.job = replace(job, request=shortened)

    def _may_give_way(self, target: AnsweringModel) -> ModelFolder | None:
        """The model that answers, if this machine alone has it: then it may give way to what scores."""
        here = target.choice.node_id == THIS_NODE and not target.choice.over
        return target.folder if here and self.compressing.turns is not None else None

    async def _scored_first(self, job: Job, target: AnsweringModel, compression: CompressionJob) -> bool:
        """True if the prompt is to be scored before the model that answers is loaded, as the memory does not
        hold both. Its tokens are not counted then."""
        folder, policy = compression.target, compression.policy
        if folder is None or self._pool.loading_engine(folder) is not None:
            return False
        self._members.lost_prompts(THIS_NODE, target.name)
        try:
            choice = self._form_of(job, target, compression, policy)
        except SkipCompression:
            return False  # once it is loaded, it may say otherwise
        compression.price = lambda tokens, ratio: self._price(job, target, choice, tokens, ratio)
        try:
            plan = (await self.compressing.way(compression)).plan
        except SkipCompression:
            return False  # told once its tokens are counted
        return plan.worth_it and plan.parking is not None

    async def _count(self, folder: ModelFolder, compression: CompressionJob) -> None:
        """Have the model that answers count the document's tokens: every price follows from them, and an
        estimate by the letters was seen to be a third too high. Raises FleetError."""
        text = TextPrompt(compression.document.text)
        counting = Generate(f"{compression.id}.count", text, max_tokens=0, count_only=True)
        async with aclosing(self._pool.stream(folder, counting)) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    compression.counted(event.prompt_tokens)

    def _check(
        self, job: Job, compression: CompressionJob, policy: SmartPrefillPolicy, form: Form = ""
    ) -> Selection:
        """The selection, if it leaves something out and keeps something. Raises SkipCompression.

        A conversation is remembered by what was asked for, and which ``form`` that became.
        """
        found, selection = compression.document, compression.selection
        if selection is None or smart_prompt.is_empty(found, selection):
            raise SkipCompression("empty", "Nothing would be left of the prompt.")
        if selection.original_tokens < policy.min_prompt_tokens:
            raise _short(selection.original_tokens, policy)
        said, compressor = smart_prompt.said(job.request), compression.compressor
        # Before its form is known, it goes on as it began.
        sparse = form == "sparse" if form else compression.aged.sparse
        self._history.keep(said, policy, selection, compressor, sparse=sparse)
        if selection.declined:
            raise SkipCompression("declined", selection.declined)
        if all(selection.whole(found, index) for index in range(len(found.blocks))):
            raise SkipCompression("cached", "The conversation so far was read whole, and goes on so.")
        return selection

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        shortening = request.smart
        if shortening is None or shortening.result.form != "sparse":
            return event
        if isinstance(event, Accepted):
            self._accepted(request, shortening, event)
            return event
        # A Tokenized would let the client's headers go out, which say what Accepted tells of the tokens.
        return None

    def _accepted(self, request: Request, shortening: Shortening, event: Accepted) -> None:
        """The engine says what a sparse prompt comes to: it also keeps what it cannot do without."""
        expected = shortening.result
        if event.kept:
            shortening.result = msgspec.structs.replace(
                expected, original_tokens=event.prompt_tokens, compressed_tokens=event.kept
            )
        else:
            reason = event.dense_reason or "The machine that answers does not know sparse prefill."
            self._skip(request, shortening, "no_form", reason)
        if shortening.result != expected:
            request.announce()

    def request_ended(self, request: Request) -> None:
        """Close the bill, and count what came of the prompt."""
        bill = self._bills.pop(request, None)
        if request.smart is None or bill is None:
            return
        result = request.smart.result
        bill.close(result.code)
        kept = result.compressed_tokens if result.used else 0
        self._metrics.smart(result.code or "used", result.form, kept, result.dropped_tokens)

    # ---- for people --------------------------------------------------------------------------------------

    async def plan(
        self, view: PlanView, ratio: float, target: AnsweringModel, policy: SmartPrefillPolicy
    ) -> PlanView:
        """The same ways to answer a prompt, and smart prefill in front of each as if it had been asked for.

        Args:
            target: the model that reads the whole prompt, by ``view``.
        """
        policy = msgspec.structs.replace(policy, target_ratio=ratio or policy.target_ratio)
        begun: Form = ""
        if policy.mode == "sparse":
            # A model that is not loaded does not say yet that it can.
            policy, begun = msgspec.structs.replace(policy, mode="auto"), "sparse"
        tokens = view.prompt_tokens
        weights_bytes = target.folder.weights_bytes if target.folder is not None else 0
        try:
            if tokens < policy.min_prompt_tokens:
                raise _short(tokens, policy)
            ratio = kept_share(policy, tokens)
            choice = self._form(policy, target, tokens, int(ratio * tokens), begun=begun)
            ratio = self._computed(choice.chosen, target, tokens, ratio)
            asked = self._asked(target, choice, tokens, view.cached_tokens, ratio)
            price = CompressionPrice(asked, weights_bytes)
            plan = await self.compressing.options(price, policy, self._may_give_way(target))
            ways = self._ways(target, *_kept_size(choice.chosen, tokens, ratio))
            smart = ways_in_front(plan, way_views(ways) if ways is not None else [])
        except SkipCompression as skip:
            smart = [OptionView("smart", [THIS_NAME], None, code=skip.code, reason=skip.reason)]
        if not smart[0].chosen:
            return msgspec.structs.replace(view, options=[*view.options, *smart])
        whole = [msgspec.structs.replace(option, chosen=False) for option in view.options]
        return msgspec.structs.replace(view, options=[*smart, *whole])

    # ---- how, and for what -------------------------------------------------------------------------------

    def _form_of(
        self, job: Job, target: AnsweringModel, compression: CompressionJob, policy: SmartPrefillPolicy
    ) -> FormChoice:
        """The form of a request's prompt. Raises SkipCompression."""
        tokens = compression.tokens
        kept_tokens = int(compression.kept_share * tokens)
        begun = _begun(compression) or self._forms.get(_form_key(compression, target), "")
        return self._form(policy, target, tokens, kept_tokens, begun=begun, stays=_stays(job))

    def _remember(self, compression: CompressionJob, target: AnsweringModel, form: Form) -> None:
        """Keep the form of a prompt for those that repeat it. The choices of one request are such, and some
        may be priced while others are answered already."""
        key = _form_key(compression, target)
        self._forms[key] = form
        self._forms.move_to_end(key)
        while len(self._forms) > limits.SMART_REMEMBERED:
            self._forms.popitem(last=False)

    def _form(
        self,
        policy: SmartPrefillPolicy,
        target: AnsweringModel,
        tokens: int,
        kept_tokens: int,
        *,
        begun: Form = "",
        stays: bool = False,
    ) -> FormChoice:
        """The form in which the prompt is shortened.

        Args:
            kept_tokens: about how much stays of it.
            begun: the form of the prompt that it goes on from, "" if there is none.
            stays: no machine but ``target`` may be chosen for it.

        Raises SkipCompression.
        """
        if policy.mode == "text":
            return FormChoice("text")
        why_not = self._not_sparse(target)
        if not why_not and self._too_long(target, tokens):
            why_not = "the prompt is longer than its context."
        if policy.mode == "sparse" and why_not:
            raise SkipCompression("no_form", f"{target.name} cannot prefill a part of a prompt: {why_not}")
        if policy.mode == "sparse":
            return FormChoice("sparse")
        # A conversation goes on as it began, or it would find nothing of itself in the prefix cache. And a
        # sliding window may be more than all that is to be kept.
        if why_not or begun == "text" or self._tail(target) > kept_tokens:
            return FormChoice("text")
        if begun == "sparse" or stays or not 0 < kept_tokens < tokens:
            return FormChoice("sparse")
        sparse, text = self._best(target, tokens, 0, kept_tokens), self._best(target, kept_tokens, 0, 0)
        return sooner_form(sparse, text)

    def _not_sparse(self, target: AnsweringModel) -> str:
        """Why the model that answers cannot leave tokens out; "" if it can."""
        if target.choice.node_id == THIS_NODE:
            if (facts := self._facts(target)) is not None:
                return facts.sparse
            return "" if self._tail(target) else "it is not loaded."
        card, _ = self._members.model_at(target.choice.node_id, target.name)
        if card is None or not card.shape.layers:
            return "the machine that answers has not loaded it yet."
        return "" if card.shape.sparse_tail else "the machine that answers does not know sparse prefill."

    def _facts(self, target: AnsweringModel) -> Ready | None:
        engine = self._pool.engine(target.folder) if target.folder is not None else None
        return None if engine is None else engine.facts

    def _tail(self, target: AnsweringModel) -> int:
        """Tokens at a prompt's end that sparse prefill computes, whatever is to be kept."""
        if target.choice.node_id != THIS_NODE:
            card, _ = self._members.model_at(target.choice.node_id, target.name)
            return 0 if card is None else card.shape.sparse_tail
        if (facts := self._facts(target)) is not None:
            return facts.shape.sparse_tail
        # What an earlier load has found.
        earlier = self._members.here().model(target.name)
        return 0 if earlier is None else earlier.shape.sparse_tail

    def _computed(self, form: Form, target: AnsweringModel, tokens: int, ratio: float) -> float:
        """The share of a prompt that is prefilled if ``ratio`` of it is to be kept."""
        if form != "sparse":
            return ratio
        return min(1.0, max(ratio, self._tail(target) / max(1, tokens)))

    def _price(
        self, job: Job, target: AnsweringModel, choice: FormChoice, tokens: int, ratio: float
    ) -> CompressionPrice:
        """What reading all of it would take, what is cached already counted."""
        ratio = self._computed(choice.chosen, target, tokens, ratio)
        whole = prompt_text(smart_prompt.plain(job.request))
        known = self._members.known_tokens(target.choice.node_id, target.name, whole)
        # Known are its letters; these tokens are counted, mostly fewer.
        cached = tokens * known * CHARS_PER_TOKEN // max(1, len(whole))
        weights_bytes = target.folder.weights_bytes if target.folder is not None else 0
        asked = self._asked(target, choice, tokens, cached, ratio, alone=not job.shareable)
        return CompressionPrice(asked, weights_bytes)

    def _asked(
        self,
        target: AnsweringModel,
        choice: FormChoice,
        tokens: int,
        cached: int,
        ratio: float,
        *,
        alone: bool = False,
    ) -> SmartPrefillQuestion:
        """``alone``: the prompt stays here, so no other machine answers or helps."""
        speed = self.compressing.scorers.speed_at(target.choice.node_id, target.name)
        if speed is None:
            return SmartPrefillQuestion(tokens, ratio, None, form=choice)
        # Something is always computed: no time at all would say that it is not known.
        cached = min(cached, tokens - 1)
        dense_s = _alone_s(speed, tokens, cached, target.places.get(target.choice.node_id))
        helped_s = kept_s = 0.0
        if not alone:
            helped_s = self._best_s(target, tokens, cached, 0, target.places)
            kept_s = self._best_s(target, *_kept_size(choice.chosen, tokens, ratio))
        if helped_s > 0:
            dense_s = min(dense_s, helped_s)
        if self._too_long(target, tokens):
            dense_s = 0.0  # nothing to compare with: no machine reads all of it
        return SmartPrefillQuestion(tokens, ratio, speed, dense_s=dense_s, kept_s=kept_s, form=choice)

    def _best_s(
        self, target: AnsweringModel, tokens: int, cached: int, kept: int, places: PromptPlaces = _NOWHERE
    ) -> float:
        """Seconds to the first token in the best way; 0 if unknown."""
        best = self._best(target, tokens, cached, kept, places)
        return 0.0 if best is None else best.first_token_s or 0.0

    def _best(
        self, target: AnsweringModel, tokens: int, cached: int, kept: int, places: PromptPlaces = _NOWHERE
    ) -> Way | None:
        """The best way to answer; None if unknown."""
        ways = self._ways(target, tokens, cached, kept, places)
        return None if ways is None else ways.chosen

    def _ways(
        self, target: AnsweringModel, tokens: int, cached: int, kept: int, places: PromptPlaces = _NOWHERE
    ) -> Ways | None:
        """The ways to answer a prompt. One of which only ``kept`` tokens are computed is answered by the
        machine that was chosen: it alone was asked whether it can. ``places``: what machines keep of it."""
        if self._placer is None:
            return None
        at = target.choice.node_id
        ask = RouteQuestion(target.name, tokens, ANSWER_TOKENS, admitted=target.admitted)
        others = None
        if kept:
            others = [member for member in self._members.others("answer") if member.node_id == at]
            ask = replace(ask, exclude=frozenset() if at == THIS_NODE else frozenset({THIS_NODE}))
        return self._placer.ways(
            ask,
            WantedModel(target.name, target.folder is not None, folder=target.folder),
            lambda member: KnownTokens(cached if member.node_id == at else 0),
            others=others,
            kept=kept,
            places=places,
        )

    def _too_long(self, target: AnsweringModel, tokens: int) -> bool:
        """True if a prompt, whose document has ``tokens``, is longer than the model's context; about."""
        tokens += target.beside_tokens
        known = [target.folder, *(member.model(target.name) for member in self._members.others("answer"))]
        return tokens > next((model.shape.context_tokens for model in known if model is not None), tokens)


def _alone_s(speed: PrefillSpeed, tokens: int, cached: int, kept: KeptBeginning | None) -> float:
    """Seconds in which the machine that answers reads a prompt by itself. ``kept``: what it has of it."""
    disk = from_disk(kept, cached) if kept is not None else None
    ways_s = [(0.0, cached)] if disk is None else [(0.0, cached), (disk.seconds, min(disk.tokens, tokens))]
    return min(begun_s + speed.total(1.0, range(begun, tokens), MEASURED_TOKENS) for begun_s, begun in ways_s)


def _kept_size(form: Form, tokens: int, ratio: float) -> tuple[int, int, int]:
    """Sizes of what is prefilled in the end: a prompt's tokens, those that are cached, and those that are
    computed unless that is 0."""
    kept = math.ceil(tokens * ratio)
    return (tokens, 0, kept) if form == "sparse" and kept < tokens else (kept, 0, 0)


def _stays(job: Job) -> bool:
    """True if other machines may not see the prompt, or the request names those that may answer."""
    return not job.shareable or bool(job.placement)


def _form_key(compression: CompressionJob, target: AnsweringModel) -> bytes:
    """Equal for prompts that are to have the same form."""
    return smart_prompt.key(compression.document, target.name)


def _begun(compression: CompressionJob) -> Form:
    """The form of the prompt that this one goes on from or repeats; "" if there is none."""
    if compression.aged:
        return "sparse" if compression.aged.sparse else "text"
    # What was decided about it is not known any more.
    return "text" if smart_prompt.turns(compression.document) else ""


def _note(shortening: Shortening, compression: CompressionJob, loaded: list[Span]) -> None:
    """Keep what was found out about the prompt. ``loaded``: the step before it, if any."""
    shortening.plan, shortening.steps = compression.plan, [*loaded, *compression.steps]
    shortening.lost_scorer, shortening.planned_s = compression.lost, compression.planned_s
    selection = compression.selection
    shortening.result = SmartPrefillResult(
        compressor=compression.compressor,
        nodes=compression.names,
        original_tokens=selection.original_tokens if selection else compression.tokens,
        compressed_tokens=selection.kept_tokens if selection else 0,
        scored_tokens=compression.scored_tokens,
        scored=compression.scored,
        parked=compression.parked,
    )


def _document(job: Job) -> tuple[Document, int]:
    """A job's prompt as a document, and about how many tokens it has. Raises SkipCompression."""
    if job.request.echo:
        raise SkipCompression("echo", "The prompt is to be echoed, so it is read whole.")
    if job.images:
        raise SkipCompression("images", "A prompt with images is read whole.")
    system_context = job.smart is not None and job.smart.system_context
    found = smart_prompt.document(job.request, system_context=system_context)
    if found is None:
        raise SkipCompression("token_prompt", "A prompt of token ids has no text that could be cut.")
    return found, found.estimated_tokens


def _short(tokens: int, policy: SmartPrefillPolicy) -> SkipCompression:
    least = policy.min_prompt_tokens
    has = f"The prompt has about {tokens:,} tokens"
    return SkipCompression("short", f"{has}; smart prefill begins at {least:,}.")
