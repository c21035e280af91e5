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
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from fleetd.compression.document import Document
from fleetd.compression.history import History
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.selection import Selection
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.control.smart_prefill_result import Form, SmartPrefillResult
from fleetd.engine.pool import EnginePool
from fleetd.engine.protocol import Accepted, Event, Loading, Ready
from fleetd.errors import FleetError
from fleetd.models.folder import ModelFolder
from fleetd.observe import get_logger
from fleetd.plan.costs import MEASURED_TOKENS
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import SmartPrefillQuestion
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, THIS_NAME, Job, prompt_text
from fleetd.requests.members import Members
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.placement import Placement
from fleetd.requests.ports import MetricsPort
from fleetd.requests.request import Request
from fleetd.requests.request_trace import smart_options
from fleetd.requests.smart_prefill import shortened_prompts as smart_prompt
from fleetd.requests.smart_prefill.compression_job import (
    CompressionJob,
    CompressionPrice,
    CompressionService,
    decide_unscored,
    kept_share,
)
from fleetd.requests.smart_prefill.skip import SkipCompression

log = get_logger("fleetd.compression")


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """What answers: ``choice`` says where, ``folder`` is the model on this machine."""

    name: str
    folder: ModelFolder | None
    choice: Placement


class SmartPrefill(PipelineStep):
    """The step that shortens prompts which ask for it.

    Args:
        best_s: seconds that a model here would take with the help of others for so many tokens, of which so
            many are cached and, unless that is 0, only so many kept; 0 where that is not known.
    """

    def __init__(
        self,
        compressing: CompressionService,
        members: Members,
        pool: EnginePool,
        metrics: MetricsPort,
        *,
        best_s: Callable[[ModelFolder, int, int, int], float] = lambda folder, tokens, cached, kept: 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compressing = compressing
        self._pool = pool
        self._metrics = metrics
        self._best_s = best_s
        self._monotonic = monotonic
        self._history = History()
        self._affinity = members.affinity

    # ---- one request -------------------------------------------------------------------------------------

    async def shorten(self, request: Request) -> AsyncGenerator[Loading, None]:
        """Progress, while ``request.job`` becomes the job as it is to run, for a job with ``smart``.

        Raises nothing but cancellation: whatever goes wrong, the prompt stays whole and the reason is told.
        """
        request.smart = SmartPrefillResult()
        request.bill = self.compressing.bill(request.id)
        request.job = self.whole(request.asked)
        ended = False
        try:
            try:
                async with aclosing(self._shorten(request)) as steps:
                    async for progress in steps:
                        yield progress
            except SkipCompression as skip:
                self._skip(request, skip.code, skip.reason)
            except FleetError as error:
                self._skip(request, error.code, error.message)
            except Exception as error:
                # A bug in smart prefill must not fail the request.
                log.warning("smart.bug", type=type(error).__name__)
                self._skip(request, "failed", f"Internal error ({type(error).__name__}).")
            ended = True
        finally:
            if not ended:
                request.bill.close("cancelled")
                request.bill = request.smart_plan = None
        log.info("smart.prepared", request=request.id, form=request.smart.form, code=request.smart.code)

    @staticmethod
    def whole(job: Job) -> Job:
        """The same job with all of its prompt."""
        return replace(job, request=smart_prompt.plain(job.request))

    def try_whole(self, request: Request, error: FleetError) -> bool:
        """After a shortened prompt failed: True if the whole one is to be tried, which is then the job."""
        if request.smart is None or not request.smart.used or request.answering:
            return False
        self._skip(request, error.code, error.message)
        log.warning("smart.whole", request=request.id, code=error.code)
        request.job = self.whole(request.asked)
        return True

    def _skip(self, request: Request, code: str, reason: str) -> None:
        """The prompt is read whole."""
        told = request.smart or SmartPrefillResult()
        score_s = told.score_s or self._monotonic() - request.arrived_s
        request.smart = msgspec.structs.replace(told, form="", code=code, reason=reason, score_s=score_s)

    async def _shorten(self, request: Request) -> AsyncGenerator[Loading, None]:
        """Raises SkipCompression, FleetError; then the job stays as it is."""
        job, policy = request.asked, request.asked.smart
        if policy is None or request.bill is None:
            raise SkipCompression("failed", "Nothing was asked for.")
        target = AnsweringModel(request.model.name, request.model.folder, request.placement)
        # What takes longer the longer a prompt is, takes it in a thread.
        found, tokens = await asyncio.to_thread(_document, job)
        if tokens < policy.min_prompt_tokens:
            raise _short(tokens, policy)
        compression = CompressionJob(request.id, found, tokens, policy, request.bill, not job.shareable)
        compression.aged = self._history.find(smart_prompt.said(job.request), policy)
        try:
            # What needs no scores comes first: nothing is loaded for a prompt that stays whole.
            await asyncio.to_thread(decide_unscored, compression)
            if compression.selection is not None:
                self._check(job, compression, policy)
            if target.choice.node_id == THIS_NODE and target.folder is not None:
                # It has to be loaded anyway, and only then says which forms it takes; and loaded in this
                # order, it is the compressor for which there may be no room.
                async with aclosing(self._pool.loading(target.folder)) as steps:
                    async for progress in steps:
                        yield progress
            form = self._form(policy, smart_prompt.turns(found), target, tokens)
            compression.policy = msgspec.structs.replace(policy, mode=form)
            compression.price = lambda tokens, ratio: self._price(job, target, form, tokens, ratio)
            if compression.selection is None:
                async with aclosing(self.compressing.score(compression)) as steps:
                    async for progress in steps:
                        yield progress
        finally:
            _note(request, compression)
        selection = self._check(job, compression, policy)
        make = smart_prompt.shortened if form == "text" else smart_prompt.sparse
        shortened = await asyncio.to_thread(make, job.request, found, selection)
        request.smart = msgspec.structs.replace(
            request.smart or SmartPrefillResult(),
            form=form,
            # As text it has lines that say what is missing.
            compressed_tokens=selection.text_tokens if form == "text" else selection.kept_tokens,
            score_s=self._monotonic() - request.arrived_s,
        )
        request.job = replace(job, request=shortened)

    def _check(self, job: Job, compression: CompressionJob, policy: SmartPrefillPolicy) -> Selection:
        """The selection, if it leaves something out and keeps something. Raises SkipCompression.

        A conversation is remembered by what was asked for, whichever form that became.
        """
        found, selection = compression.document, compression.selection
        if selection is None or smart_prompt.is_empty(found, selection):
            raise SkipCompression("empty", "Nothing would be left of the prompt.")
        if selection.original_tokens < policy.min_prompt_tokens:
            raise _short(selection.original_tokens, policy)
        self._history.keep(smart_prompt.said(job.request), policy, selection, compression.compressor)
        if selection.declined:
            raise SkipCompression("declined", selection.declined)
        if all(selection.whole(found, index) for index in range(len(found.blocks))):
            raise SkipCompression("cached", "The conversation so far was read whole, and goes on so.")
        return selection

    async def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        if request.smart is None:
            return event
        if isinstance(event, Accepted) and request.smart.form == "sparse":
            self._accepted(request, request.smart, event)
        return event

    def _accepted(self, request: Request, told: SmartPrefillResult, event: Accepted) -> None:
        """The engine says what a sparse prompt comes to: it also keeps what it cannot do without."""
        if event.kept:
            request.smart = msgspec.structs.replace(
                told, original_tokens=event.prompt_tokens, compressed_tokens=event.kept
            )
        else:
            reason = event.dense_reason or "The machine that answers does not know sparse prefill."
            self._skip(request, "no_form", reason)
        if request.smart != told:
            request.announce()

    def ended(self, request: Request) -> None:
        """Close the bill, and count what came of the prompt."""
        told = request.smart
        if told is None or request.bill is None:
            return
        request.bill.close(told.code)
        kept = told.compressed_tokens if told.used else 0
        self._metrics.smart(told.code or "used", told.form, kept, told.dropped_tokens)

    # ---- for people --------------------------------------------------------------------------------------

    async def plan(
        self, view: PlanView, ratio: float, folder: ModelFolder, policy: SmartPrefillPolicy
    ) -> PlanView:
        """The same ways to prefill a prompt, and smart prefill among them as if it had been asked for."""
        priced = [option.predicted_s for option in view.options if option.predicted_s is not None]
        target = AnsweringModel(folder.name, folder, Placement(THIS_NODE, LOCAL))
        policy = msgspec.structs.replace(policy, target_ratio=ratio or policy.target_ratio)
        if policy.mode == "sparse":
            # A model that is not loaded does not say yet that it can.
            policy = msgspec.structs.replace(policy, mode="auto")
        tokens = view.prompt_tokens
        try:
            if tokens < policy.min_prompt_tokens:
                raise _short(tokens, policy)
            form = self._form(policy, 0, target, tokens)
            ratio = self._computed(form, target, tokens, kept_share(policy, tokens))
            asked = SmartPrefillQuestion(
                tokens,
                ratio,
                self.compressing.scorers.speed_at(THIS_NODE, folder.name),
                dense_s=min(priced, default=0.0),
                kept_s=self._kept_s(folder, form, tokens, ratio),
            )
            plan = await self.compressing.options(CompressionPrice(asked, folder.weights_bytes), policy)
            smart, _ = smart_options(plan, chosen=True)
        except SkipCompression as skip:
            smart = OptionView("smart", [THIS_NAME], None, code=skip.code, reason=skip.reason)
        if not smart.chosen:
            return msgspec.structs.replace(view, options=[*view.options, smart])
        others = [msgspec.structs.replace(option, chosen=False) for option in view.options]
        return msgspec.structs.replace(view, options=[smart, *others])

    # ---- how, and for what -------------------------------------------------------------------------------

    def _form(self, policy: SmartPrefillPolicy, turns: int, target: AnsweringModel, tokens: int) -> Form:
        """``turns``: answers that the prompt holds. Raises SkipCompression."""
        if policy.mode == "text":
            return "text"
        why_not = self._not_sparse(target)
        if policy.mode == "sparse" and why_not:
            raise SkipCompression("no_form", f"{target.name} cannot prefill a part of a prompt: {why_not}")
        if policy.mode == "sparse":
            return "sparse"
        # A conversation goes on: text is in the prefix cache when its next turn comes, sparse keys are not.
        # And a sliding window may be more than all that is to be kept.
        if why_not or turns or self._tail(target) > kept_share(policy, tokens) * tokens:
            return "text"
        return "sparse"

    def _not_sparse(self, target: AnsweringModel) -> str:
        """Why the model that answers cannot leave tokens out; "" where it can."""
        if target.choice.node_id != THIS_NODE:
            return "it runs on another machine."
        facts = self._facts(target)
        return "it is not loaded." if facts is None else facts.sparse

    def _facts(self, target: AnsweringModel) -> Ready | None:
        engine = self._pool.engine(target.folder) if target.folder is not None else None
        return None if engine is None else engine.facts

    def _tail(self, target: AnsweringModel) -> int:
        """Tokens at a prompt's end that sparse prefill computes, whatever is to be kept."""
        facts = self._facts(target)
        return 0 if facts is None else facts.sparse_tail

    def _computed(self, form: Form, target: AnsweringModel, tokens: int, ratio: float) -> float:
        """What share of a prompt is prefilled where ``ratio`` of it is to be kept."""
        if form != "sparse":
            return ratio
        return min(1.0, max(ratio, self._tail(target) / max(1, tokens)))

    def _price(
        self, job: Job, target: AnsweringModel, form: Form, tokens: int, ratio: float
    ) -> CompressionPrice:
        """What reading all of it would take, what is cached already counted."""
        ratio = self._computed(form, target, tokens, ratio)
        node_id = target.choice.node_id
        links = self._affinity.links(prompt_text(smart_prompt.plain(job.request)))
        cached = self._affinity.cached_chars(node_id, target.name, links) // CHARS_PER_TOKEN
        weights_bytes = target.folder.weights_bytes if target.folder is not None else 0
        speed = self.compressing.scorers.speed_at(node_id, target.name)
        if speed is None:
            return CompressionPrice(SmartPrefillQuestion(tokens, ratio, None), weights_bytes)
        new = range(min(cached, tokens), tokens)
        dense_s = speed.total(1.0, new, MEASURED_TOKENS)
        helped_s = kept_s = 0.0
        if node_id == THIS_NODE and target.folder is not None and job.shareable:
            helped_s = self._best_s(target.folder, tokens, new.start, 0)
            kept_s = self._kept_s(target.folder, form, tokens, ratio)
        if helped_s > 0:
            dense_s = min(dense_s, helped_s)
        return CompressionPrice(
            SmartPrefillQuestion(tokens, ratio, speed, dense_s=dense_s, kept_s=kept_s), weights_bytes
        )

    def _kept_s(self, folder: ModelFolder, form: Form, tokens: int, ratio: float) -> float:
        """Seconds to prefill what is kept, with helpers; 0 if unknown."""
        kept = math.ceil(tokens * ratio)
        if form == "sparse" and kept < tokens:
            return self._best_s(folder, tokens, 0, kept)
        return self._best_s(folder, kept, 0, 0)


def _note(request: Request, compression: CompressionJob) -> None:
    """What was found out about the prompt, however far that came."""
    request.smart_plan, request.smart_steps = compression.plan, compression.steps
    request.smart_planned_s = compression.planned_s
    selection = compression.selection
    request.smart = SmartPrefillResult(
        compressor=compression.compressor,
        nodes=compression.names,
        original_tokens=selection.original_tokens if selection else compression.tokens,
        compressed_tokens=selection.kept_tokens if selection else 0,
        scored_tokens=compression.scored_tokens,
    )


def _document(job: Job) -> tuple[Document, int]:
    """And about how many tokens it has."""
    if job.request.echo:
        raise SkipCompression("echo", "The prompt is to be echoed, so it is read whole.")
    found = smart_prompt.document(job.request)
    if found is None:
        raise SkipCompression("token_prompt", "A prompt of token ids has no text that could be cut.")
    return found, found.estimated_tokens


def _short(tokens: int, policy: SmartPrefillPolicy) -> SkipCompression:
    least = policy.min_prompt_tokens
    return SkipCompression("short", f"The prompt has about {tokens} tokens; smart prefill begins at {least}.")
