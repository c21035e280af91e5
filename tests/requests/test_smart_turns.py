"""A memory that holds the model that scores or the one that answers: they take turns, if that pays."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import FACTS
from msgspec.structs import replace
from smart_fakes import SCORER, ScoringPool, chat, haystack
from smart_home import ASKED, SmartHome, maker, target

from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.engine.protocol import Generate, Loading
from fleetd.errors import EngineDied, OutOfMemory, Overloaded
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.scoring import Parking, Scorer, Segments, SmartPlan
from fleetd.requests.ledger import Ledger
from fleetd.requests.metrics import Metrics
from fleetd.requests.request_views import ways_in_front
from fleetd.requests.smart_prefill.turns import ModelTurns
from fleetd.storage.store import Store

# Weights of each model, and what the machine has: one of both fits, with what it works with.
WEIGHTS, MEMORY = 600 << 20, WORKING_BYTES + (900 << 20)


@dataclass
class NarrowPool(ScoringPool):
    """It holds one model. ``events``: what was loaded (+) and unloaded (-), in order.

    ``refusal``: at once for whoever wants a turn; ``stays``: why the target does not give way; ``held``: by
    other models.
    """

    clock: float = 100.0
    loads_s: dict[str, float] = field(default_factory=lambda: {"m": 20.0, SCORER: 5.0})
    events: list[str] = field(default_factory=list)
    stays: str = ""
    refusal: Overloaded | None = None
    failing: dict[str, Exception] = field(default_factory=dict)

    async def loading(
        self, folder: Any, *, evict: bool = True, over: Any = None
    ) -> AsyncGenerator[Loading, None]:
        if folder.name in self.loaded:
            return
        if error := self.failing.pop(folder.name, None):
            raise error
        if self.loaded and not evict:
            raise OutOfMemory("no room")
        for name in list(self.loaded):
            self._unload(name)
        yield Loading("reading")
        self.clock += self.loads_s[folder.name]
        self.events.append(f"+{folder.name}")
        self.loaded.append(folder.name)

    async def stream(self, folder: Any, request: Generate, over: Any = None) -> AsyncGenerator[Any, None]:
        async for step in self.loading(folder):
            yield step
        async for event in super().stream(folder, request):
            yield event

    def _unload(self, name: str) -> None:
        self.loaded.remove(name)
        self.events.append(f"-{name}")

    @property
    def turn_taking(self) -> NarrowPool:
        return self

    @asynccontextmanager
    async def in_turn(self, first: Any, second: Any) -> AsyncIterator[None]:
        if self.refusal is not None:
            raise self.refusal
        if second.name in self.loaded:
            self._unload(second.name)
        try:
            yield
        finally:
            if first.name in self.loaded:
                self._unload(first.name)

    def loading_engine(self, folder: Any) -> Any:
        return self.engine(folder)

    def takes_others(self, folder: Any, over: Any) -> bool:
        return False

    def load_s(self, folder: Any) -> float:
        return self.loads_s[folder.name]

    def freed_by(self, folder: Any) -> int:
        return WEIGHTS if folder.name in self.loaded else 0

    def why_stays(self, folder: Any) -> str:
        return self.stays

    def why_pinned(self, folder: Any) -> str:
        return ""


Home = Callable[..., SmartHome]


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Home:
    """A machine whose models read and score as fast as was measured before."""
    make = maker(store, ledger, metrics)

    def narrow(
        *, memory: int = MEMORY, unmeasured: Sequence[str] = (), card: Card | None = None, **fields: Any
    ) -> SmartHome:
        pool = NarrowPool(**fields | {"loaded": [*fields["loaded"]]})
        this = make(None, pool, lambda: pool.clock, lambda: card)
        this.smart.compressing.turns = ModelTurns(
            pool,  # type: ignore[arg-type]
            lambda: memory - WEIGHTS * len(pool.loaded),
            lambda folder: WEIGHTS + WORKING_BYTES,
        )
        for name, tok_s in (("m", 40.0), (SCORER, 1000.0)):
            if name not in unmeasured:
                this.speeds.seed(name, MeasuredSpeed(tok_s, 10.0), now_s=0.0)
        pool.facts = replace(FACTS, speed=MeasuredSpeed(1000.0, 10.0))
        return this

    return narrow


async def test_a_target_that_is_not_loaded_waits_for_the_scores(home: Home) -> None:
    this = home(loaded=[])
    told = await this.told(chat(haystack(400)))
    assert told.used
    assert this.pool.events == [f"+{SCORER}", f"-{SCORER}", "+m"]
    assert (told.parked.scorer_s, told.parked.model_s) == (5.0, 20.0)
    (trace,) = this.traces
    assert "was loaded in 5.0 s, scored and gave way to m, which was loaded in 20.0 s" in trace.parked
    loads = [(step.name, step.seconds) for step in trace.steps if step.name.startswith("loaded")]
    assert loads == [("loaded", 5.0), ("loaded after scoring", 20.0)]


async def test_a_target_that_is_idle_gives_way_and_comes_back(home: Home) -> None:
    this = home(loaded=["m"])
    told = await this.told(chat(haystack(400)))
    assert told.used
    assert this.pool.events == ["-m", f"+{SCORER}", f"-{SCORER}", "+m"]
    assert (told.parked.scorer_s, told.parked.model_s) == (5.0, 20.0)


async def test_a_scorer_that_is_loaded_scores_before_it_gives_way(home: Home) -> None:
    this = home(loaded=[SCORER])
    told = await this.told(chat(haystack(400)))
    assert told.used
    assert this.pool.events == [f"-{SCORER}", "+m"]
    assert (told.parked.scorer_s, told.parked.model_s) == (0.0, 20.0)


@pytest.mark.parametrize("loaded", [[], ["m"]])
async def test_models_that_fit_together_stay(home: Home, loaded: list[str]) -> None:
    this = home(loaded=loaded, memory=MEMORY + WEIGHTS)
    this.pool.failing = {SCORER: EngineDied("it was loaded beside the other one")}
    told = await this.told(chat(haystack(400)))
    assert (told.parked, told.code) == (None, "engine_died")
    assert this.pool.loaded == ["m"]


@pytest.mark.parametrize("loaded", [[], ["m"]])
async def test_loads_that_cost_more_than_they_gain_are_not_done(home: Home, loaded: list[str]) -> None:
    this = home(loaded=loaded, loads_s={"m": 20.0, SCORER: 500.0})
    told = await this.told(chat(haystack(400)))
    assert (told.code, told.parked) == ("slower", None)
    assert "500.00 s to load what scores, in place of the model that answers" in told.reason
    assert this.pool.events == ["+m"] * (not loaded)


async def test_a_load_that_is_needed_anyhow_is_no_price(home: Home) -> None:
    """With the target in memory the same loads would not pay."""
    loads = {"m": 500.0, SCORER: 5.0}
    cold, warm = home(loaded=[], loads_s=loads), home(loaded=["m"], loads_s=loads)
    assert (await cold.told(chat(haystack(400)))).used
    told = await warm.told(chat(haystack(400)))
    assert (told.code, warm.pool.events) == ("slower", [])
    assert "loading that model again 500.00 s" in told.reason


@pytest.mark.parametrize("loaded", [[], ["m"]])
async def test_a_scorer_that_proves_slow_costs_nobody_the_answer(home: Home, loaded: list[str]) -> None:
    """Nothing was known but its chip; its load has measured it."""
    this = home(loaded=loaded, unmeasured=[SCORER])
    this.pool.facts = replace(FACTS, speed=MeasuredSpeed(25.0, 10.0))
    told = await this.told(chat(haystack(400)))
    assert (told.code, this.pool.scores) == ("slower", [])
    assert told.parked is not None
    assert this.pool.events[-3:] == [f"+{SCORER}", f"-{SCORER}", "+m"]
    assert this.pool.loaded == ["m"]


@pytest.mark.parametrize("loaded", [[], ["m"]])
@pytest.mark.parametrize("how", ["no room", "died"])
async def test_whatever_fails_the_target_is_loaded_and_reads_all_of_it(
    home: Home, loaded: list[str], how: str
) -> None:
    this = home(loaded=loaded)
    if how == "no room":
        this.pool.failing = {SCORER: OutOfMemory("another program has taken it")}
    else:
        this.pool.trouble = [EngineDied("it died")]
    told = await this.told(chat(haystack(400)))
    assert told.code == ("out_of_memory" if how == "no room" else "engine_died")
    assert told.parked is not None
    assert this.pool.loaded == ["m"]
    assert this.pool.asked[-1].keep is None


@pytest.mark.parametrize("why", ["m is pinned", "m is in use"])
async def test_a_target_that_has_to_stay_reads_all_of_it(home: Home, why: str) -> None:
    this = home(loaded=["m"], stays=why)
    told = await this.told(chat(haystack(400)))
    assert told.code == "out_of_memory"
    assert f"they cannot take turns, as {why}." in told.reason
    assert this.pool.events == []


async def test_a_turn_that_another_request_has_taken_is_not_waited_for(home: Home) -> None:
    this = home(loaded=["m"], refusal=Overloaded("m is in use"))
    told = await this.told(chat(haystack(400)))
    assert (told.code, told.parked, this.pool.events) == ("overloaded", None, [])


async def test_a_target_that_nobody_measured_is_loaded_first(home: Home) -> None:
    this = home(loaded=[], unmeasured=["m"])
    told = await this.told(chat(haystack(400)))
    assert (told.code, this.pool.events) == ("out_of_memory", ["+m"])
    assert "has not been measured yet" in told.reason


async def test_the_form_is_that_of_an_earlier_load_and_else_text(home: Home) -> None:
    this = home(loaded=[], sparse="", kept=9)
    assert (await this.told(chat(haystack(400)))).form == "text"
    known = Card("this", 0, 0, models=[ModelCard("m", shape=ModelShape(sparse_tail=8))])
    this = home(loaded=[], sparse="", kept=9, card=known)
    told = await this.told(chat(haystack(400)))
    assert (told.form, this.pool.events) == ("sparse", [f"+{SCORER}", f"-{SCORER}", "+m"])


async def test_scores_that_are_known_load_nothing_again(home: Home) -> None:
    this = home(loaded=["m"])
    first = await this.told(chat(haystack(400)))
    again = await this.told(chat(haystack(400), "r2"))
    assert (first.used, again.used) == (True, True)
    assert again.parked is None
    assert len(this.pool.events) == 4


@pytest.mark.parametrize(("loaded", "again"), [([], True), (["m"], False)])
async def test_a_plan_prices_the_loads(home: Home, loaded: list[str], again: bool) -> None:
    this = home(loaded=loaded)
    whole = PlanView("m", 8000, 0, [OptionView("local", ["this"], 200.0, chosen=True)])
    found = await this.smart.plan(whole, 0.2, target(this), ASKED)
    smart = found.options[0]
    assert (smart.kind, smart.chosen) == ("smart", True)
    steps = {step.name: step.seconds for step in smart.steps}
    assert (steps["loaded"], steps["loaded after scoring"]) == (5.0, 20.0)
    assert smart.predicted_s == pytest.approx(sum(steps.values()))


def test_the_second_load_counts_once() -> None:
    assert Parking(5.0, 20.0).added_s == 20.0
    assert Parking(5.0, 20.0, needed=True).added_s == 0.0


def test_a_plan_whose_ways_are_all_closed_shows_smart_prefill_alone() -> None:
    own = Scorer("", "this", PrefillSpeed(0.001))
    plan = SmartPlan((Segments(own, 0.0, 1.0),), 5.0, 9.0)
    closed = OptionView("local", ["this"], None, code="memory", reason="Too little room.")
    (shown,) = ways_in_front(plan, [closed])
    assert (shown.kind, shown.chosen, shown.predicted_s) == ("smart", True, 14.0)
