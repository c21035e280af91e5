"""From a document to what is kept of it: who scores, is it worth it, the scores, the selection.

    Passage ──► gate ──► compressor and machines ──► price ──► scored, or known already ──► selected

Scores are remembered by text and question: the choices of one request, and a request that is repeated, are
scored once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fleetd import limits
from fleetd.compression.document import Document
from fleetd.compression.gate import GateVerdict, judge
from fleetd.compression.history import Aged, still_serves
from fleetd.compression.policy import SmartPrefillPolicy, wanted_ratio
from fleetd.compression.select import forecast, select
from fleetd.compression.selection import Selection, everything
from fleetd.control.smart_prefill_result import ParkedLoads, ScoredBy
from fleetd.engine.protocol import Loading
from fleetd.errors import FleetError, ProtocolError
from fleetd.models.folder import ModelFolder
from fleetd.plan import scoring as planner
from fleetd.plan.prefill import step_names
from fleetd.plan.scoring import Parking, Scorer, SmartPlan, SmartPrefillQuestion
from fleetd.requests.concurrency import cancel_all
from fleetd.requests.job import THIS_NAME
from fleetd.requests.ledger import Ledger
from fleetd.requests.smart_prefill import shortened_prompts as smart_prompt
from fleetd.requests.smart_prefill.bill import ScoringBill
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.segment_scoring import (
    CompressorModel,
    ScoringJob,
    ScoringQuestion,
    SegmentScoring,
)
from fleetd.requests.smart_prefill.skip import SkipCompression
from fleetd.requests.smart_prefill.turns import ModelTurns, TwoModels
from fleetd.requests.timeline import Span

if TYPE_CHECKING:  # needs numpy, which a daemon does not load before there are scores
    from fleetd.compression.token_scores import SegmentScores, TokenScores

# A ratio for prices if the scores themselves decide how much is kept.
USUAL_RATIO = 0.3
# How often progress is told while scorers work.
_TOLD_S = 0.25


class CompressionPrice(msgspec.Struct, frozen=True):
    """What reading all of it would take, by ``asked``, and how large the model is that does."""

    asked: SmartPrefillQuestion
    weights_bytes: int = 0


@dataclass(slots=True)
class CompressionJob:
    """One document on its way. What is not known yet is empty.

    ``tokens``: how many it has, an estimate until they are ``counted``. ``price`` None: it is to be
    compressed whatever that costs. ``aged``: what earlier turns of a conversation decided
    (``smart.history``). ``pinned_tokens``: about how many are kept whatever the scores say. ``planned_s``:
    when the plan was made.
    Other seconds are from the beginning to the scores, and from there to the selection; ``scored_tokens`` is
    what compressors read for it.
    ``lost``: code and message of a scorer that gave up while others went on. ``target``: the model that
    answers here, if it may give way to what scores; ``parked``: what that took, None if it did not.
    """

    id: str
    document: Document
    tokens: int
    policy: SmartPrefillPolicy
    bill: ScoringBill
    local_only: bool = False
    price: Callable[[int, float], CompressionPrice] | None = None
    aged: Aged = field(default_factory=Aged)
    pinned_tokens: int = 0
    compressor: str = ""
    plan: SmartPlan | None = None
    names: tuple[str, ...] = ()
    selection: Selection | None = None
    planned_s: float = 0.0
    scored_tokens: int = 0
    score_s: float = 0.0
    select_s: float = 0.0
    steps: list[Span] = field(default_factory=list)
    lost: tuple[str, str] = ("", "")
    target: ModelFolder | None = None
    parked: ParkedLoads | None = None

    @property
    def scored(self) -> ScoredBy:
        """What the text was scored by; "" if it was not."""
        if not self.names:
            return ""
        return "without question" if self.policy.without_question else "by question"

    @property
    def kept_share(self) -> float:
        """About what share of the tokens is kept."""
        return kept_share(self.policy, self.tokens, self.pinned_tokens)

    def counted(self, tokens: int) -> None:
        """The document has so many; what was estimated beside the old figure keeps its share."""
        self.pinned_tokens = round(self.pinned_tokens * tokens / max(1, self.tokens))
        self.tokens = tokens


class ScoringWay(msgspec.Struct, frozen=True):
    """Which model scores where, what was ``asked`` of the planner, and its ``plan``. ``find`` looks for
    ``compressor`` and the machines that are ``able`` again. ``turn``: by the plan's ``parking``."""

    find: Callable[[], Awaitable[tuple[CompressorModel, list[Scorer]]]]
    compressor: CompressorModel
    able: list[Scorer]
    asked: SmartPrefillQuestion
    plan: SmartPlan
    turn: TwoModels | None = None


@dataclass(slots=True)
class _Remembered:
    """``failure``: why there are no scores, for the requests that waited for them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tokens: TokenScores | None = None
    failure: Exception | None = None
    names: tuple[str, ...] = ()


class CompressionService:
    """Args:
    turns: how what scores and what answers share a memory that does not hold both; None: neither gives way.
    """

    def __init__(
        self,
        scoring: SegmentScoring,
        scorers: Scorers,
        ledger: Ledger,
        *,
        turns: ModelTurns | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.scorers = scorers
        self._scoring = scoring
        self._ledger = ledger
        self.turns = turns
        self._monotonic = monotonic
        self._now = now
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()

    def bill(self, request_id: str) -> ScoringBill:
        return ScoringBill(self._ledger, request_id, self._now)

    async def run(self, compression: CompressionJob) -> AsyncGenerator[Loading, None]:
        """Fill in ``compression``; its bill is left open. Raises SkipCompression, FleetError."""
        await asyncio.to_thread(decide_unscored, compression)
        if compression.selection is None:
            async with aclosing(self.score(compression)) as steps:
                async for progress in steps:
                    yield progress

    async def score(self, compression: CompressionJob) -> AsyncGenerator[Loading, None]:
        """Do what ``run`` does for a prompt whose selection needs scores."""
        began_s = self._monotonic()
        way = await self.way(compression)
        compressor = way.compressor
        plan = self._noted(compression, way.plan)
        unasked = compression.policy.without_question
        key = smart_prompt.key(compression.document, compressor.key, without_question=unasked)
        remembered = self._remember(key)
        async with remembered.lock:
            if remembered.failure is not None:
                raise remembered.failure
            if remembered.tokens is None:
                if not plan.worth_it:
                    raise SkipCompression(plan.code, plan.reason)
                try:
                    if way.turn is not None and plan.parking is not None:
                        scored = self._scored_in_turn(compression, way, remembered, way.turn)
                    else:
                        scored = self._scored(compression, way, remembered)
                    async with aclosing(scored) as steps:
                        async for progress in steps:
                            yield progress
                except Exception as error:
                    # Requests that wait for the lock have waited long enough; later ones try anew.
                    remembered.failure = error
                    if self._remembered.get(key) is remembered:
                        del self._remembered[key]
                    raise
        compression.names = remembered.names
        compression.score_s = self._monotonic() - began_s
        compression.selection = await asyncio.to_thread(_selected, compression, remembered.tokens)
        compression.select_s = self._monotonic() - began_s - compression.score_s

    async def _scored(
        self, compression: CompressionJob, way: ScoringWay, remembered: _Remembered
    ) -> AsyncGenerator[Loading, None]:
        """Load what scores, if need be, and score. Raises SkipCompression, FleetError."""
        if any(part.scorer.here and part.scorer.load_s for part in way.plan.parts):
            # How fast it scores is known only then.
            loading_s = self._monotonic()
            async with aclosing(self.scorers.load(way.compressor)) as loads:
                async for progress in loads:
                    yield progress
            load = Span(step_names.LOADED, THIS_NAME, loading_s, self._monotonic())
            compression.steps.append(load)
            if compression.parked is not None:
                compression.parked = ParkedLoads(load.ended_s - load.began_s)
            compressor, able = await way.find()
            parking = way.plan.parking
            if parking is not None:
                # What is done is done: whatever is decided now, the model that answers has to be loaded.
                parking = msgspec.structs.replace(parking, scorer_s=0.0, needed=True)
            plan = self._noted(compression, planner.plan(way.asked, able, parking))
            way = msgspec.structs.replace(way, compressor=compressor, able=able, plan=plan)
            if not plan.worth_it:
                raise SkipCompression(plan.code, plan.reason)
        scored = self._score(compression, way.compressor, way.plan, way.able, remembered)
        async with aclosing(scored) as steps:
            async for progress in steps:
                yield progress

    async def _scored_in_turn(
        self, compression: CompressionJob, way: ScoringWay, remembered: _Remembered, turn: TwoModels
    ) -> AsyncGenerator[Loading, None]:
        """Score in the memory of the model that answers, and load that one whatever came of it.

        Raises SkipCompression, FleetError.
        """
        failure: SkipCompression | FleetError | None = None
        try:
            async with turn.scoring():
                compression.parked = ParkedLoads()
                async with aclosing(self._scored(compression, way, remembered)) as steps:
                    async for progress in steps:
                        yield progress
        except (SkipCompression, FleetError) as error:
            if compression.parked is None:
                raise
            failure = error
        loading_s = self._monotonic()
        async with aclosing(turn.loading()) as loads:
            async for progress in loads:
                yield progress
        load = Span(step_names.RELOADED, THIS_NAME, loading_s, self._monotonic())
        compression.steps.append(load)
        compression.parked = msgspec.structs.replace(
            compression.parked or ParkedLoads(), model_s=load.ended_s - load.began_s
        )
        if failure is not None:
            raise failure

    def _noted(self, compression: CompressionJob, plan: SmartPlan) -> SmartPlan:
        compression.plan = plan
        compression.planned_s = self._monotonic()
        return plan

    async def way(self, compression: CompressionJob) -> ScoringWay:
        """How the document would be scored now. Raises SkipCompression."""
        tokens, ratio = compression.tokens, compression.kept_share
        price = compression.price(tokens, ratio) if compression.price else None
        asked = price.asked if price else SmartPrefillQuestion(tokens, ratio, None)
        target_bytes = price.weights_bytes if price else 0
        find = partial(self.scorers.find, compression.policy, target_bytes, compression.local_only)
        compressor, able = await find()
        compression.compressor = compressor.name
        parking = await self._parking(compressor, compression.target)
        turn = None
        if isinstance(parking, Parking) and self.turns and compressor.folder and compression.target:
            turn = self.turns.turn(compressor.folder, compression.target)
        return ScoringWay(find, compressor, able, asked, planner.plan(asked, able, parking), turn)

    async def options(
        self, price: CompressionPrice, policy: SmartPrefillPolicy, target: ModelFolder | None = None
    ) -> SmartPlan:
        """What would be done with such a prompt now. ``target``: as in a CompressionJob. Raises
        SkipCompression."""
        compressor, able = await self.scorers.find(policy, price.weights_bytes, False)
        return planner.plan(price.asked, able, await self._parking(compressor, target))

    async def _parking(self, compressor: CompressorModel, target: ModelFolder | None) -> Parking | str | None:
        if self.turns is None or target is None or compressor.folder is None:
            return None
        return await self.turns.price(compressor.folder, target)

    async def _score(
        self,
        compression: CompressionJob,
        compressor: CompressorModel,
        plan: SmartPlan,
        able: Sequence[Scorer],
        remembered: _Remembered,
    ) -> AsyncGenerator[Loading, None]:
        """Within the deadline. Raises SkipCompression, FleetError."""
        found = compression.document
        unasked = compression.policy.without_question
        asks = () if unasked else found.questions
        question = ScoringQuestion(compression.id, found.text, asks, without_question=unasked)
        work = ScoringJob(question, compressor, self.scorers.profile(compressor))
        await compression.bill.reserve(compressor.name, [part.scorer for part in plan.parts])
        within_s = limits.SMART_LATE * plan.score_s + limits.SMART_GRACE_S
        until_s = self._monotonic() + within_s
        task = asyncio.create_task(self._scoring.run(work, plan.parts, able))
        late = False
        try:
            # At once: only now it is certain that the prompt is scored.
            yield work.progress
            while not task.done():
                left_s = until_s - self._monotonic()
                if left_s <= 0:
                    late = True
                    raise SkipCompression("timeout", f"Scoring took longer than {within_s:.0f} s.")
                await asyncio.wait({task}, timeout=min(_TOLD_S, left_s))
                if not task.done():
                    yield work.progress
            remembered.tokens = await asyncio.to_thread(_merged, task.result())
        finally:
            await cancel_all([task])
            compression.bill.ran(compressor.name, work.ran.values())
            self.scorers.learn(work, late=late)
        remembered.names = work.names
        compression.scored_tokens = sum(ran.tokens for ran in work.ran.values())
        compression.steps += [ran.span for ran in work.ran.values() if ran.tokens]
        errors = [ran.error for ran in work.ran.values() if ran.error is not None]
        compression.lost = next(((error.code, error.message) for error in errors), ("", ""))

    def _remember(self, key: bytes) -> _Remembered:
        found = self._remembered.setdefault(key, _Remembered())
        self._remembered.move_to_end(key)
        while len(self._remembered) > limits.SMART_REMEMBERED:
            self._remembered.popitem(last=False)
        return found


def decide_unscored(compression: CompressionJob) -> None:
    """Select what needs no scores: all of a prompt whose task needs all of it, or in which nearly all is
    always kept; what earlier turns decided. Otherwise ``pinned_tokens`` is filled in, for the price.

    ``aged`` is emptied if it no longer serves.
    """
    found, policy = compression.document, compression.policy
    if compression.aged and not still_serves(found, compression.aged):
        compression.aged = Aged()
    aged = compression.aged
    verdict = GateVerdict() if policy.without_question else judge(found)
    # What was decided stays decided, for the prefix cache, unless the new task plainly needs all of it.
    if verdict.plainly if aged else verdict.declined:
        compression.selection = everything(found, compression.tokens, verdict.declined)
        return
    expected = forecast(found, policy, aged)
    compression.pinned_tokens = expected.pinned_tokens
    if aged and (expected.declined or smart_prompt.fresh_tokens(found, aged) < policy.min_prompt_tokens):
        unchanged = msgspec.structs.replace(policy, target_ratio=1.0)
        compression.selection = select(found, None, unchanged, aged)
        compression.compressor = aged.compressor
    elif expected.declined:
        compression.selection = everything(found, compression.tokens, expected.declined)


def kept_share(policy: SmartPrefillPolicy, tokens: int, pinned_tokens: int = 0) -> float:
    """About what share of so many tokens is kept, ``pinned_tokens`` whatever the policy says."""
    kept = max(tokens * (wanted_ratio(policy) or USUAL_RATIO), policy.min_keep_tokens)
    if policy.max_keep_tokens:
        kept = min(kept, policy.max_keep_tokens)
    return min(1.0, max(kept, pinned_tokens) / max(1, tokens))


def _merged(segments: Sequence[SegmentScores]) -> TokenScores:
    """Merge the scores of all segments, in a thread, as it needs numpy. Raises ProtocolError."""
    from fleetd.compression.token_scores import merge

    try:
        return merge(segments)
    except ValueError as error:
        raise ProtocolError(f"The scores do not fit the prompt: {error}.") from None


def _selected(compression: CompressionJob, scores: TokenScores | None) -> Selection:
    return select(compression.document, scores, compression.policy, compression.aged)
