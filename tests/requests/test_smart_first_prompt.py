"""A scorer's first prompt: none waits for a profile, and it takes what was planned."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from fakes import FACTS, FakeFolder
from msgspec.structs import replace
from nested_fields import changed
from smart_fakes import (
    DIGEST,
    PROFILE,
    SCORER,
    Profiles,
    ScoringPool,
    chat,
    folders,
    haystack,
)
from smart_home import ASKED, SmartHome, maker, target, text_of

from fleetd.compression.words import estimate_tokens
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_plan import PlanView
from fleetd.engine.protocol import (
    Generate,
    Loading,
    Profile,
    Score,
    Scored,
    ScoringState,
)
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.scoring import AROUND_TOKENS
from fleetd.requests.ledger import Ledger
from fleetd.requests.metrics import Metrics
from fleetd.storage.store import Store


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Callable[..., SmartHome]:
    return maker(store, ledger, metrics)


UNMEASURED = ScoringState("unmeasured", 3000)


@pytest.mark.parametrize("loaded", [["m", SCORER], ["m"]], ids=["loaded", "not loaded"])
async def test_no_prompt_waits_for_a_scorer_to_be_measured(home: Any, loaded: list[str]) -> None:
    """It is read whole at once, with the reason; and the scorer is measured once there is time."""
    this = home(Profiles({}), loaded=loaded, scoring=UNMEASURED)
    this.speeds.seed(SCORER, MeasuredSpeed(300.0, 100.0), now_s=0.0)
    told = await this.told(chat())
    assert (told.form, told.code) == ("", "measuring")
    assert f"{SCORER} is not measured for scoring yet" in told.reason
    assert not this.pool.scores
    assert SCORER not in this.pool.loaded or loaded == ["m", SCORER]
    assert this.pool.to_measure == [SCORER]
    if SCORER in loaded:
        assert "in about 10 s." in told.reason
    # And as soon as it is measured, the next prompt is scored.
    this.pool.loaded, this.pool.scoring = ["m", SCORER], ScoringState("ready")
    assert (await this.told(chat(f"Another log.\n\n{haystack()}"))).used


async def test_a_scorer_that_is_measured_goes_before_one_that_is_not(home: Any) -> None:
    """The smaller one of two would score, if both were known."""
    this = home(Profiles({"q": PROFILE}), loaded=["m"])
    this.models.found = [*folders("m"), FakeFolder(SCORER, 100_000, 10), *folders("qwen3-0.6b")]
    this.models.digests["qwen3-0.6b"] = "q"
    assert (await this.told(chat())).compressor == "qwen3-0.6b"
    assert (await this.told(chat(), replace(ASKED, compressor_model=SCORER))).code == "measuring"


async def test_a_plan_says_that_the_scorer_is_not_measured(home: Any) -> None:
    this = home(Profiles({}), scoring=UNMEASURED)
    view = await this.smart.plan(PlanView("m", 8000, 0, []), 0.0, target(this), ASKED)
    (option,) = view.options
    assert (option.code, option.predicted_s, option.chosen) == ("measuring", None, False)


async def test_a_model_whose_heads_find_nothing_scores_nothing(home: Any) -> None:
    this = home(Profiles({DIGEST: Profile([], 1)}))
    assert (await this.told(chat())).code == "no_compressor"
    this = home(Profiles({}), scoring=ScoringState("unable"))
    assert (await this.told(chat())).code == "no_compressor"
    assert not this.pool.to_measure


class CountedPool(ScoringPool):
    """Costs are counted, not waited for: each step moves ``clock`` by what it takes."""

    clock: float = 100.0
    load_s = 30.0
    scorer, target = PrefillSpeed(1 / 300, 1e-6, 0.05), PrefillSpeed(1 / 40, 2e-6, 0.1)

    async def loading(
        self, folder: Any, *, evict: bool = True, over: Any = None
    ) -> AsyncGenerator[Loading, None]:
        self.clock += 0.0 if folder.name in self.loaded else self.load_s
        async with aclosing(super().loading(folder, evict=evict)) as steps:
            async for step in steps:
                yield step

    async def ask(self, folder: Any, question: Score, *, evict: bool, progress: Any) -> Scored:
        assert question.profile == LONG_PROFILE
        n = round(self.tokens_per_estimated * estimate_tokens(question.text))
        passes = question.passes
        each = n // passes + (AROUND_TOKENS if passes > 1 else 0)
        self.clock += passes * self.scorer.total(15.4 / 30, range(each), MEASURED_TOKENS)
        found = await super().ask(folder, question, evict=evict, progress=progress)
        return replace(found, profile=question.profile)

    async def stream(self, folder: Any, request: Generate, over: Any = None) -> AsyncGenerator[Any, None]:
        if not request.count_only:
            n = round(self.tokens_per_estimated * estimate_tokens(text_of(request)))
            self.clock += self.target.total(1.0, range(n), MEASURED_TOKENS)
        async with aclosing(super().stream(folder, request)) as steps:
            async for step in steps:
                yield step


LONG_PROFILE = Profile([(0, 0)], 16, 30)


@pytest.mark.parametrize("tokens_per_estimated", [1.0, 0.7, 1.5])
async def test_the_first_prompt_of_a_scorer_takes_what_was_planned(
    home: Any, tokens_per_estimated: float
) -> None:
    """Nothing of the scorer is known but its profile: it is loaded, and priced as its load measured it.

    The prompt's tokens are counted: what vocabularies make of a text differs.
    """
    pool = CountedPool(loaded=["m"], tokens_per_estimated=tokens_per_estimated)
    this = home(Profiles({DIGEST: LONG_PROFILE}), pool, lambda: pool.clock)
    measured = 256 / pool.scorer.total(1.0, range(256), 256), pool.scorer.context_s, pool.scorer.fixed_s
    pool.facts = changed(
        FACTS,
        prefill_tok_s=measured[0],
        prefill_context_s=measured[1],
        prefill_fixed_s=measured[2],
    )
    target = 256 / pool.target.total(1.0, range(256), 256), 10.0, pool.target.context_s, pool.target.fixed_s
    this.speeds.seed("m", MeasuredSpeed(*target), now_s=0.0)
    told = await this.told(chat(haystack(400)))
    assert told.used
    (trace,) = this.traces
    assert trace.chosen.kind == "smart"
    assert trace.prefill_s == pytest.approx(trace.chosen.predicted_s, rel=0.1)
    # Loading came before the plan, and is in what the client waited for.
    assert trace.ttft_s == pytest.approx(pool.load_s + trace.prefill_s)


class LateLoadingPool(ScoringPool):
    """Loads the model that answers in 30 s, of which it tells at the beginning only."""

    clock: float = 100.0

    async def loading(
        self, folder: Any, *, evict: bool = True, over: Any = None
    ) -> AsyncGenerator[Loading, None]:
        loads = folder.name not in self.loaded
        async with aclosing(super().loading(folder, evict=evict)) as steps:
            async for step in steps:
                yield step
        if loads and folder.name == "m":
            self.clock += 30.0


async def test_a_load_takes_until_it_is_over_in_the_trace_too(home: Any) -> None:
    pool = LateLoadingPool(loaded=[SCORER])
    this = home(None, pool, lambda: pool.clock)
    await this.told(chat())
    (trace,) = this.traces
    (load,) = [step for step in trace.steps if step.name == "loaded" and step.machine == "this"]
    assert load.seconds == pytest.approx(30.0)


async def test_a_prompt_that_seemed_long_and_is_short_is_not_scored(home: Any) -> None:
    this = home(tokens_per_estimated=0.1)
    told = await this.told(chat())
    counted = round(0.1 * estimate_tokens(f"{text_of(chat())}\n"))
    assert (told.code, f"about {counted} tokens" in told.reason) == ("short", True), told.reason
    assert not this.pool.scores


async def test_a_scorer_that_proves_slow_when_loaded_is_not_asked(home: Any) -> None:
    this = home(loaded=["m"])
    this.speeds.seed("m", MeasuredSpeed(2 * FACTS.speed.prefill_tok_s, 100.0), now_s=0.0)
    assert (await this.told(chat())).code == "slower"
    assert this.pool.loaded == ["m", SCORER]
    assert not this.pool.scores
