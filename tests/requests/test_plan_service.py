"""`fleetctl plan` and requests agree: what is planned for a prompt is what happens to it, on any fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from examples import examples
from fakes import FACTS, FakeFolder, FakeModels
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed

from fleetd import limits
from fleetd.app import Daemon
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.config import Config, FleetSettings, HttpSettings
from fleetd.control.prefill_plan import OptionView, PlanQuestion, PlanView
from fleetd.engine.protocol import Generate, Ready, TextPrompt
from fleetd.errors import ContextLengthExceeded, FleetError, ModelNotFound, NoMachine
from fleetd.limits import GIB
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.prefill.choice import HYSTERESIS, PlanChoice
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import CAUTION
from fleetd.plan.scoring import Scorer, Segments, SmartPlan
from fleetd.process.notify import Notifier
from fleetd.requests.job import Job
from fleetd.requests.members.members import Member, Members
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.placement import Placer
from fleetd.requests.plan_service import PlanService
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.request import LocatedModel
from fleetd.requests.smart_prefill.client import SmartPrefill
from fleetd.storage import paths
from fleetd.storage.paths import HomeFolder

LAYERS = 16
# What is the same of one model on all machines.
SAME: dict[str, Any] = {
    "weights_bytes": 2 * GIB,
    "memory_bytes": 3 * GIB,
    "context_tokens": 8192,
    "layers": LAYERS,
    "token_bytes": 65536,
    "hidden_bytes": 4096,
    "hidden_width": 2048,
    "any_chunks": True,
    "dtype": "bfloat16",
    "roles": ["chat"],
}
READY: Ready = changed(
    FACTS,
    layers=LAYERS,
    dtype="bfloat16",
    weights_bytes=2 * GIB,
    token_bytes=65536,
    hidden_bytes=4096,
    hidden_width=2048,
    prefill_tok_s=100.0,
)


def card(name: str, model: dict[str, Any] | None, **fields: Any) -> Card:
    """A machine; ``model`` None where it does not have the model, else what is its own of it."""
    chip = MachineFacts(chip="Apple M2 Max", accelerator="metal", memory_bytes=64 * GIB)
    told = {"digest": "d", "state": "loaded", "prefill_tok_s": 100.0, "decode_tok_s": 20.0, "arithmetic": "a"}
    models = [] if model is None else [changed(ModelCard("m"), **SAME | told | model)]
    return replace(
        Card(
            name,
            1,
            1,
            name=name,
            machine=chip,
            models=models,
            available_bytes=40 * GIB,
            usable_bytes=40 * GIB,
            max_streams=4,
        ),
        **fields,
    )


def other(name: str, model: dict[str, Any] | None, bytes_per_s: float = 1e9, **fields: Any) -> Member:
    sees = fields.pop("sees_prompts", True)
    return Member(card(name, model, **fields), name, "", sees, 0.001, bytes_per_s)


class SmartScorers:
    """Scores in ``score_s``, at a price that ``plan`` says."""

    def __init__(self, score_s: float = 1.0) -> None:
        self.scorers = SimpleNamespace(speed_at=lambda node_id, model: PrefillSpeed.measured(100.0))
        self.turns = None
        self._score_s = score_s
        self.asked: list[Any] = []

    async def options(self, price: Any, policy: SmartPrefillPolicy, target: Any = None) -> SmartPlan:
        self.asked.append(price)
        scorer = Scorer("mini", "mini", speed=None)  # type: ignore[arg-type]  # nothing is computed
        return SmartPlan((Segments(scorer, 0.0, 1.0),), self._score_s, 9.0)


class OneMachine:
    """A daemon's planner and what requests ask of it."""

    def __init__(
        self, own: Card, *others: Member, has: bool | None = None, loaded: bool | None = None
    ) -> None:
        (told,) = own.models or [None]
        self.has = told is not None if has is None else has
        is_loaded = told is not None and told.state == "loaded" if loaded is None else loaded
        self.facts = READY if is_loaded else None
        self.own = own
        self.members = Members(lambda: others, lambda: self.own)
        self.placer = Placer(self.members, lambda *_: pytest.fail("nothing is sent"), lambda name: self.facts)
        self.scorers = SmartScorers()
        pool = SimpleNamespace(
            engine=lambda folder: SimpleNamespace(facts=self.facts) if self.facts else None
        )
        self.sharing = PrefillSharing(None, pool, self.members, None)  # type: ignore[arg-type]
        smart = SmartPrefill(self.scorers, self.members, pool, None, placer=self.placer)  # type: ignore[arg-type]
        drafting = SimpleNamespace(plan=self._no_drafts)
        self.service = PlanService(
            self.placer,
            lambda ref: self.located,
            smart,
            drafting,  # type: ignore[arg-type]
            SmartPrefillPolicy(),
        )

    @staticmethod
    async def _no_drafts(view: PlanView, folder: Any) -> PlanView:
        return view

    @property
    def located(self) -> LocatedModel:
        if self.has:
            folder: Any = FakeFolder(weights_bytes=2 * GIB)
            return LocatedModel("m", "m", folder)
        return LocatedModel("m", "m", None, missing=ModelNotFound("m is not here."))

    def plan(self, tokens: int, **question: Any) -> PlanView:
        return asyncio.run(self.service.plan(PlanQuestion("m", tokens, **question)))

    def choose(self, own: ModelCard, tokens: int) -> PlanChoice:
        """What shares a prompt that the engine has accepted."""
        asked = planner_facts.prompt(READY.shape, tokens, 0, MEASURED_TOKENS)
        return self.sharing.choose(planner_facts.loaded_here(own, READY), asked, exact=False)

    def run(self, tokens: int) -> tuple[str, ...]:
        """What a request of that length does: who answers, then how and with whom if that is this machine."""
        job = Job("m", Generate("r", TextPrompt("x" * 4 * tokens)), "http", "chat")
        located, before = self.located, self.own
        # The request itself waits here while it is placed.
        self.own = replace(before, waiting=before.waiting + 1)
        placed = self.placer.choose(job, located.wanted, tried=frozenset(), why=located.missing)
        self.own = before
        if placed.node_id != THIS_NODE:
            return ("remote", *placed.planned.nodes)
        own = self.sharing.held("m")
        if own is None or self.facts is None:
            return ("local", "this")
        best = self.choose(own, tokens).best
        self.members.last_prefill["m"] = best
        return (best.kind, *best.names, "this")


def chosen(view: PlanView) -> OptionView:
    (option,) = [option for option in view.options if option.chosen]
    assert view.options[0] is option
    return option


def told(view: PlanView) -> tuple[str, ...]:
    """The chosen way in the words of ``OneMachine.run``; elsewhere, that machine decides who helps."""
    option = chosen(view)
    return (option.kind, option.nodes[0]) if option.kind == "remote" else (option.kind, *option.nodes)


def attempted(call: Callable[[], tuple[str, ...]]) -> tuple[str, ...] | str:
    """What came of it, or the code of its error."""
    try:
        return call()
    except FleetError as error:
        return error.code


def test_named_machines_cannot_be_planned_for_a_model_whose_files_are_not_here() -> None:
    """The names were passed over, and the plan was one for any machine."""
    fleet = OneMachine(card("me", None), other("studio", {}))
    assert fleet.plan(1000).options
    with pytest.raises(ModelNotFound, match="m is not here"):
        fleet.plan(1000, placement=["this", "studio"])


# ---- The two agree ---------------------------------------------------------------------------------------

models = st.none() | st.fixed_dictionaries(
    {
        "state": st.sampled_from(["loaded", "loaded", "installed", "loading"]),
        "prefill_tok_s": st.sampled_from([0.0, 30.0, 100.0, 300.0]),
        "decode_tok_s": st.sampled_from([0.0, 10.0, 40.0]),
        "prefill_context_s": st.sampled_from([0.0, 1e-6]),
        "load_s": st.sampled_from([0.0, 1.0, 60.0]),
        "digest": st.sampled_from(["d", "d", "d", "e", ""]),
        "layers": st.sampled_from([LAYERS, LAYERS, 0]),
        "part_last": st.sampled_from([0, 0, 8]),
    }
)
busy = st.fixed_dictionaries(
    {
        "running": st.integers(0, 5),
        "waiting": st.sampled_from([0, 0, 3]),
        "available_bytes": st.sampled_from([GIB, 8 * GIB, 40 * GIB]),
    }
)
neighbours = st.builds(
    lambda name, model, link, sees, fields: other(name, model, link, sees_prompts=sees, **fields),
    st.sampled_from(["a", "b", "c"]),
    models,
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([True, True, False]),
    busy,
)


asked_fleets = given(
    models,
    busy,
    st.lists(neighbours, max_size=3, unique_by=lambda member: member.name),
    st.sampled_from([20, 400, 3000, 8000]),
    st.sampled_from([0, 1000, 6000]),
)


@asked_fleets
@examples(60)
def test_what_is_planned_is_what_a_request_does(
    model: dict[str, Any] | None, load: dict[str, Any], others: list[Member], tokens: int, before: int
) -> None:
    plan_and_run(model, load, others, tokens, before)


@pytest.mark.long
@pytest.mark.timeout(600)
@asked_fleets
@settings(deadline=None, max_examples=3000)
def test_three_thousand_fleets_do_what_is_planned(
    model: dict[str, Any] | None, load: dict[str, Any], others: list[Member], tokens: int, before: int
) -> None:
    plan_and_run(model, load, others, tokens, before)


def plan_and_run(
    model: dict[str, Any] | None, load: dict[str, Any], others: list[Member], tokens: int, before: int
) -> None:
    """Ask both for the same prompt, and compare."""
    fleet = OneMachine(card("home", model, **load), *others)
    if before:
        # A prompt that came before has got its way, which is kept where two are alike.
        attempted(lambda: fleet.run(before))
    planned = attempted(lambda: told(fleet.plan(tokens)))
    ran = attempted(lambda: fleet.run(tokens))
    if isinstance(planned, str):
        # Nothing but this machine's engine may still try, which knows its memory better than its card.
        assert ran == planned or (ran == ("local", "this") and model is not None)
        return
    assert not isinstance(ran, str)
    kind, *names = planned
    if fleet.facts is None and ran[0] == "local":
        # Who helps is decided once the model is loaded; before, only the machine is.
        assert names[-1] == "this"
    else:
        assert ran == (kind, *names)


@pytest.mark.parametrize("read", [0.0, 0.6])
def test_a_prompt_without_a_session_is_planned_to_go_on_where_most_of_it_was_read(read: float) -> None:
    tokens = 3000
    text = "x" * 4 * tokens
    # What is left takes it a little longer than the whole prompt takes here; its link is too slow to help.
    slower = other("b", {"prefill_tok_s": 38.0}, 1e5)
    fleet = OneMachine(card("home", {}), slower)
    affinity = fleet.members.affinity
    affinity.computed(slower.life, "m", affinity.links(text[: int(read * len(text))]))
    way = ("remote", "b") if read else ("local", "this")
    assert told(fleet.plan(tokens, text=text)) == fleet.run(tokens) == way


@given(st.lists(neighbours, max_size=3, unique_by=lambda member: member.name), st.sampled_from([400, 3000]))
@settings(deadline=None, max_examples=20)
def test_every_machine_is_told_of_and_all_but_the_chosen_way_have_a_reason(
    others: list[Member], tokens: int
) -> None:
    view = OneMachine(card("home", {}), *others).plan(tokens)
    assert {"this", *(member.name for member in others)} == {
        n for option in view.options for n in option.nodes
    }
    assert all(option.reason and option.code for option in view.options if not option.chosen)


_COUNTS = (
    "weights_bytes",
    "memory_bytes",
    "token_bytes",
    "state_bytes",
    "window_bytes",
    "window",
    "hidden_bytes",
    "hidden_width",
    "outside_bytes",
)
_RATES = ("prefill_tok_s", "decode_tok_s", "prefill_context_s", "prefill_fixed_s", "load_s")
counts = st.sampled_from([0, 1, 1 << 20, 1 << 40, (1 << 63) - 1])
rates = st.sampled_from([0.0, 1e-300, 1e-6, 1.0, 100.0, 1e12])
made_up = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([0, 1, LAYERS, limits.LAYERS]),
        "part_last": st.sampled_from([0, 8, limits.LAYERS]),
        **dict.fromkeys(_COUNTS, counts),
        **dict.fromkeys(_RATES, rates),
    }
)


def says(**figures: float) -> dict[str, Any]:
    """What a machine says of which all other figures are 0."""
    return {"layers": 0, "part_last": 0} | dict.fromkeys(_COUNTS, 0) | dict.fromkeys(_RATES, 0.0) | figures


# Beside the first one's rate that of the second one is lost.
@example(
    [says(prefill_tok_s=1e12, decode_tok_s=1e-6), says(prefill_tok_s=100.0, prefill_context_s=1e12)],
    400,
    True,
)
@given(st.lists(made_up, min_size=2, max_size=3), st.sampled_from([400, 8000]), st.booleans())
@settings(deadline=None, max_examples=12)
def test_attack_figures_that_a_machine_made_up_do_not_keep_others_from_an_answer(
    hostile: list[dict[str, Any]], tokens: int, here: bool
) -> None:
    others = [other(f"h{n}", model) for n, model in enumerate(hostile)]
    fleet = OneMachine(card("home", {} if here else None), other("studio", {}), *others)
    first_s = chosen(fleet.plan(tokens)).predicted_s
    assert first_s is not None
    assert first_s < 100
    fleet.run(tokens)


# ---- Where it runs ---------------------------------------------------------------------------------------


def test_a_machine_without_the_model_plans_where_it_is() -> None:
    fleet = OneMachine(card("home", None), other("studio", {}))
    view = fleet.plan(1000)
    best = chosen(view)
    assert (best.kind, best.nodes, best.prefill) == ("remote", ["studio"], "local")
    assert best.predicted_s == pytest.approx(sum(step.seconds for step in best.steps))
    assert fleet.run(1000) == ("remote", "studio")
    (here,) = [option for option in view.options if option.nodes == ["this"]]
    assert (here.code, here.predicted_s) == ("absent", None)


def test_help_that_a_machine_elsewhere_would_get_is_counted() -> None:
    slow = {"prefill_tok_s": 40.0}
    alone = OneMachine(card("home", None), other("a", slow), other("b", {"digest": "e"}))
    assert chosen(alone.plan(8000)).nodes == ["b"]
    helped = OneMachine(card("home", None), other("a", slow), other("b", {"digest": "e"}), other("c", slow))
    best = chosen(helped.plan(8000))
    (a, *helpers) = best.nodes
    assert chosen(alone.plan(8000)).predicted_s is not None
    assert {a, *helpers} <= {"a", "b", "c"}
    pair = OneMachine(card("home", None), other("a", slow), other("c", slow))
    single = OneMachine(card("home", None), other("a", slow))
    with_help, without = chosen(pair.plan(8000)), chosen(single.plan(8000))
    assert with_help.nodes == ["a", "c"]
    assert with_help.prefill in ("layers", "tokens", "whole")
    assert with_help.predicted_s is not None
    assert without.predicted_s is not None
    assert with_help.predicted_s < 0.7 * without.predicted_s
    # A machine with rules about who sees its prompts asks for an answer without helpers.
    pair.members.unaided = lambda: True
    assert chosen(pair.plan(8000)).nodes == ["a"]


def test_a_model_that_is_not_loaded_is_priced_with_its_load() -> None:
    fleet = OneMachine(card("home", {"state": "installed", "load_s": 12.0}))
    best = chosen(fleet.plan(1000))
    assert best.kind == "local"
    assert {step.name: step.seconds for step in best.steps}["loaded"] == 12.0
    assert best.predicted_s is not None
    assert best.predicted_s > 12.0
    # Never loaded anywhere, and its card does not show it yet: by its size.
    new = OneMachine(card("home", None), has=True)
    assert {step.name for step in chosen(new.plan(1000)).steps} >= {"loaded", "computed"}


def test_a_way_that_a_prompt_got_is_kept_where_two_are_alike() -> None:
    fleet = OneMachine(card("home", {}), other("studio", {"prefill_tok_s": 101.0}))
    best, *others = fleet.plan(3000).options
    (second,) = [
        option for option in others if option.code == "slower" and option.kind in ("layers", "tokens")
    ]
    assert best.predicted_s is not None
    assert second.predicted_s is not None
    assert second.predicted_s < best.predicted_s / HYSTERESIS, "else it is no close call"
    own = fleet.sharing.held("m")
    assert own is not None
    choice = fleet.choose(own, 3000)
    fleet.members.last_prefill["m"] = next(each for each in choice.rejected if each.kind == second.kind)
    assert told(fleet.plan(3000)) == fleet.run(3000) == (second.kind, *second.nodes)


def test_a_request_does_not_wait_for_itself() -> None:
    fleet = OneMachine(card("home", {}, max_streams=1), other("studio", {"prefill_tok_s": 105.0}, 1e4))
    assert fleet.run(1000) == ("local", "this") == told(fleet.plan(1000))


def test_a_queue_is_priced() -> None:
    idle, full = (OneMachine(card("home", {}, running=n, waiting=n)).plan(1000) for n in (0, 6))
    assert "queued" not in {step.name for step in chosen(idle).steps}
    assert {step.name: step.seconds for step in chosen(full).steps}["queued"] > 10


def test_what_can_be_served_nowhere_is_an_error_with_each_machines_reason() -> None:
    fleet = OneMachine(card("home", None), other("air", None), other("mini", None))
    with pytest.raises(ModelNotFound, match=r"here\. air does not have m\. mini does not have m\."):
        fleet.plan(1000)
    private = OneMachine(card("home", None), other("air", None), other("mini", {}, sees_prompts=False))
    with pytest.raises(NoMachine, match=r"air does not have m\. mini may not see prompts\."):
        private.plan(1000)
    small = OneMachine(card("home", {"state": "installed"}, usable_bytes=GIB))
    with pytest.raises(NoMachine, match=r"this has 1\.1 GB of memory for models"):
        small.plan(1000)


# ---- Smart prefill in front ------------------------------------------------------------------------------


def test_smart_prefill_stands_in_front_of_each_way() -> None:
    fleet = OneMachine(card("home", {}), other("studio", {}))
    view = fleet.plan(8000, smart=0.25)
    smart = [option for option in view.options if option.kind == "smart"]
    assert {"local", "layers", "tokens", "remote"} <= {option.prefill for option in smart}
    kept = fleet.plan(2000)
    for option in smart:
        (same,) = [
            each for each in kept.options if (each.kind, each.chosen) == (option.prefill, option.chosen)
        ]
        assert same.predicted_s is not None
        assert option.predicted_s == pytest.approx(1.0 + same.predicted_s)
    assert chosen(view).kind == "smart"
    assert chosen(view).prefill == chosen(kept).kind == fleet.run(2000)[0]


@pytest.mark.parametrize("here", [True, False])
def test_a_prompt_over_the_context_is_offered_smart_prefill(here: bool) -> None:
    fleet = OneMachine(card("home", {} if here else None), other("studio", {}))
    with pytest.raises(ContextLengthExceeded, match="takes 8,192 tokens; this prompt has 20,000"):
        fleet.plan(20_000)
    view = fleet.plan(20_000, smart=0.2)
    best = chosen(view)
    assert best.kind == "smart"
    refused = [option for option in view.options if option.code == "context"]
    assert {option.kind for option in refused} == ({"local", "remote"} if here else {"remote"})
    assert all(option.predicted_s is None and "takes 8,192 tokens" in option.reason for option in refused)
    # Nothing that reads all of it is a price to compare with.
    assert fleet.scorers.asked[0].asked.dense_s == 0
    assert (best.prefill, best.nodes[1:]) == (told(fleet.plan(4000))[0], chosen(fleet.plan(4000)).nodes)


# ---- Without a fleet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [READY, None], ids=["loaded", "installed"])
async def test_a_daemon_that_keeps_to_itself_plans_for_itself(tmp_path: Path, facts: Ready | None) -> None:
    home = HomeFolder(tmp_path / "h")
    paths.prepare(home)
    config = Config(http=HttpSettings(listen="127.0.0.1:0"), fleet=FleetSettings(enabled=False))
    pool = SimpleNamespace(
        run=asyncio.Event().wait,
        status=list,
        facts=lambda name: facts,
        close=_nothing,
        held_bytes=0,
        kv_bits=lambda name: 0,
        forget_origins=lambda labels: None,
    )
    pool.engine = lambda folder: None
    models = FakeModels(found=[])
    daemon = Daemon(
        config,
        home,
        pool=pool,  # type: ignore[arg-type]
        models=models,  # type: ignore[arg-type]
        notifier=Notifier({}),
        exit_after=lambda seconds: None,
    )
    task = asyncio.create_task(daemon.serve())
    try:
        async with asyncio.timeout(60):
            while not daemon.status().ready:  # noqa: ASYNC110  (readiness is a figure in status)
                await asyncio.sleep(0.005)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(home.socket))) as session,
            session.post("http://localhost/fleet/v1/plan", json={"model": "m", "tokens": 1000}) as answer,
        ):
            found = await answer.json()
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert answer.status == 200
    (option,) = found["options"]
    assert (option["kind"], option["chosen"], option["nodes"]) == ("local", True, ["this"])
    machine = daemon.status().machine
    chip = chip_speeds.hardware_of(machine.gpu or machine.cpu, machine.accelerator, machine.cores)
    tok_s = (
        READY.speed.prefill_tok_s
        if facts is not None
        else chip.prefill_tok_s(FakeFolder().weights_bytes) / CAUTION
    )
    steps = {step["name"]: step["seconds"] for step in option["steps"]}
    assert steps["computed"] == pytest.approx(1000 / tok_s, rel=0.25)
    assert ("loaded" in steps) == (facts is None)


async def _nothing() -> None:
    """What a pool without workers does to end them."""


def test_an_error_is_the_one_that_a_request_gets() -> None:
    fleet = OneMachine(card("home", None), other("air", None))
    errors: list[FleetError] = []
    for ask in (fleet.plan, fleet.run):
        with pytest.raises(FleetError) as caught:
            ask(1000)
        errors.append(caught.value)
    assert (errors[0].code, errors[0].message) == (errors[1].code, errors[1].message)
