"""A prompt whose prefill is shared, seen from the machine that answers: decided, agreed, failed, recorded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes import ARITHMETIC, FACTS, STEPS, WITHIN_S, FakeEngine, FakeFolder
from msgspec.structs import replace
from nested_fields import changed
from requests_driver import answered, passed, request_of
from sharing_fakes import DIGEST, HelperMachine, HomePartners, HomePool, machines, own_card

from fleetd import limits
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_trace import DrafterView, Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Generate,
    Loading,
    Prefill,
    PrefillReport,
    StepTime,
    Tokenized,
)
from fleetd.errors import EngineDied, PeerLost
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.p2p.membership.cards import ModelCard
from fleetd.p2p.node import Node
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.options import PlanChoice
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.prefill.split import WarmRows
from fleetd.plan.route import RouteQuestion
from fleetd.plan.scoring import Scorer, Segments, SmartPlan
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.members.members import Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.pipeline import Pipeline, PipelineStep
from fleetd.requests.placement.placement import Placement, Placer, WantedModel
from fleetd.requests.placement.way_views import way_views
from fleetd.requests.prefill_sharing import client, messages
from fleetd.requests.prefill_sharing.agreement import Agreement
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.request import Request, Shortening
from fleetd.requests.request_views import trace_of
from fleetd.requests.timeline import Span

LONG = "word " * 4096
OK = PrefillReport("r1", [StepTime("computed", 1.0, 500)])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers agree and give their accounts, however busy the machine is. What is planned stays as it is."""
    reach = Agreement.reach
    monkeypatch.setattr(Agreement, "reach", lambda agreement, within_s: reach(agreement, WITHIN_S))
    monkeypatch.setattr(client, "_ACCOUNTS_S", WITHIN_S)


def job(text: str = LONG, **fields: Any) -> Job:
    prompt = ChatPrompt([{"role": "user", "content": text}])
    return Job("m", Generate("r1", prompt), **{"origin": "socket", "route": "chat", **fields})


@dataclass
class SharingHome:
    """The machine that answers, over a fake engine."""

    node: Node
    helpers: list[HelperMachine]
    partners: HomePartners
    pool: HomePool
    sharing: PrefillSharing
    metrics: Metrics
    traces: list[Trace] = field(default_factory=list)

    drafting: PipelineStep = field(default_factory=PipelineStep)

    def events(self, this: Job | None = None, request: Request | None = None) -> AsyncGenerator[Any, None]:
        folder = FakeFolder()
        pipeline = Pipeline([self.sharing, self.drafting], self.traces.append)
        request = request or request_of(this or job(), folder, arrived_s=self.sharing.monotonic())
        return answered(pipeline, request, lambda asked: self.pool.stream(folder, asked))

    async def ask(self, this: Job | None = None, request: Request | None = None) -> list[Any]:
        async with asyncio.timeout(WITHIN_S):
            return [event async for event in self.events(this, request)]

    async def trace(self, count: int = 1) -> Trace:
        async with asyncio.timeout(WITHIN_S):
            while len(self.traces) < count:  # noqa: ASYNC110  (a list of a callback, which announces nothing)
                await asyncio.sleep(0.01)
        return self.traces[-1]

    def shown(self, line: str) -> bool:
        return line in self.metrics.render()[0].decode().splitlines()


@contextlib.asynccontextmanager
async def home_with(
    folder: Path, helpers: int = 1, ending: PrefillReport | str = OK, card: Any = None, **fields: Any
) -> AsyncIterator[SharingHome]:
    async with machines(folder, helpers) as (node, others):
        partners = HomePartners(node, others, **fields)
        engine = FakeEngine()
        pool = HomePool(engine, ending)
        pool.gate.set()
        metrics, traces = Metrics("0"), list[Trace]()
        own = replace(card or own_card("home"), node_id=node.identity.node_id)
        members = Members(partners.machines, lambda: own)
        sharing = PrefillSharing(partners, pool, members, metrics)
        for other in others:
            other.engine.end.set()
        try:
            yield SharingHome(node, others, partners, pool, sharing, metrics, traces)
        finally:
            await sharing.close()
            engine.close()


class Drafted(PipelineStep):
    """Each answer has a drafter."""

    def attempt_ended(self, request: Request) -> None:
        request.attempt.drafter = DrafterView("small", "studio")


@pytest.mark.parametrize("still", [True, False])
async def test_rows_that_a_helper_keeps_are_used_in_the_next_turn_and_forgotten_if_it_has_lost_them(
    tmp_path: Path, *, still: bool
) -> None:
    prefix = b"8 bytes."
    async with home_with(tmp_path, ending=replace(OK, prefixes=[prefix])) as home:
        (helper,) = home.helpers
        helper.engine.keeps, helper.engine.warm, home.pool.warm = True, still, True
        await home.ask()
        await home.trace()
        assert (home.pool.requests[0].warm, helper.engine.assists[0].warm) == ([], None)
        first = helper.engine.assists[0].split
        layers, tokens = first.layers_of(0), first.tokens_of(0).stop
        rows = WarmRows(tokens, layers.start, layers.stop, prefix)
        home.pool.cached, home.pool.tokens = tokens + 20, tokens + 4000
        await home.ask()
        await home.trace(2)
        assert home.pool.requests[1].warm == [rows]
        assert helper.engine.assists[1].warm == rows
        # A plan that pays without them as well goes on.
        assert [share.warm for share in home.pool.fake.shares] == [[], [rows] if still else []]
        assert (rows in home.sharing.warm_notes.rows(DIGEST)) == still


async def test_a_plan_that_only_pays_with_rows_that_are_lost_is_given_up(tmp_path: Path) -> None:
    async with home_with(tmp_path, ending=replace(OK, prefixes=[b"8 bytes."])) as home:
        (helper,) = home.helpers
        helper.engine.keeps, home.pool.warm = True, True
        await home.ask()
        await home.trace()
        usual = home.sharing.choose

        def choose(own: ModelCard, asked: PrefillSize, *, exact: bool) -> PlanChoice:
            found = usual(own, asked, exact=exact)
            if asked.warm:
                return found
            (alone,) = [option for option in found.rejected if option.kind == "local"]
            return PlanChoice(alone, (found.best,))

        home.sharing.choose = choose  # type: ignore[method-assign]
        home.pool.cached, home.pool.tokens = 3000, 8000
        (planned, *_) = await home.ask()
        assert (planned.kind, len(home.pool.fake.shares)) == ("local", 1)
        assert "no longer has the rows of the turn before" in planned.reason
        # That is no fault: it is asked again for the next prompt.
        assert not home.sharing.members.left_out(helper.node_id, "prefill", DIGEST)


async def test_a_trace_names_who_drafted(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        home.drafting = Drafted()
        await home.ask()
        trace = await home.trace()
        assert trace.drafter == DrafterView("small", "studio")
        assert trace.chosen.kind != "local"
        assert home.traces == [trace]
        # By the plan's own price for this machine alone.
        (alone_s,) = [option.predicted_s for option in trace.losers if option.kind == "local"]
        assert alone_s is not None
        assert trace.prefill_s is not None
        assert trace.saved_s == alone_s - trace.prefill_s


async def test_a_prompt_that_was_shortened_and_shared_leaves_one_trace(tmp_path: Path) -> None:
    scorer = Scorer("", "mini", PrefillSpeed(0.001))
    plan = SmartPlan((Segments(scorer, 0.0, 1.0),), score_s=2.0, prefill_s=9.0, dense_s=40.0)
    async with home_with(tmp_path) as home:
        request = request_of(job(), FakeFolder())
        result = SmartPrefillResult("text", "small", ("mini",), 20_000, 4096)
        request.smart = Shortening(result, plan, steps=[Span("scored", "mini", 0.0, 1.5)])
        planned = (await home.ask(request=request))[0]
        assert (planned.shared, planned.exactness, planned.smart) == (True, "lossy", result)
        trace = await home.trace()
        assert home.traces == [trace]
        assert (trace.outcome, trace.exactness, trace.prompt_tokens) == ("smart", "lossy", 20_000)
        assert (trace.chosen.kind, trace.chosen.nodes) == ("smart", ["mini", "helper0", "this"])
        assert trace.chosen.predicted_s is not None
        assert trace.chosen.predicted_s > plan.score_s
        assert {("mini", "scored"), ("this", "computed"), ("helper0", STEPS[0].name)} <= {
            (step.machine, step.name) for step in trace.steps
        }
        assert trace.losers[0].predicted_s == plan.dense_s
        # The others are ways to read what is kept, behind the scores.
        ways = trace.losers[1:]
        assert {way.kind for way in ways} == {"smart"}
        assert "local" in {way.prefill for way in ways}
        assert all(way.predicted_s is None or way.predicted_s > plan.score_s for way in ways)
        assert home.shown(f'fleetd_share_total{{kind="{planned.kind}",outcome="shared"}} 1.0')


@pytest.mark.parametrize("used", [True, False])
def test_a_prompt_that_was_scored_here_and_answered_elsewhere_says_where(*, used: bool) -> None:
    """Where its shortening was refused, it used to be "computed here"."""
    scorer = Scorer("", "mini", PrefillSpeed(0.001))
    request = request_of(job(), FakeFolder())
    request.placement = Placement("studio", Planned("remote", ("studio",), "equivalent"))
    plan = SmartPlan((Segments(scorer, 0.0, 1.0),), score_s=2.0, prefill_s=9.0, dense_s=40.0)
    result = SmartPrefillResult("text" if used else "", "small", ("mini",), 20_000, 4096)
    request.smart = Shortening(result, plan)
    request.on_event(Accepted("r1", 4100), 1.0)
    request.on_event(Finished("r1", "stop"), 2.0)
    trace = trace_of(request)
    assert (trace.outcome, trace.exactness) == (("smart", "lossy") if used else ("remote", "equivalent"))
    assert (trace.answered_by, trace.chosen.nodes[-1]) == ("studio", "studio")
    assert trace.chosen.kind == ("smart" if used else "remote")
    assert trace.prompt_tokens == 20_000


async def test_what_failed_here_is_told_where_the_answer_comes_from_elsewhere(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        pipeline, request = Pipeline([home.sharing], home.traces.append), request_of(job(), FakeFolder())

        async def failing(asked: Generate) -> AsyncGenerator[Event, None]:
            yield Accepted(asked.id, 4096, 0, 256, waits=True)
            raise EngineDied("The engine ended.")

        async def elsewhere(asked: Generate) -> AsyncGenerator[Event, None]:
            assert not asked.shared
            yield Accepted(asked.id, 4096)
            yield Delta(asked.id, "hello")
            yield Finished(asked.id, "stop")

        async def attempt() -> None:
            with pipeline.attempt(request):
                async for event in failing(request.attempt.generate):
                    await passed(pipeline, request, event)

        with pytest.raises(EngineDied):
            await attempt()
        request.placement = Placement("studio", Planned("remote", ("studio",), "equivalent"))
        events = [event async for event in answered(pipeline, request, elsewhere)]
        assert [type(event) for event in events] == [Planned, Accepted, Delta, Finished]
        (trace,) = home.traces
        assert (trace.outcome, trace.answered_by, trace.exactness) == ("remote", "studio", "equivalent")
        (failed,) = trace.earlier
        assert (failed.outcome, failed.answered_by, failed.code) == ("failed", "", "engine_died")
        assert failed.losers


async def test_headers_do_not_leave_before_it_is_decided_who_helps(tmp_path: Path) -> None:
    """A stream's headers leave with the first event, and name the plan."""
    async with home_with(tmp_path) as home:
        pipeline, request = Pipeline([home.sharing], home.traces.append), request_of(job(), FakeFolder())
        with pipeline.attempt(request):
            assert request.attempt.generate.shared
            assert pipeline.on_event(request, Tokenized("r1", 4096)) == []
        alone = Pipeline()
        with alone.attempt(request):
            told = alone.on_event(request, Tokenized("r1", 4096))
        assert told[-1] == Tokenized("r1", 4096)
        assert request.prompt_tokens == 4096


async def test_an_attempt_that_failed_after_a_shared_prefill_says_nothing_of_the_next(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        (helper,) = home.helpers
        helper.engine.end.clear()
        folder = FakeFolder()
        pipeline, request = Pipeline([home.sharing], home.traces.append), request_of(job(), folder)

        async def attempt() -> None:
            with pipeline.attempt(request):
                async with contextlib.aclosing(home.pool.stream(folder, request.attempt.generate)) as events:
                    async for event in events:
                        await passed(pipeline, request, event)
                        if isinstance(event, PrefillReport):
                            raise EngineDied("The engine ended.")

        with pytest.raises(EngineDied):
            await attempt()
        choice = request.attempt.sharing.choice
        kind = choice.best.kind if choice is not None else ""
        request.begin(0.0)
        # The helper's account of the first attempt would arrive only now.
        helper.engine.end.set()
        await home.sharing.close()
        assert home.shown(f'fleetd_share_total{{kind="{kind}",outcome="failed"}} 1.0')
        assert request.attempt.sharing.spans == ()


# ---- whether it is asked at all --------------------------------------------------------------------------


async def test_a_long_prompt_may_be_shared(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        assert home.sharing.possible(job(), FakeFolder())
        assert home.sharing.possible(job(origin="peer", local_only=True), FakeFolder())
        assert not home.sharing.possible(job("short"), FakeFolder())


async def test_a_prompt_that_has_to_stay_is_never_shared(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        assert not home.sharing.possible(job(local_only=True), FakeFolder())
        assert not home.sharing.possible(job(origin="peer", local_only=True, unaided=True), FakeFolder())
        members = Members(home.partners.machines, lambda: own_card("home"), local_only=True)
        staying = PrefillSharing(home.partners, home.pool, members, home.metrics)
        assert not staying.possible(job(), FakeFolder())


@pytest.mark.parametrize("fields", [{"sees_prompts": False}, {"unusable": "It is gone."}], ids=str)
async def test_a_member_that_may_not_see_prompts_is_never_asked(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with home_with(tmp_path, **fields) as home:
        assert not home.sharing.possible(job(), FakeFolder())
        # Even if the engine has been told to wait, nobody is asked.
        home.sharing.possible = lambda job, folder: True  # type: ignore[method-assign]
        assert (await home.ask())[0] == LOCAL
        assert home.partners.asked == []
        assert home.pool.fake.lonely == [("r1", "")]


@pytest.mark.parametrize("card", [{"digest": "e" * 64}, {"digest": ""}], ids=str)
async def test_a_member_with_other_files_is_never_asked(tmp_path: Path, card: dict[str, Any]) -> None:
    async with home_with(tmp_path) as home:
        home.helpers[0].card = own_card("helper0", **card)
        assert not home.sharing.possible(job(), FakeFolder())


async def test_a_model_that_cannot_be_shared_costs_nothing(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        home.pool.fake.facts = changed(FACTS, unshareable="It has recurrent layers.")
        assert not home.sharing.possible(job(), FakeFolder())


# ---- shared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("helpers", [1, 2])
async def test_a_shared_prompt_says_so_before_anything_else(tmp_path: Path, helpers: int) -> None:
    async def label(node_id: str) -> str:
        return f"of {node_id}"

    async with home_with(tmp_path, helpers) as home:
        home.sharing.label = label
        planned, *events = await home.ask()
        assert planned.kind in ("layers", "tokens", "whole")
        names = {helper.node.name for helper in home.helpers}
        assert set(planned.nodes[:-1]) <= names
        assert (planned.nodes[-1], planned.exactness, planned.reason) == ("this", "exact", "")
        assert [type(event) for event in events] == [Accepted, Prefill, Delta, Finished]
        (share,) = home.pool.fake.shares
        assert share.exact
        assert share.predicted_s > 0
        chain = [helper for name in planned.nodes for helper in home.helpers if helper.node.name == name]
        assert share.origins == [f"of {helper.node.node_id}" for helper in chain]
        assert home.pool.fake.lonely == []
        assert {f"helper{n}" for n in range(share.split.helpers)} <= set(home.pool.fake.streams)
        assert home.pool.requests[0].shared
        trace = await home.trace()
        assert (trace.outcome, trace.code, trace.exactness) == ("shared", "", "exact")
        assert trace.chosen.nodes == list(planned.nodes)
        assert trace.chosen.predicted_s
        assert {"local"} <= {loser.kind for loser in trace.losers}
        assert {(step.machine, step.name) for step in trace.steps} >= {
            ("this", "computed"),
            ("helper0", STEPS[0].name),
        }
        assert trace.prefill_s is not None
        assert trace.ttft_s is not None
        assert trace.ttft_s >= trace.prefill_s
        assert home.shown(f'fleetd_share_total{{kind="{planned.kind}",outcome="shared"}} 1.0')
        # By its own account, whatever helpers say.
        assert home.shown("fleetd_share_bytes_total 500.0")


async def test_a_prompt_that_stays_whole_says_so_before_its_model_is_loaded(tmp_path: Path) -> None:
    """The headers of a stream leave with the first progress of loading; helpers are known after it."""
    async with home_with(tmp_path) as home:
        home.pool.loading = [Loading("reading", 1, 2), Loading("reading", 2, 2)]
        request = request_of(job(), FakeFolder())
        declined = SmartPrefillResult(code="declined", reason="the task is about the whole text")
        request.smart = Shortening(declined)
        expected, *events = await home.ask(request=request)
        assert (str(expected), expected.exactness) == ("local; nodes=this", "equivalent")
        assert expected.smart == declined
        assert [type(event) for event in events[:3]] == [Loading, Loading, Planned]
        assert events[2].shared
        assert (events[2].exactness, events[2].smart) == ("exact", declined)


@pytest.mark.parametrize(
    ("smart", "exactness", "told"),
    [
        (SmartPrefillResult(), "lossy", False),
        (SmartPrefillResult("text", "small", ("mini",), 20_000, 4096), "lossy", True),
        (SmartPrefillResult(code="short", reason="too short"), "equivalent", True),
    ],
)
async def test_headers_promise_the_least_that_a_prompt_may_come_to(
    smart: SmartPrefillResult, exactness: str, told: bool
) -> None:
    asked = msgspec.structs.replace(job(), smart=SmartPrefillPolicy(enabled=True))
    request = request_of(asked, FakeFolder())
    request.smart = Shortening(smart)
    expected = request.expected()
    assert (expected.exactness, expected.smart) == (exactness, smart if told else None)


async def test_other_arithmetic_is_no_exact_answer(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        home.helpers[0].engine.facts = replace(
            FACTS, arithmetic=replace(ARITHMETIC, accelerator="metal", layers=[b"x" * 8] * 4)
        )
        planned = (await home.ask())[0]
        assert planned.exactness == "equivalent"
        assert not home.pool.fake.shares[0].exact
        assert (await home.trace()).exactness == "equivalent"


@pytest.mark.parametrize(
    ("by_card", "by_offer", "helps"),
    [("bits", True, True), ("other bits", True, False), ("bits", False, False)],
    ids=["alike", "told by its card", "told by its offer"],
)
async def test_no_helper_that_rounds_otherwise_has_a_part_in_an_exact_answer(
    tmp_path: Path, by_card: str, by_offer: bool, helps: bool
) -> None:
    async with home_with(tmp_path, card=own_card("home", arithmetic="bits")) as home:
        home.helpers[0].card = own_card("mini", arithmetic=by_card)
        if not by_offer:
            home.helpers[0].engine.facts = replace(
                FACTS, arithmetic=replace(ARITHMETIC, accelerator="metal", layers=[b"x" * 8] * 4)
            )
        asked = job()
        asked = msgspec.structs.replace(asked, request=msgspec.structs.replace(asked.request, exact=True))
        planned = (await home.ask(request=request_of(asked, FakeFolder())))[0]
        assert (planned.shared, planned.exactness) == (helps, "exact")
        assert bool(home.pool.fake.shares) == helps
        assert (await home.trace()).exactness == "exact"


@pytest.mark.parametrize("fields", [{}, {"bytes_per_s": 1000.0}], ids=["shared", "alone"])
async def test_what_rests_on_cached_numbers_of_others_is_no_exact_answer(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with home_with(tmp_path, **fields) as home:
        home.pool.cached, home.pool.exact = 256, False
        assert (await home.ask())[0].exactness == "equivalent"
        assert (await home.trace()).exactness == "equivalent"


# ---- not shared ------------------------------------------------------------------------------------------


async def test_where_it_does_not_pay_the_engine_hears_at_once(tmp_path: Path) -> None:
    async with home_with(tmp_path, bytes_per_s=1000.0) as home:
        planned, *events = await home.ask()
        assert planned == LOCAL
        assert [type(event) for event in events] == [Accepted, Prefill, Delta, Finished]
        assert home.pool.fake.lonely == [("r1", "")]
        assert home.partners.asked == []
        trace = await home.trace()
        assert (trace.outcome, trace.chosen.kind, trace.code) == ("local", "local", "")
        assert trace.losers[0].reason


async def test_an_engine_that_does_not_wait_is_left_alone(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        home.pool.waits = False
        assert (await home.ask())[0] == LOCAL
        assert home.pool.fake.lonely == home.pool.fake.shares == []
        (trace,) = home.traces
        assert (trace.outcome, trace.losers) == ("local", [])


@pytest.mark.parametrize("older", [False, True])
async def test_helpers_are_asked_for_rows_of_this_machines_bits_and_have_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    encode = messages.encode

    def as_before(message: Any) -> bytes:
        leaves_out = older and isinstance(message, messages.AssistOffer)
        return encode(replace(message, kv_bits=0) if leaves_out else message)

    monkeypatch.setattr(messages, "encode", as_before)
    async with home_with(tmp_path) as home:
        home.pool.fake.facts = replace(FACTS, shape=replace(FACTS.shape, kv_bits=8))
        planned = (await home.ask())[0]
        assert [part.kv_bits for part in home.helpers[0].engine.assists] == [8]
        assert planned.shared != older
        assert not older or "kv_bits is 0 there and 8 here" in planned.reason


# Rows of 1024 bytes at 100 tokens per second, over a link that carries less.
NARROW, SLOW = replace(FACTS.shape, wire_token_bytes=300), 40e3


@contextlib.asynccontextmanager
async def narrow_home(folder: Path, *, older: bool = False, **options: Any) -> AsyncIterator[SharingHome]:
    card = own_card("home", shape=replace(NARROW, wire_bits=8))
    async with home_with(folder, card=card, bytes_per_s=SLOW, **options) as home:
        home.pool.fake.facts = replace(FACTS, shape=NARROW)
        if not older:
            for helper in home.helpers:
                helper.card = own_card(helper.node.name, shape=NARROW)
        yield home


@pytest.mark.parametrize("older", [False, True])
async def test_helpers_are_asked_for_8_bits_if_their_cards_say_that_they_can(
    tmp_path: Path, older: bool
) -> None:
    async with narrow_home(tmp_path, older=older) as home:
        planned = (await home.ask())[0]
        trace = await home.trace()
        bits = 0 if older else 8
        assert [part.wire_bits for part in home.helpers[0].engine.assists] == ([] if older else [8])
        assert [share.wire_bits for share in home.pool.fake.shares] == ([] if older else [8])
        assert (planned.wire_bits, trace.wire_bits, trace.chosen.wire_bits) == (bits, bits, bits)
        assert (planned.exactness, planned.shared) == (("exact", False) if older else ("equivalent", True))
        if not older:
            assert [share.exact for share in home.pool.fake.shares] == [False]
            assert [part.exact for part in home.helpers[0].engine.assists] == [False]


async def test_a_helper_that_leaves_out_how_it_sends_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = messages.encode

    def as_before(message: Any) -> bytes:
        return encode(replace(message, wire_bits=0) if isinstance(message, messages.AssistOffer) else message)

    monkeypatch.setattr(messages, "encode", as_before)
    async with narrow_home(tmp_path) as home:
        planned = (await home.ask())[0]
        assert (planned.kind, planned.exactness, planned.wire_bits) == ("local", "exact", 0)
        assert "wire_bits is 0 there and 8 here" in planned.reason


async def test_a_request_that_has_to_be_exact_gets_rows_as_they_are(tmp_path: Path) -> None:
    async with narrow_home(tmp_path) as home:
        this = job()
        exact = msgspec.structs.replace(this, request=replace(this.request, exact=True))
        planned = (await home.ask(exact))[0]
        assert (planned.exactness, planned.wire_bits) == ("exact", 0)
        assert all(share.wire_bits == 0 for share in home.pool.fake.shares)


@pytest.mark.parametrize("verified", [0, 2000])
async def test_what_is_left_of_help_in_8_bits_is_said(tmp_path: Path, verified: int) -> None:
    ending = PrefillReport("r1", [], "peer_lost", "helper0: gone.", verified)
    async with narrow_home(tmp_path, ending=ending) as home:
        plans = [event for event in await home.ask() if isinstance(event, Planned)]
        assert [plan.wire_bits for plan in plans] == [8, 8 if verified else 0]
        assert [plan.exactness for plan in plans] == ["equivalent", "equivalent" if verified else "exact"]
        assert (await home.trace()).wire_bits == plans[-1].wire_bits


@pytest.mark.parametrize("exact", [True, False])
async def test_rows_that_were_rounded_serve_no_turn_that_is_exact_so_far(tmp_path: Path, exact: bool) -> None:
    prefix = b"8 bytes."
    async with narrow_home(tmp_path, ending=replace(OK, prefixes=[prefix])) as home:
        (helper,) = home.helpers
        helper.engine.keeps, helper.engine.warm, home.pool.warm = True, True, True
        await home.ask()
        await home.trace()
        (rows,) = home.sharing.warm_notes.rows(DIGEST)
        assert not rows.exact
        home.pool.exact = exact
        # From now on they are sent as they are.
        home.partners.fields["bytes_per_s"] = 1e9
        home.pool.cached, home.pool.tokens = rows.tokens + 20, rows.tokens + 4000
        await home.ask()
        await home.trace(2)
        assert [part.warm for part in helper.engine.assists[1:]] == [None if exact else rows]
        # Rows that are here were rounded on the way, and the helper's were not: bytes may differ.
        assert [share.exact for share in home.pool.fake.shares] == [False, exact]


async def test_a_helper_that_refuses_costs_only_its_help(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        home.helpers[0].engine.facts = replace(FACTS, arithmetic=replace(ARITHMETIC, dtype="float16"))
        planned, *events = await home.ask()
        assert (planned.kind, planned.nodes, planned.exactness) == ("local", ("this",), "exact")
        assert "dtype" in planned.reason
        assert isinstance(events[-1], Finished)
        trace = await home.trace()
        assert (trace.outcome, trace.code) == ("local", "incompatible")
        # And for a while it is not asked again.
        assert (await home.ask())[0] == LOCAL
        assert len(home.partners.asked) == 1
        assert "left out" in (await home.trace(2)).losers[0].reason


async def test_nobody_waits_longer_for_helpers_than_they_would_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within: list[float] = []

    async def late(_agreement: Any, within_s: float) -> bool:
        within.append(within_s)
        raise PeerLost("It did not agree.")

    monkeypatch.setattr(Agreement, "reach", late)
    for tok_s, bounds in ((100.0, (2.0, 2.0)), (3000.0, (0.5, 0.9)), (8000.0, (0.5, 0.5))):
        speed = {"prefill_tok_s": tok_s, "prefill_context_s": 1e-12}
        async with home_with(tmp_path / str(tok_s), card=own_card("home", **speed)) as home:
            home.helpers[0].card = own_card("helper0", **speed)
            await home.ask()
            assert bounds[0] <= within[-1] <= bounds[1]
    assert len(within) == 3


async def test_a_bug_in_pricing_costs_nobody_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home_with(tmp_path) as home:

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(home.sharing, "choose", broken)
        events = await home.ask()
        assert events[0] == LOCAL
        assert isinstance(events[-1], Finished)
        assert home.pool.fake.lonely == [("r1", "")]


# ---- while it is shared ----------------------------------------------------------------------------------


async def test_a_helper_that_dies_is_given_up_at_once(tmp_path: Path) -> None:
    async with home_with(tmp_path, ending="wait") as home:
        helper = home.helpers[0].engine
        helper.end.clear()
        asking = asyncio.create_task(home.ask())
        await home.pool.begun.wait()
        helper.error = EngineDied("Its engine ended.")
        helper.end.set()
        first, *events = await asking
        assert first.kind != "local"
        (moved,) = [event for event in events if isinstance(event, Planned)]
        assert (moved.kind, moved.nodes, moved.exactness) == ("local", ("this",), "exact")
        assert moved.reason == "helper0: Its engine ended."
        assert [type(event) for event in events] == [Accepted, Prefill, Planned, Delta, Finished]
        trace = await home.trace()
        assert (trace.outcome, trace.code, trace.verified_tokens) == ("fallback", "engine_died", 256)
        assert home.shown('fleetd_fallback_total{reason="engine_died"} 1.0')
        members, helper_id = home.sharing.members, home.helpers[0].node_id
        assert members.left_out(helper_id, "prefill", DIGEST)
        assert not members.left_out(helper_id, "prefill"), "other models have other engines"


async def test_what_the_engine_finds_wrong_is_the_helpers_fault(tmp_path: Path) -> None:
    ending = PrefillReport("r1", [], "protocol_error", "Rows that are not due.", 0)
    async with home_with(tmp_path, ending=ending) as home:
        home.helpers[0].engine.end.clear()
        events = await home.ask()
        (_, moved) = [event for event in events if isinstance(event, Planned)]
        assert (moved.kind, moved.reason) == ("local", "Rows that are not due.")
        assert (await home.trace()).code == "protocol_error"
        assert "protocol_error" in home.sharing.members.left_out(home.helpers[0].node_id, "prefill")
        assert home.pool.fake.lonely == [], "it knows already"
        # Its work there has ended too.
        await home.helpers[0].engine.until(lambda: home.helpers[0].engine.cancelled == 1)


async def test_a_failure_that_two_notice_is_told_once_and_traced_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed = asyncio.Event()

    async def watch(agreement: Agreement) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # The session tells of the loss in the same turn in which the engine has told of it.
            raise EngineDied("Its engine ended.") from None

    def blame(sharing: PrefillSharing, agreement: Agreement, digest: str) -> None:
        noticed.set()

    monkeypatch.setattr(Agreement, "watch", watch)
    ending = PrefillReport("r1", [], "peer_lost", "The stream broke.", 0)
    async with home_with(tmp_path, ending=ending) as home:
        said: list[Any] = []
        async with asyncio.timeout(WITHIN_S), contextlib.aclosing(home.events()) as events:
            async for event in events:
                said.append(event)
                if isinstance(event, Planned) and event.kind == "local":
                    monkeypatch.setattr(PrefillSharing, "blame", blame)
                    await noticed.wait()
        (_, moved) = [event for event in said if isinstance(event, Planned)]
        trace = await home.trace()
        assert moved.reason == trace.reason == "The stream broke."
        assert trace.code == "peer_lost"
        assert home.pool.fake.lonely == [], "the engine has gone on already"


async def test_what_was_verified_before_a_failure_is_still_theirs(tmp_path: Path) -> None:
    ending = PrefillReport("r1", [], "peer_lost", "It went away.", 512)
    async with home_with(tmp_path, ending=ending) as home:
        other = replace(ARITHMETIC, accelerator="metal", layers=[b"x" * 8] * 4)
        home.helpers[0].engine.facts = replace(FACTS, arithmetic=other)
        assert [event.exactness for event in await home.ask() if isinstance(event, Planned)] == [
            "equivalent",
            "equivalent",
        ]
        home.pool.ending = replace(ending, verified=0)
        home.sharing.members.succeeded(home.helpers[0].node_id, "prefill")
        assert [event.exactness for event in await home.ask() if isinstance(event, Planned)] == [
            "equivalent",
            "exact",
        ]


async def left_by_its_client(home: SharingHome) -> HelperMachine:
    """A prompt that is shared, and whose client goes: its helper."""
    (helper,) = home.helpers
    helper.engine.end.clear()
    asking = asyncio.create_task(home.ask())
    await home.pool.begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert home.pool.left == 1
    assert (await home.trace()).outcome == "cancelled"
    return helper


@pytest.mark.parametrize("error", [None, PeerLost("home: the stream ended.")])
async def test_helpers_go_on_where_a_client_leaves_as_long_as_the_engine_does(
    tmp_path: Path, error: PeerLost | None
) -> None:
    async with home_with(tmp_path, ending="wait") as home:
        helper = await left_by_its_client(home)
        assert (helper.outcomes, helper.engine.cancelled) == ([], 0)
        # It has read it to the end; or the engine has closed the stream, having more to do.
        helper.engine.error = error
        helper.engine.end.set()
        async with asyncio.timeout(WITHIN_S):
            while not helper.outcomes:  # noqa: ASYNC110  (a list of a callback, which announces nothing)
                await asyncio.sleep(0.01)
            await home.sharing.background.finish()
        assert helper.outcomes == [error.code if error else "done"]
        assert not home.sharing.members.left_out(helper.node_id, "prefill")
        assert home.pool.fake.lonely == []


async def test_helpers_end_some_time_after_a_client_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARE_LEFT_S", 0.0)
    async with home_with(tmp_path, ending="wait") as home:
        helper = await left_by_its_client(home)
        await helper.engine.until(lambda: helper.engine.cancelled == 1)
        assert not home.sharing.members.left_out(helper.node_id, "prefill")


async def test_whoever_leaves_while_machines_agree_ends_that(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        never = asyncio.Event()
        reached = asyncio.Event()

        async def silent(*_: Any) -> None:
            reached.set()
            await never.wait()

        home.helpers[0].node.handle(messages.ASSIST, silent)
        asking = asyncio.create_task(home.ask())
        await reached.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert home.pool.left == 1
        assert home.pool.fake.shares == home.pool.fake.lonely == []


# ---- getting others ready, and questions -----------------------------------------------------------------


async def test_a_helper_without_the_model_loaded_is_asked_to_load_it(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        cold = home.helpers[0]
        cold.pool.loaded = False
        cold.card = own_card("helper0", state="installed")
        cold.pool.gate.set()
        assert home.sharing.possible(job(), FakeFolder())
        assert (await home.ask())[0] == LOCAL
        async with asyncio.timeout(WITHIN_S):
            while not cold.pool.loads:  # noqa: ASYNC110  (a fake's figure)
                await asyncio.sleep(0.01)
        await home.ask()
        assert home.partners.asked == [(cold.node_id, messages.WARM)], "not at every prompt"


async def test_one_that_has_no_room_for_the_model_is_asked_to_load_some_layers(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        small = home.helpers[0]
        small.pool.loaded = False
        small.pool.gate.set()
        home.pool.fake.facts = changed(FACTS, weights_bytes=1 << 30)
        room = WORKING_BYTES + (1 << 30) * 5 // 8
        small.card = replace(own_card("helper0", state="installed"), usable_bytes=room)
        assert (await home.ask())[0] == LOCAL
        async with asyncio.timeout(WITHIN_S):
            while not small.pool.loaded:  # noqa: ASYNC110  (a fake's figure)
                await asyncio.sleep(0.01)
        assert small.pool.loads == [(0, 2)]
        # Once it says so, they are used, by layers, and nobody is asked to load anything.
        small.card = own_card("helper0", state="installed", part_last=2)
        assert (await home.ask())[0].kind == "layers"
        assert home.pool.fake.shares[0].split.cuts[1] <= 2
        assert home.partners.asked == [(small.node_id, messages.WARM), (small.node_id, messages.ASSIST)]


async def test_a_prompt_gets_the_help_that_was_planned_for_it(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        placer = Placer(home.sharing.members, home.partners.request, lambda model: home.pool.fake.facts)
        ways = placer.ways(RouteQuestion("m", 4096, 256), WantedModel("m", here=True))
        best, *others = way_views(ways)
        assert best.nodes == ["helper0", "this"]
        assert all(option.reason for option in others)
        planned = (await home.ask())[0]
        assert (planned.kind, [*planned.nodes]) == (best.kind, best.nodes)


async def test_prompt_leak_into_traces(tmp_path: Path) -> None:
    canary = "canary-7a31-prompt"
    async with home_with(tmp_path) as home:
        await home.ask(job(canary + LONG))
        assert canary not in str(await home.trace())


# ---- what is learned --------------------------------------------------------------------------------------


async def test_a_helper_that_takes_longer_than_it_should_is_expected_to_the_next_time(tmp_path: Path) -> None:
    async with home_with(tmp_path) as home:
        # By any figures so much that it counts as the most.
        home.helpers[0].engine.steps = [StepTime(step_names.COMPUTED, 1e6, 1000)]
        await home.ask()
        first = (await home.trace()).chosen
        assert first.kind != "local"
        await home.ask()
        second = (await home.trace(2)).chosen
        node_id = home.helpers[0].node.identity.node_id
        factor = home.sharing.members.correction(node_id, DIGEST, PrefillSpeed(1 / 100))
        assert factor > 2
        assert second.kind == "local" or (second.predicted_s or 0) > (first.predicted_s or 0)


async def sent(home: SharingHome) -> tuple[str, int, float, bool]:
    """What a helper's stream was seen to carry, once the answer's accounts are in."""
    async with asyncio.timeout(WITHIN_S):
        while not home.partners.came:  # noqa: ASYNC110  (a list of a callback, which announces nothing)
            await asyncio.sleep(0.01)
    (came,) = home.partners.came
    return came


@pytest.mark.parametrize(("exposed_s", "late"), [(0.001, False), (600.0, True)])
async def test_what_a_helper_sent_says_how_fast_its_path_is_at_least(
    tmp_path: Path, exposed_s: float, late: bool
) -> None:
    own = [StepTime(step_names.WAITED, 0.1, 5_000_100), StepTime(step_names.EXPOSED, exposed_s)]
    ending = PrefillReport("r1", own)
    async with home_with(tmp_path, ending=ending) as home:
        home.helpers[0].engine.steps = [
            StepTime(step_names.WAITED, 0.1, 777),
            StepTime(step_names.COMPUTED, 1.0, 5_000_000),
        ]
        await home.ask()
        node_id, count, seconds, was_late = await sent(home)
        assert (node_id, count) == (home.helpers[0].node.identity.node_id, 5_000_000)
        # From the agreement to the end of the prefill, by this machine's clock: not what the helper says.
        assert 0 < seconds < WITHIN_S
        assert was_late is late


async def test_attack_a_path_is_no_faster_than_what_came_over_it_whatever_a_helper_says(
    tmp_path: Path,
) -> None:
    """Else every prompt would be read with the help of the machine that claims most."""
    ending = PrefillReport("r1", [StepTime(step_names.WAITED, 0.1, 3_000_000)])
    async with home_with(tmp_path, ending=ending) as home:
        home.helpers[0].engine.steps = [StepTime(step_names.COMPUTED, 1.0, 1 << 50)]
        await home.ask()
        assert (await sent(home))[1] == 3_000_000


async def test_this_machines_part_corrects_what_it_tells_of_itself(tmp_path: Path) -> None:
    """Its own figure says that the part takes far longer: it was measured beside something else."""
    ending = PrefillReport("r1", [StepTime(step_names.COMPUTED, 0.01)])
    async with home_with(tmp_path, ending=ending) as home:
        home.sharing.speeds.seed("m", MeasuredSpeed(100.0, 1.0), now_s=home.sharing.monotonic())
        await home.ask()
        await sent(home)
        assert home.sharing.speeds.of("m").prefill_tok_s > 200
