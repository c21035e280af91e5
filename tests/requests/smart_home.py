"""One machine that shortens prompts, over a scripted engine, and what its tests look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from fakes import FakeFolder, FakeModels
from runners import runner_over
from smart_fakes import (
    Profiles,
    ScoringPool,
    models,
)

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.prefill_trace import Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import (
    ChatPrompt,
    Finished,
    Generate,
    Ready,
    TextPrompt,
    TokenPrompt,
)
from fleetd.p2p.membership.cards import Card
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Member, Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement.placement import Placement, Placer
from fleetd.requests.runner import RequestRunner
from fleetd.requests.smart_prefill.client import AnsweringModel, SmartPrefill
from fleetd.requests.smart_prefill.compression_job import (
    CompressionService,
)
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.segment_scoring import SegmentScoring
from fleetd.storage.store import Store

WITHIN_S = 60.0
ASKED = SmartPrefillPolicy(enabled=True, target_ratio=0.2, min_prompt_tokens=500)


@dataclass
class SmartHome:
    runner: RequestRunner
    pool: ScoringPool
    models: FakeModels
    store: Store
    metrics: Metrics
    speeds: ModelSpeeds
    smart: SmartPrefill
    traces: list[Trace] = field(default_factory=list)

    async def ask(
        self, request: Generate, policy: SmartPrefillPolicy | None = ASKED, **fields: Any
    ) -> list[Any]:
        job = Job("m", request, **{"origin": "socket", "route": "chat", "smart": policy, **fields})
        async with asyncio.timeout(WITHIN_S), aclosing(self.runner.run(job)) as events:
            return [event async for event in events]

    async def told(
        self, request: Generate, policy: SmartPrefillPolicy | None = ASKED, **fields: Any
    ) -> SmartPrefillResult:
        events = await self.ask(request, policy, **fields)
        assert isinstance(events[-1], Finished)
        planned = [event for event in events if isinstance(event, Planned)]
        assert planned[-1].smart is not None
        assert planned[-1].exactness == ("lossy" if planned[-1].smart.used else "exact")
        return planned[-1].smart

    def rows(self) -> list[tuple[Any, ...]]:
        return self.store.call(
            lambda db: db.execute(
                "SELECT route, model, state, reason, prompt_tokens > 0 FROM usage ORDER BY route"
            ).fetchall()
        )

    def shown(self, line: str) -> bool:
        return line in self.metrics.render()[0].decode().splitlines()


def maker(store: Store, ledger: Ledger, metrics: Metrics) -> Callable[..., SmartHome]:
    """Makes a machine that has the model ``m`` and a scorer; ``fields`` are those of its ScoringPool.

    ``others``: the rest of its fleet, with which ways to read prompts are priced; None if they are not.
    """

    def make(
        profiles: Profiles | None = None,
        pool: ScoringPool | None = None,
        clock: Callable[[], float] = time.monotonic,
        own_card: Callable[[], Card | None] = lambda: None,
        others: list[Member] | None = None,
        **fields: Any,
    ) -> SmartHome:
        pool, found, speeds = pool or ScoringPool(**fields), models("m", "smollm2-135m"), ModelSpeeds()
        traces: list[Trace] = []
        members = Members(lambda: others or (), own_card)
        scoring = SegmentScoring(pool, None, monotonic=clock)
        scorers = Scorers(pool, found, speeds, members, profiles=profiles or Profiles())
        compressing = CompressionService(scoring, scorers, ledger, monotonic=clock)
        placer = None
        if others is not None:
            placer = Placer(members, lambda *_: pytest.fail("nothing is sent"), partial(facts_of, pool))
        smart = SmartPrefill(compressing, members, pool, metrics, placer=placer, monotonic=clock)
        runner = runner_over(
            pool,
            found,
            ledger,
            metrics,
            smart=smart,
            speeds=speeds,
            members=members,
            record=traces.append,
            monotonic=clock,
        )
        return SmartHome(runner, pool, found, store, metrics, speeds, smart, traces)

    return make


def facts_of(pool: ScoringPool, name: str) -> Ready | None:
    """What the engine of a model says."""
    engine = pool.engine(FakeFolder(name))
    return None if engine is None else engine.facts


def target(this: SmartHome) -> AnsweringModel:
    """The model of this machine."""
    return AnsweringModel("m", this.models.resolve("m"), Placement("", LOCAL))


def text_of(request: Generate) -> str:
    match request.prompt:
        case ChatPrompt(messages=sent):
            return "\n".join(str(message["content"]) for message in sent)
        case TextPrompt(text):
            return text
        case TokenPrompt():
            return ""
