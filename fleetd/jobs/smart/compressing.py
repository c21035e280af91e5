"""From a document to what is kept of it: who scores, is it worth it, the scores, the selection.

    Passage ──► compressor and machines ──► price ──► scored, or known already ──► selected

Scores are remembered by text and question: the choices of one request, and a request that is repeated, are
scored once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleetd import limits
from fleetd.engine.protocol import Loading, Profile, Scored
from fleetd.errors import EngineError, OutOfMemory, PeerError, ProtocolError
from fleetd.jobs.placing import HERE, Machine
from fleetd.jobs.share.penalties import Penalties
from fleetd.jobs.share.views import StepView
from fleetd.jobs.smart import machines as smart_machines
from fleetd.jobs.smart import prompts as smart_prompt
from fleetd.jobs.smart.bill import Bill, Ledger
from fleetd.jobs.smart.machines import Holder
from fleetd.jobs.smart.scoring import Compressor, Question, Scoring, Work
from fleetd.models.catalog import find
from fleetd.p2p.cards import ModelCard
from fleetd.plan import smart as planner
from fleetd.plan.costs import Speed
from fleetd.plan.paces import Paces
from fleetd.plan.smart import Asked, Scorer, SmartPlan
from fleetd.plan.speeds import SpeedBook
from fleetd.smart.document import Document
from fleetd.smart.policy import Policy
from fleetd.smart.select import select
from fleetd.smart.selection import Selection
from fleetd.smart.text import Range

THIS = "this"
# A ratio for prices where the scores themselves decide how much is kept.
USUAL_RATIO = 0.3
# What a scorer reads to find out which of its heads find what is asked for.
_PROFILE_TOKENS = 8000
# How often progress is told while scorers work.
_TOLD_S = 0.25


class Skip(Exception):
    """The prompt is read whole; ``code`` is one of ``smart_views.Code``."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Pool(Protocol):
    def engine(self, folder: Any) -> Any: ...


class Models(Protocol):
    def installed(self) -> Sequence[Any]: ...


class Fleet(Protocol):
    def machines(self) -> Iterable[Machine]: ...


@dataclass(frozen=True, slots=True)
class Price:
    """What reading all of it would take, by ``asked``, and how large the model is that does."""

    asked: Asked
    weights_bytes: int = 0


@dataclass(slots=True)
class Passage:
    """One document on its way. What is not known yet is empty.

    ``tokens``: about how many it has. ``price`` None: it is to be compressed whatever that costs. ``aged``:
    what earlier turns of a conversation decided (``smart.history``). Seconds are from the beginning to the
    scores, and from there to the selection; ``scored_tokens`` is what compressors read for it.
    """

    id: str
    document: Document
    tokens: int
    policy: Policy
    bill: Bill
    local_only: bool = False
    price: Callable[[int, float], Price] | None = None
    aged: Mapping[int, Sequence[Range]] = field(default_factory=dict)
    compressor: str = ""
    plan: SmartPlan | None = None
    names: tuple[str, ...] = ()
    selection: Selection | None = None
    scored_tokens: int = 0
    score_s: float = 0.0
    select_s: float = 0.0
    steps: list[StepView] = field(default_factory=list)


@dataclass(slots=True)
class _Remembered:
    """``tokens``: ``fleetd.smart.scores.TokenScores``, which needs numpy to look into."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tokens: Any = None
    names: tuple[str, ...] = ()


class Compressing:
    """Args:
    fleet: None for a machine that has no others.
    own_models: what this machine's card says of its models; empty where there is none yet.
    local_only: by the settings, no prompt leaves this machine.
    node: this machine, for the ledger.
    """

    def __init__(
        self,
        scoring: Scoring,
        pool: Pool,
        models: Models,
        ledger: Ledger,
        speeds: SpeedBook,
        *,
        fleet: Fleet | None = None,
        own_models: Callable[[], Sequence[ModelCard]] = lambda: (),
        local_only: bool = False,
        node: str = THIS,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._scoring = scoring
        self._pool = pool
        self._models = models
        self._ledger = ledger
        self._speeds = speeds
        self._fleet = fleet
        self._own_models = own_models
        self._local_only = local_only
        self._node = node
        self._monotonic = monotonic
        self._now = now
        self._penalties = Penalties()
        self._paces = Paces()
        # By compressor: which heads score, and where its layers may end.
        self._profiles: dict[str, Profile] = {}
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()

    def bill(self, request_id: str) -> Bill:
        return Bill(self._ledger, request_id, self._node, self._now)

    async def run(self, passage: Passage) -> AsyncGenerator[Loading, None]:
        """Fill in ``passage``; its bill is left open. Raises Skip, FleetError."""
        began_s = self._monotonic()
        tokens, ratio = passage.tokens, passage.policy.target_ratio or USUAL_RATIO
        price = passage.price(tokens, ratio) if passage.price else None
        holding = await self._holding(passage, price.weights_bytes if price else 0)
        compressor = smart_machines.compressor(holding)
        passage.compressor = compressor.name
        able = self._able(holding)
        asked = price.asked if price else Asked(tokens, ratio, None)
        plan = passage.plan = planner.plan(asked, able)
        remembered = self._remember(smart_prompt.key(passage.document, compressor.digest or compressor.name))
        async with remembered.lock:
            if remembered.tokens is None:
                if not plan.worth_it:
                    raise Skip(plan.code, plan.reason)
                steps = self._score(passage, compressor, plan, able, remembered)
                async with aclosing(steps):
                    async for progress in steps:
                        yield progress
        passage.names = remembered.names
        passage.score_s = self._monotonic() - began_s
        passage.selection = await asyncio.to_thread(_selected, passage, remembered.tokens)
        passage.select_s = self._monotonic() - began_s - passage.score_s

    async def options(self, price: Price, policy: Policy, *, local_only: bool = False) -> SmartPlan:
        """What would be done with such a prompt now. Raises Skip."""
        asked = price.asked
        holding = self._chosen(policy, await self._holders(local_only), price.weights_bytes)
        return planner.plan(asked, self._able(holding))

    def speed_at(self, node_id: str, model: str) -> Speed | None:
        """How fast a machine prefills with a model, by its own account; None where nobody measured it."""
        if node_id == HERE:
            known = self._speeds.of(model)
            return known.prefill if known.prefill_tok_s > 0 else None
        machines = self._fleet.machines() if self._fleet is not None else ()
        models = [m for machine in machines if machine.card.node_id == node_id for m in machine.card.models]
        return next((smart_machines.speed_of(found) for found in models if found.name == model), None)

    # ---- who could ---------------------------------------------------------------------------------------

    async def _holding(self, passage: Passage, target_bytes: int) -> list[Holder]:
        found = await self._holders(passage.local_only)
        return self._chosen(passage.policy, found, target_bytes)

    def _chosen(self, policy: Policy, found: Sequence[Holder], target_bytes: int) -> list[Holder]:
        holding = smart_machines.choose(policy.compressor_model, found, target_bytes)
        if not holding:
            wanted = policy.compressor_model or "a model that can score prompts"
            raise Skip("no_compressor", f"No machine has {wanted} now.")
        return holding

    async def _holders(self, local_only: bool) -> list[Holder]:
        folders = await asyncio.to_thread(self._models.installed)
        told = {model.name: model for model in self._own_models()}
        found = [
            Holder(HERE, THIS, self._own(folder, told.get(folder.name)), folder=folder) for folder in folders
        ]
        now_s = self._monotonic()
        if self._penalties.reason(HERE, now_s):
            # There was no room for a compressor beside what is loaded: trying again at once costs seconds.
            found = [holder for holder in found if holder.model.state == "loaded"]
        if self._fleet is not None and not local_only and not self._local_only:
            others = smart_machines.holders(self._fleet.machines())
            found += [holder for holder in others if not self._penalties.reason(holder.node_id, now_s)]
        return found

    def _own(self, folder: Any, told: ModelCard | None) -> ModelCard:
        """A model on this machine; its card may not have been made yet."""
        entry = find(folder.name)
        speed = self._speeds.of(folder.name)
        return ModelCard(
            folder.name,
            digest=told.digest if told is not None else "",
            roles=list(entry.roles) if entry is not None else ["chat"],
            weights_bytes=folder.weights_bytes,
            context_tokens=folder.context_tokens,
            state="loaded" if self._pool.engine(folder) is not None else "installed",
            prefill_tok_s=speed.prefill_tok_s,
            prefill_context_s=speed.prefill_context_s,
            prefill_fixed_s=speed.prefill_fixed_s,
        )

    def _able(self, holding: Sequence[Holder]) -> list[Scorer]:
        """By what they took for other prompts, cheapest first."""
        now_s = self._monotonic()
        found = []
        for holder in holding:
            bare = smart_machines.scorer(holder)
            known = holder.model.digest or holder.model.name
            factor = self._paces.factor(holder.node_id, known, bare.speed.token_s, now_s)
            found.append(smart_machines.scorer(holder, factor))
        return sorted(found, key=lambda scorer: (scorer.seconds(planner.AROUND_TOKENS), scorer.node_id))

    # ---- scoring -----------------------------------------------------------------------------------------

    async def _score(
        self,
        passage: Passage,
        compressor: Compressor,
        plan: SmartPlan,
        able: Sequence[Scorer],
        remembered: _Remembered,
    ) -> AsyncGenerator[Loading, None]:
        """Within the deadline. Raises Skip, FleetError."""
        found, known = passage.document, compressor.digest or compressor.name
        work = Work(Question(passage.id, found.text, found.questions), compressor, self._profiles.get(known))
        await passage.bill.reserve(compressor.name, [part.scorer for part in plan.parts])
        within_s = limits.SMART_LATE * plan.score_s + limits.SMART_GRACE_S
        if work.profile is None:
            # Finding out which heads to ask takes about as long as scoring a prompt of that length.
            within_s += limits.SMART_LATE * plan.parts[0].scorer.seconds(_PROFILE_TOKENS)
        within_s = min(limits.SMART_SCORE_S, within_s)
        until_s = self._monotonic() + within_s
        task = asyncio.create_task(self._scoring.run(work, plan.parts, able))
        try:
            while not task.done():
                left_s = until_s - self._monotonic()
                if left_s <= 0:
                    raise Skip("timeout", f"Scoring took longer than {within_s:.0f} s.")
                await asyncio.wait({task}, timeout=min(_TOLD_S, left_s))
                if not task.done():
                    yield work.progress
            remembered.tokens = await asyncio.to_thread(_merged, task.result())
        finally:
            task.cancel()
            await asyncio.wait({task})
            passage.bill.ran(compressor.name, work.ran.values())
            self._learn(work, known)
        remembered.names = work.names
        passage.scored_tokens = sum(ran.tokens for ran in work.ran.values())
        passage.steps = [
            StepView("scored", ran.seconds, machine=ran.scorer.name)
            for ran in work.ran.values()
            if ran.tokens
        ]
        if work.profile is not None:
            self._profiles[known] = work.profile

    def _learn(self, work: Work, known: str) -> None:
        """Who failed is left out for a while; who did it, by its own pace the next time."""
        now_s = self._monotonic()
        for ran in work.ran.values():
            scorer = ran.scorer
            if isinstance(ran.error, OutOfMemory) or (
                scorer.node_id != HERE and isinstance(ran.error, PeerError | EngineError)
            ):
                self._penalties.failed(scorer.node_id, ran.error.code, now_s)
            elif ran.tokens and ran.error is None:
                self._penalties.succeeded(scorer.node_id)
            if ran.tokens and scorer.measured and not scorer.load_s:
                factor = self._paces.factor(scorer.node_id, known, scorer.speed.token_s, now_s)
                self._paces.ran(
                    scorer.node_id,
                    known,
                    scorer.speed.token_s / factor,
                    now_s,
                    expected_s=scorer.seconds(ran.tokens) / factor,
                    took_s=ran.computed_s,
                )

    def _remember(self, key: bytes) -> _Remembered:
        found = self._remembered.setdefault(key, _Remembered())
        self._remembered.move_to_end(key)
        while len(self._remembered) > limits.SMART_REMEMBERED:
            self._remembered.popitem(last=False)
        return found


def _merged(scored: Sequence[Scored]) -> Any:
    """In a thread: numpy is loaded here, and only here. Raises ProtocolError."""
    from fleetd.smart.scores import SegmentScores, merge

    try:
        return merge([SegmentScores.unpack(each.scores) for each in scored])
    except ValueError as error:
        raise ProtocolError(f"The scores do not fit the prompt: {error}.") from None


def _selected(passage: Passage, scores: Any) -> Selection:
    return select(passage.document, scores, passage.policy, passage.aged)
