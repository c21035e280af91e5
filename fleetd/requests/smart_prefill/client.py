"""Smart prefill: a small model scores a long prompt, and what does not matter is not prefilled.

    asked? ─► text long enough ─► who scores, is it worth it ─► scored ─► selected ─► text or sparse ─► runs
       any "no", any failure, any delay ──────────────────────────────────────────► the whole prompt runs

Smart prefill fails no request: whatever goes wrong, the prompt is read whole, and the reason is told. What a
scorer did for nothing is not billed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from fleetd.compression.document import Document
from fleetd.compression.history import Aged, History, still_serves
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.select import select
from fleetd.compression.selection import Selection
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.control.prefill_trace import DrafterView, Trace
from fleetd.control.smart_prefill_result import Form
from fleetd.engine.protocol import Accepted, Event, Finished, Loading, Ready
from fleetd.errors import EngineDied, FleetError
from fleetd.observe import get_logger
from fleetd.plan.costs import MEASURED_TOKENS
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import SmartPrefillQuestion
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, THIS_NAME, Job, Planned, prompt_text
from fleetd.requests.members import Members
from fleetd.requests.placement import Placement
from fleetd.requests.smart_prefill import shortened_prompts as smart_prompt
from fleetd.requests.smart_prefill.compression_job import (
    CompressionJob,
    CompressionPrice,
    CompressionService,
    kept_share,
)
from fleetd.requests.smart_prefill.record import SmartPrefillRecord, options
from fleetd.requests.smart_prefill.skip import SkipCompression

log = get_logger("fleetd.compression")


class Engine(Protocol):
    @property
    def facts(self) -> Ready | None: ...


class Pool(Protocol):
    def engine(self, folder: Any) -> Engine | None: ...
    def loading(self, folder: Any) -> AsyncGenerator[Loading, None]: ...


class Metrics(Protocol):
    def smart(self, outcome: str, form: str, kept: int, dropped: int) -> None: ...


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """What answers: ``choice`` says where, ``folder`` is the model on this machine."""

    name: str
    folder: Any | None
    choice: Placement


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """The job as it is to run; its prompt is whole where ``record.told`` is not used."""

    job: Job
    record: SmartPrefillRecord


class SmartPrefill:
    """All prompts of one daemon that ask to be shortened.

    Args:
        best_s: seconds that a model here would take with the help of others for so many tokens, of which so
            many are cached and, unless that is 0, only so many kept; 0 where that is not known.
        drafter: who drafts for an answer that runs (``drafts.drafting.Drafting.drafter``).
    """

    def __init__(
        self,
        compressing: CompressionService,
        members: Members,
        pool: Pool,
        metrics: Metrics,
        record: Callable[[Trace], None],
        *,
        best_s: Callable[[Any, int, int, int], float] = lambda folder, tokens, cached, kept: 0.0,
        drafter: Callable[[str], DrafterView | None] = lambda request_id: None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.compressing = compressing
        self._pool = pool
        self._metrics = metrics
        self._record = record
        self._best_s = best_s
        self._drafter = drafter
        self._monotonic = monotonic
        self._now = now
        self._history = History()
        self._affinity = members.affinity

    # ---- one request -------------------------------------------------------------------------------------

    async def stream(
        self,
        job: Job,
        policy: SmartPrefillPolicy,
        target: AnsweringModel,
        arrived_s: float,
        run: Callable[[Job], AsyncGenerator[Planned | Loading | Event, None]],
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The answer's events; each Planned says what came of the prompt.

        Args:
            run: runs a job, as often as it takes: the shortened one, and the whole one where that one fails.

        Raises FleetError: why the whole prompt was not answered, or why an answer that had begun broke off.
        """
        prepared: PreparedJob | None = None
        try:
            async with aclosing(self.prepare(job, policy, target, arrived_s)) as steps:
                async for step in steps:
                    if isinstance(step, PreparedJob):
                        prepared = step
                    else:
                        yield step
            if prepared is None:
                raise EngineDied("Nobody prepared the prompt.")
            this, record = prepared.job, prepared.record
            while True:
                try:
                    async with aclosing(self._told(record, run(this))) as events:
                        async for event in events:
                            yield event
                except FleetError as error:
                    if not self._failed(record, error):
                        raise
                    log.warning("smart.whole", request=job.request.id, code=error.code)
                    this = self.whole(job)
                else:
                    return
        finally:
            if prepared is not None:
                self._keep(prepared.record)

    async def _told(
        self, record: SmartPrefillRecord, events: AsyncGenerator[Planned | Loading | Event, None]
    ) -> AsyncGenerator[Planned | Loading | Event, None]:
        """The same events, each Planned with what came of the prompt; one more where that changes."""
        planned: Planned | None = None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Planned):
                    planned = event
                    yield _labelled(planned, record)
                    continue
                record.on_event(event, self._monotonic())
                if isinstance(event, Finished):
                    record.drafted(self._drafter(event.id))
                if isinstance(event, Accepted) and self._changed(record, event) and planned is not None:
                    yield _labelled(planned, record)
                yield event

    async def prepare(
        self, job: Job, policy: SmartPrefillPolicy, target: AnsweringModel, arrived_s: float
    ) -> AsyncGenerator[Loading | PreparedJob, None]:
        """Progress, then the job as it is to run. Raises nothing but cancellation."""
        bill = self.compressing.bill(job.request.id)
        record = SmartPrefillRecord(job.request.id, target.name, bill, self._now(), arrived_s)
        made: Job | None = None
        ended = False
        try:
            async with aclosing(self._shorten(job, policy, target, record)) as steps:
                async for step in steps:
                    if isinstance(step, Loading):
                        yield step
                    else:
                        made = step
            ended = True
        except SkipCompression as skip:
            record.skip(skip.code, skip.reason, self._monotonic())
            ended = True
        except FleetError as error:
            record.skip(error.code, error.message, self._monotonic())
            ended = True
        except Exception as error:
            # A bug here must not cost anybody an answer.
            log.warning("smart.bug", type=type(error).__name__)
            record.skip("failed", f"Internal error ({type(error).__name__}).", self._monotonic())
            ended = True
        finally:
            if not ended:
                bill.close("cancelled")
        log.info("smart.prepared", request=job.request.id, form=record.told.form, code=record.told.code)
        yield PreparedJob(made or self.whole(job), record)

    @staticmethod
    def whole(job: Job) -> Job:
        """The same job with all of its prompt."""
        return replace(job, request=smart_prompt.plain(job.request))

    def _failed(self, record: SmartPrefillRecord, error: FleetError) -> bool:
        """The shortened prompt could not be answered; True if the whole one is still to be tried."""
        if not record.told.used or record.answering:
            return False
        record.skip(error.code, error.message, self._monotonic())
        return True

    async def _shorten(
        self, job: Job, policy: SmartPrefillPolicy, target: AnsweringModel, record: SmartPrefillRecord
    ) -> AsyncGenerator[Loading | Job, None]:
        # What takes longer the longer a prompt is, takes it in a thread.
        found, tokens = await asyncio.to_thread(_document, job)
        if tokens < policy.min_prompt_tokens:
            raise _short(tokens, policy)
        if target.choice.node_id == THIS_NODE and target.folder is not None:
            # It has to be loaded anyway, and only then says which forms it takes; and loaded in this order,
            # it is the compressor for which there may be no room.
            async with aclosing(self._pool.loading(target.folder)) as steps:
                async for progress in steps:
                    yield progress
        form = self._form(policy, smart_prompt.turns(found), target, tokens)
        chosen = msgspec.structs.replace(policy, mode=form)
        passage = CompressionJob(job.request.id, found, tokens, chosen, record.bill, not job.shareable)
        passage.price = lambda tokens, ratio: self._price(job, target, form, tokens, ratio)
        said = smart_prompt.said(job.request)
        aged = self._history.find(said, policy)
        if aged and not await asyncio.to_thread(still_serves, found, aged):
            aged = Aged()
        passage.aged = aged
        try:
            if aged and smart_prompt.fresh_tokens(found, aged) < policy.min_prompt_tokens:
                await asyncio.to_thread(_go_on, passage, aged)
            else:
                async with aclosing(self.compressing.run(passage)) as steps:
                    async for progress in steps:
                        yield progress
        finally:
            record.heard(passage)
        self._check(job, passage, policy)
        make = smart_prompt.shortened if form == "text" else smart_prompt.sparse
        request = await asyncio.to_thread(make, job.request, found, _selected(passage))
        record.made(form, _selected(passage), self._monotonic())
        yield replace(job, request=request)

    def _check(self, job: Job, passage: CompressionJob, policy: SmartPrefillPolicy) -> None:
        """Whether something is left out, and something left. Raises Skip.

        A conversation is remembered by what was asked for, whichever form that became.
        """
        found, selection = passage.document, _selected(passage)
        if smart_prompt.is_empty(found, selection):
            raise SkipCompression("empty", "Nothing would be left of the prompt.")
        if selection.original_tokens < policy.min_prompt_tokens:
            raise _short(selection.original_tokens, policy)
        self._history.keep(smart_prompt.said(job.request), policy, selection, passage.compressor)
        if selection.declined:
            raise SkipCompression("declined", selection.declined)
        if all(selection.whole(found, index) for index in range(len(found.blocks))):
            raise SkipCompression("cached", "The conversation so far was read whole, and goes on so.")

    def _changed(self, record: SmartPrefillRecord, event: Accepted) -> bool:
        """The engine has the prompt; True if it says more of it than was told."""
        if record.told.form != "sparse":
            return False
        if event.kept:
            return record.accepted(event)
        reason = event.dense_reason or "The machine that answers does not know sparse prefill."
        record.skip("no_form", reason, self._monotonic())
        return True

    def _keep(self, record: SmartPrefillRecord) -> None:
        """The answer has ended, in any way: write down what came of its prompt, and who is paid."""
        told = record.told
        record.bill.close(told.code)
        kept = told.compressed_tokens if told.used else 0
        self._metrics.smart(told.code or "used", told.form, kept, told.dropped_tokens)
        if (trace := record.trace()) is not None:
            self._record(trace)

    # ---- for people --------------------------------------------------------------------------------------

    async def plan(self, view: PlanView, ratio: float, folder: Any, policy: SmartPrefillPolicy) -> PlanView:
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
            smart, _ = options(plan, chosen=True)
        except SkipCompression as skip:
            smart = OptionView("smart", [THIS_NAME], None, code=skip.code, reason=skip.reason)
        if not smart.chosen:
            return msgspec.structs.replace(view, options=[*view.options, smart])
        others = [msgspec.structs.replace(option, chosen=False) for option in view.options]
        return msgspec.structs.replace(view, options=[smart, *others])

    # ---- how, and for what -------------------------------------------------------------------------------

    def _form(self, policy: SmartPrefillPolicy, turns: int, target: AnsweringModel, tokens: int) -> Form:
        """``turns``: answers that the prompt holds. Raises Skip."""
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
        weights_bytes = getattr(target.folder, "weights_bytes", 0)
        speed = self.compressing.scorers.speed_at(node_id, target.name)
        if speed is None:
            return CompressionPrice(SmartPrefillQuestion(tokens, ratio, None), weights_bytes)
        new = range(min(cached, tokens), tokens)
        dense_s = speed.total(1.0, new, MEASURED_TOKENS)
        helped_s = kept_s = 0.0
        if node_id == THIS_NODE and job.shareable:
            helped_s = self._best_s(target.folder, tokens, new.start, 0)
            kept_s = self._kept_s(target.folder, form, tokens, ratio)
        if helped_s > 0:
            dense_s = min(dense_s, helped_s)
        return CompressionPrice(
            SmartPrefillQuestion(tokens, ratio, speed, dense_s=dense_s, kept_s=kept_s), weights_bytes
        )

    def _kept_s(self, folder: Any, form: Form, tokens: int, ratio: float) -> float:
        """What reading the rest takes with the help of others, 0 where nobody knows."""
        kept = math.ceil(tokens * ratio)
        if form == "sparse" and kept < tokens:
            return self._best_s(folder, tokens, 0, kept)
        return self._best_s(folder, kept, 0, 0)


def _go_on(passage: CompressionJob, aged: Aged) -> None:
    """The next turn of a conversation: what was decided stays, and what is new is short enough."""
    whole = msgspec.structs.replace(passage.policy, target_ratio=1.0)
    passage.selection = select(passage.document, None, whole, aged)
    passage.compressor = aged.compressor


def _labelled(planned: Planned, record: SmartPrefillRecord) -> Planned:
    exactness = "lossy" if record.told.used else planned.exactness
    return msgspec.structs.replace(planned, exactness=exactness, smart=record.told)


def _selected(passage: CompressionJob) -> Selection:
    if passage.selection is None:
        raise SkipCompression("empty", "Nothing would be left of the prompt.")
    return passage.selection


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
