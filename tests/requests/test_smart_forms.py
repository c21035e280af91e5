"""The mode `auto`: in which form a prompt is shortened in a fleet, and what is told of the other form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace
from sharing_fakes import own_card
from smart_fakes import SCORER, chat, completion, messages
from smart_home import ASKED, SmartHome, maker, target

from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.engine.protocol import ChatPrompt, Generate, Loading
from fleetd.requests.job import Job, Planned
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Member
from fleetd.requests.metrics import Metrics
from fleetd.requests.smart_prefill.client import SmartPrefill
from fleetd.storage.store import Store

WHOLE = PlanView("m", 4000, 0, [OptionView("local", ["this"], 40.0, chosen=True)])


def studio(bytes_per_s: float = 1e9, tok_s: float = 400.0) -> Member:
    card = own_card("studio", speed=MeasuredSpeed(tok_s, 10.0))
    return Member(card, "studio", "", True, 0.001, bytes_per_s)


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Callable[..., SmartHome]:
    """A machine that can leave tokens out, in a fleet with these others."""
    make = maker(store, ledger, metrics)

    def in_fleet(others: list[Member]) -> SmartHome:
        this = make(own_card=lambda: own_card("this"), others=others, sparse="", kept=20)
        this.speeds.seed("m", MeasuredSpeed(100.0, 10.0), now_s=0.0)
        this.speeds.seed(SCORER, MeasuredSpeed(5000.0, 200.0), now_s=0.0)
        return this

    return in_fleet


async def test_a_prompt_is_shortened_as_text_if_helpers_make_that_sooner(home: Any) -> None:
    this = home([studio()])
    assert (await this.told(chat())).form == "text"
    assert this.pool.asked[0].keep is None
    (trace,) = this.traces
    assert (trace.chosen.kind, trace.chosen.form) == ("smart", "text")
    (sparse,) = [option for option in trace.losers if option.form == "sparse"]
    assert (sparse.kind, sparse.prefill, sparse.nodes, sparse.code) == ("smart", "local", ["this"], "slower")
    assert "It is read as text in" in sparse.reason
    assert "studio" in sparse.reason
    assert sparse.predicted_s is not None
    assert trace.chosen.predicted_s is not None
    assert sparse.predicted_s > trace.chosen.predicted_s


@pytest.mark.parametrize("others", [[], [studio(1e4)], [studio(tok_s=1.0)]])
async def test_a_prompt_is_shortened_at_its_own_places_if_nobody_makes_text_sooner(
    home: Any, others: list[Member]
) -> None:
    this = home(others)
    assert (await this.told(chat())).form == "sparse"
    (trace,) = this.traces
    assert trace.chosen.form == "sparse"
    assert "text" not in {option.form for option in trace.losers}


@pytest.mark.parametrize(
    ("mode", "fields"), [("sparse", {}), ("auto", {"local_only": True}), ("auto", {"placement": ("this",)})]
)
async def test_who_names_a_mode_or_the_machines_gets_no_other(
    home: Any, mode: Any, fields: dict[str, Any]
) -> None:
    this = home([studio()])
    assert (await this.told(chat(), replace(ASKED, mode=mode), **fields)).form == "sparse"


@pytest.mark.parametrize(("first", "then"), [([], [studio()]), ([studio()], [])])
@pytest.mark.parametrize("again", [True, False])
async def test_a_conversation_goes_on_as_it_began_whoever_helps_now(
    home: Any, first: list[Member], then: list[Member], *, again: bool
) -> None:
    """Otherwise it would find nothing of itself in the prefix cache. So it is for a repetition."""
    fleet = [*first]
    this = home(fleet)
    form = (await this.told(chat())).form
    assert form == ("text" if first else "sparse")
    fleet[:] = then
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    following = Generate("r2", ChatPrompt([*messages(), *([] if again else answered)]))
    assert (await this.told(following)).form == form


@pytest.mark.parametrize(("first", "then"), [([], [studio()]), ([studio()], [])])
async def test_choices_of_one_request_have_one_form_whoever_helps_meanwhile(
    home: Any, first: list[Member], then: list[Member]
) -> None:
    """Else some of them would be answers to another prompt than the others."""
    fleet, scoring = [*first], asyncio.Event()
    this = home(fleet)
    this.pool.trouble = [scoring]
    job = Job("m", chat(request_id="r1"), "socket", "chat", smart=ASKED)
    async with asyncio.TaskGroup() as choices, aclosing(this.runner.run(job)) as events:
        while not isinstance(event := await anext(events), Loading):
            pass
        assert event.stage.startswith("scoring")
        fleet[:] = then
        another = choices.create_task(this.told(chat(request_id="r2")))
        scoring.set()
        planned = [event async for event in events if isinstance(event, Planned)]
    *_, one = [event.smart for event in planned if event.smart is not None]
    form = "text" if first else "sparse"
    assert (one.form, another.result().form) == (form, form)


@pytest.mark.parametrize(("first", "then"), [([], [studio()]), ([studio()], [])])
async def test_a_text_that_comes_again_has_the_same_form(
    home: Any, first: list[Member], then: list[Member]
) -> None:
    fleet = [*first]
    this = home(fleet)
    form = (await this.told(completion())).form
    fleet[:] = then
    assert (await this.told(completion("r2"))).form == form


async def test_a_plan_shows_both_forms(home: Any) -> None:
    this = home([studio()])
    view = await this.smart.plan(WHOLE, 0.2, target(this), ASKED)
    best = view.options[0]
    assert (best.chosen, best.kind, best.form) == (True, "smart", "text")
    assert best.nodes == ["studio", "this"]
    (sparse,) = [option for option in view.options if option.form == "sparse"]
    assert (sparse.nodes, sparse.code, sparse.chosen) == (["this"], "slower", False)
    assert sparse.predicted_s == pytest.approx(sum(step.seconds for step in sparse.steps))
    assert sparse.predicted_s > best.predicted_s


@pytest.mark.parametrize("mode", ["text", "sparse"])
async def test_a_plan_for_a_mode_that_is_named_shows_that_one(home: Any, mode: Any) -> None:
    this = home([studio()])
    view = await this.smart.plan(WHOLE, 0.2, target(this), replace(ASKED, mode=mode))
    assert {option.form for option in view.options if option.kind == "smart"} == {mode}


async def test_a_form_is_priced_as_it_is_read(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the text, or those that are computed of the whole prompt."""
    this = home([studio()])
    sizes: list[tuple[int, int]] = []
    best = SmartPrefill._best

    def watched(self: SmartPrefill, at: Any, tokens: int, cached: int, kept: int, *places: Any) -> Any:
        sizes.append((tokens, kept))
        return best(self, at, tokens, cached, kept, *places)

    monkeypatch.setattr(SmartPrefill, "_best", watched)
    await this.told(chat())
    (whole, kept), as_text, *_ = sizes
    assert as_text == (kept, 0)
    assert whole > 2 * kept > 0
