"""Drafters seen from the machines: found, compared, introduced, ended; no failure reaches an answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

import fleet_nodes
from fakes import FACTS, WITHIN_S, FakeEngine, FakeFolder, FakeModels
from requests_driver import answered, request_of
from sharing_fakes import DIGEST, HomePartners, own_card
from timelines import check_steps

from fleetd import limits
from fleetd.control.prefill_plan import DraftsView, PlanView
from fleetd.control.prefill_trace import DrafterView, SourceCounts, Speculated, Trace
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Generate,
    Prefill,
    Ready,
    Speculate,
    StepTime,
)
from fleetd.errors import (
    EngineDied,
    FleetError,
    Incompatible,
    OutOfMemory,
    Overloaded,
    ProtocolError,
)
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.admission import ServingContext
from fleetd.requests.drafting import client, messages
from fleetd.requests.drafting.client import AnswerDrafting, check_vocabulary
from fleetd.requests.drafting.drafters import DrafterCandidate
from fleetd.requests.drafting.server import DraftServer
from fleetd.requests.job import Job, Planned
from fleetd.requests.members.members import Member, Members
from fleetd.requests.pipeline import Pipeline
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.request import Request

WORDS = "ab" * 16
SMALL = "small"
TARGET = FakeFolder("m")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter gives its account after the answer, however busy the machine is."""
    monkeypatch.setattr(client, "_ACCOUNT_S", WITHIN_S)


def facts(vocabulary: str = WORDS) -> Ready:
    return replace(
        FACTS,
        vocabulary=vocabulary,
        speculation="exact: blocks of up to 16 tokens",
        speculation_width=16,
        speculation_context=4096,
    )


@dataclass
class DraftingPool:
    """The answering model's engine, and the drafting one's."""

    home: FakeEngine | None
    small: FakeEngine
    refusal: FleetError | None = None
    used: int = 0

    def engine(self, folder: Any) -> FakeEngine | None:
        return self.home

    @property
    def lent(self) -> DraftingPool:
        return self

    @contextlib.asynccontextmanager
    async def assisting(self, folder: Any, first: int, last: int) -> AsyncIterator[FakeEngine]:
        assert (folder.name, first, last) == (SMALL, 0, 0)
        if self.refusal is not None:
            raise self.refusal
        self.used += 1
        try:
            yield self.small
        finally:
            self.used -= 1


def card(name: str, **model: Any) -> Card:
    fields: dict[str, Any] = {"digest": DIGEST, "state": "loaded"} | model
    return replace(own_card(name), models=[ModelCard(SMALL, **fields)])


class DraftingMachine:
    """A machine that drafts for others, over a fake engine. As ``sharing_fakes.HelperMachine``."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.engine = FakeEngine(facts())
        self.pool = DraftingPool(None, self.engine)
        self.card = card(node.name)
        self.draining = False
        self.outcomes: list[str] = []
        context = ServingContext(
            FakeModels([SMALL]),
            lambda: self.card,
            draining=lambda: self.draining,
            finished=lambda _kind, outcome: self.outcomes.append(outcome),
        )
        node.handle(messages.FOLLOW, DraftServer(BulkDialer(node), self.pool, context))

    @property
    def node_id(self) -> str:
        return self.node.identity.node_id

    async def ended(self, outcome: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not self.outcomes:  # noqa: ASYNC110  (a list of a callback, which announces nothing)
                await asyncio.sleep(0.01)
        assert self.outcomes == [outcome]
        assert self.pool.used == 0


@contextlib.asynccontextmanager
async def fleet(folder: Path, count: int = 1) -> AsyncIterator[tuple[Node, list[DraftingMachine]]]:
    home = Node(fleet_nodes.settings(folder, "home"))
    others = [DraftingMachine(Node(fleet_nodes.settings(folder, f"peer{n}"))) for n in range(count)]
    nodes = [home, *(other.node for other in others)]
    try:
        async with fleet_nodes.running(*nodes):
            await fleet_nodes.introduce(*nodes)
            await fleet_nodes.together(nodes)
            yield home, others
    finally:
        for other in others:
            other.engine.close()


@dataclass
class DrafterMetrics:
    """``drafting.Metrics``."""

    told: list[tuple[str, str]] = field(default_factory=list)

    def drafter(self, where: str, outcome: str) -> None:
        self.told.append((where, outcome))


@dataclass
class DraftingHome:
    drafting: AnswerDrafting
    pool: DraftingPool
    metrics: DrafterMetrics
    tasks: list[asyncio.Task[list[Event]]] = field(default_factory=list)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    traces: list[Trace] = field(default_factory=list)
    request: Request = field(init=False)

    async def through(self, job: Job, events: AsyncGenerator[Event, None]) -> list[Event]:
        """What the client of an answer with these events gets, besides the plan."""
        pipeline = Pipeline([self.drafting], self.traces.append)
        self.request = request_of(job, TARGET, arrived_s=time.monotonic())
        told = answered(pipeline, self.request, lambda asked: events)
        return [event async for event in told if not isinstance(event, Planned)]

    @property
    def drafter(self) -> DrafterView | None:
        """Who drafts for the answer that runs."""
        return self.drafting.drafter_of(self.request)

    async def answer(self, job: Job) -> list[Event]:
        """An answer that ends when ``ending`` is set."""

        async def events() -> AsyncGenerator[Event, None]:
            yield Accepted("r1", 9)
            yield Delta("r1", "hello")
            await self.ending.wait()
            yield Finished("r1", "stop")

        return await self.through(job, events())

    def count(self, where: str, outcome: str) -> int:
        return self.metrics.told.count((where, outcome))


def job(**fields: Any) -> Job:
    request = Generate(
        "r1", ChatPrompt([{"role": "user", "content": "hi"}]), max_tokens=fields.pop("most", 99)
    )
    return Job("m", request, **{"origin": "socket", "route": "chat", **fields})


@contextlib.asynccontextmanager
async def home_of(
    node: Node | None = None,
    machines: Sequence[DraftingMachine] = (),
    *,
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[DraftingHome]:
    partners: Any = HomePartners(node, machines, **(fields or {})) if node is not None else None  # type: ignore[arg-type]
    pool, metrics = DraftingPool(FakeEngine(facts()), FakeEngine(facts())), DrafterMetrics()
    models = FakeModels(["m"] if options.pop("missing", False) else ["m", SMALL])
    members = Members(partners.machines if partners is not None else tuple)
    drafting = AnswerDrafting(partners, members, pool, models, metrics, **{"model": SMALL, **options})
    home = DraftingHome(drafting, pool, metrics)
    try:
        async with asyncio.timeout(WITHIN_S):
            yield home
    finally:
        await drafting.close()
        assert pool.home is not None
        pool.home.close()
        pool.small.close()


# ---- on this machine -------------------------------------------------------------------------------------


async def test_both_workers_of_this_machine_get_an_end_of_one_stream() -> None:
    async with home_of() as home:
        answer = asyncio.create_task(home.answer(job()))
        assert home.pool.home is not None
        here, near = await home.pool.home.given("drafts")
        there, far = await home.pool.small.given("drafts")
        assert (here.job, here.name, here.role) == ("r1", "drafts", "connector")
        assert (there.job, there.name, there.role) == (home.pool.small.follows[0].id, "drafts", "acceptor")
        assert here.key == there.key
        # It shares the machine with the one that verifies, so it does not draft far.
        assert home.pool.small.follows[0].ahead < limits.DRAFT_AHEAD
        near.sendall(b"hello")
        assert far.recv(9) == b"hello"
        # The drafter sees the stream end, and says what it did.
        home.ending.set()
        home.pool.small.end.set()
        events = await answer
        assert [type(event) for event in events] == [Accepted, Delta, Finished]
        await home.drafting._background.finish()
        assert home.count("here", "done") == 1
        assert home.pool.used == 0


@pytest.mark.parametrize(("named", "found"), [("another", "another"), ("", SMALL), ("/etc/model", "")])
async def test_a_request_may_name_who_drafts(named: str, found: str) -> None:
    this = job()
    request = replace(this.request, speculate=Speculate(draft_model=named))
    async with home_of() as home:
        assert home.drafting._wanted(msgspec.structs.replace(this, request=request)) == found


async def test_an_engine_that_cannot_verify_drafts_gets_none() -> None:
    async with home_of() as home:
        assert home.pool.home is not None
        home.pool.home.facts = replace(
            facts(), speculation="declined: its kernels differ", speculation_width=1
        )
        home.ending.set()
        await home.answer(job())
        assert not home.pool.small.follows
        assert not home.metrics.told


async def test_an_answer_that_ends_first_lets_nobody_look_further() -> None:
    async with home_of() as home:
        home.pool.small.facts = None
        home.ending.set()
        await home.answer(job())
        await asyncio.sleep(0)
        assert not home.pool.small.streams


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [OutOfMemory("full"), EngineDied("gone"), RuntimeError("a bug")])
async def test_no_failure_reaches_the_answer(error: Any, late: bool) -> None:
    async with home_of() as home:
        home.pool.small.error, home.pool.small.late = error, late
        home.pool.small.end.set()
        answer = asyncio.create_task(home.answer(job()))
        code = getattr(error, "code", "internal_error")
        while not home.count("here", code):  # noqa: ASYNC110  (a metric)
            await asyncio.sleep(0.01)
        home.ending.set()
        assert isinstance((await answer)[-1], Finished)
        assert home.pool.used == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"missing": True}, "model_not_found"),
        ({"refusal": OutOfMemory("full")}, "out_of_memory"),
        ({"vocabulary": "cd" * 16}, "incompatible"),
        ({"vocabulary": ""}, "incompatible"),
    ],
)
async def test_who_cannot_draft_here_is_not_asked_to(changes: dict[str, Any], code: str) -> None:
    async with home_of(missing=changes.get("missing", False)) as home:
        home.pool.refusal = changes.get("refusal")
        home.pool.small.facts = facts(changes.get("vocabulary", WORDS))
        answer = asyncio.create_task(home.answer(job()))
        while not home.count("here", code):  # noqa: ASYNC110  (a metric)
            await asyncio.sleep(0.01)
        home.ending.set()
        await answer
        assert not home.pool.small.follows


async def test_no_drafter_where_none_is_wanted() -> None:
    async with home_of(model="") as home:
        assert home.drafting.begin(job(), TARGET) is None
    async with home_of() as home:
        assert home.drafting.begin(job(most=4), TARGET) is None
        for how in (Speculate(enabled=False), Speculate(sources=["lookup"])):
            this = job()
            request = replace(this.request, speculate=how)
            assert home.drafting.begin(msgspec.structs.replace(this, request=request), TARGET) is None
        home.pool.home, engine = None, home.pool.home
        assert home.drafting.begin(job(), TARGET) is None
        home.pool.home = engine
    async with home_of() as home:
        assert home.drafting.candidates(SMALL, SMALL, shareable=True) == []  # not for itself
        here = [DrafterCandidate("", "this", SMALL)]
        assert home.drafting.candidates("m", SMALL, shareable=True) == here


# ---- on another machine ----------------------------------------------------------------------------------


async def test_a_peer_drafts_over_a_stream_between_the_workers(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (node, (peer,)), home_of(node, [peer]) as home:
        answer = asyncio.create_task(home.answer(job()))
        assert home.pool.home is not None
        here, near = await home.pool.home.given("drafts")
        there, far = await peer.engine.given("drafts")
        assert (here.job, here.role) == ("r1", "connector")
        (follow,) = peer.engine.follows
        assert (there.job, there.role) == (follow.id, "acceptor")
        assert follow.id.startswith("r1.")
        assert here.key == there.key
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(near, b"hello")
        assert await loop.sock_recv(far, 9) == b"hello"
        assert home.pool.small.follows == []
        home.ending.set()
        peer.engine.end.set()
        await answer
        await home.drafting._background.finish()
        assert home.count("peer", "done") == 1
        await peer.ended("done")
        # The trace waits for what that machine tells of it, the client does not.
        (trace,) = home.traces
        assert trace.drafter is not None
        assert (trace.drafter.model, trace.drafter.machine, trace.drafter.code) == (SMALL, peer.node.name, "")
        check_steps(trace)
        drafts = [step.name for step in trace.steps if (step.machine, step.parent) == (peer.node.name, 0)]
        assert {"loaded", "agreed", "drafted"} >= {*drafts} >= {"drafted"}


async def test_when_the_answer_ends_the_peer_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that does not see its stream end."""
    monkeypatch.setattr("fleetd.requests.drafting.client._ACCOUNT_S", 0.05)
    async with fleet(tmp_path) as (node, (peer,)), home_of(node, [peer]) as home:
        answer = asyncio.create_task(home.answer(job()))
        assert home.pool.home is not None
        await home.pool.home.given("drafts")
        home.ending.set()
        await answer
        await peer.ended("cancelled")
        assert peer.engine.cancelled == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda peer: setattr(peer, "draining", True), "draining"),
        (lambda peer: setattr(peer.engine, "facts", facts("cd" * 16)), "incompatible"),
        (lambda peer: setattr(peer.engine, "error", Overloaded("busy")), "overloaded"),
        (lambda peer: setattr(peer.pool, "refusal", OutOfMemory("full")), "out_of_memory"),
        (lambda peer: setattr(peer, "card", card("x", digest="e" * 64)), "model_not_found"),
    ],
)
async def test_when_a_peer_refuses_this_machine_drafts(tmp_path: Path, change: Any, code: str) -> None:
    async with fleet(tmp_path) as (node, (peer,)), home_of(node, [peer]) as home:
        before = home.drafting.members.others("draft")  # as its card was
        home.drafting.members = Members(lambda: before)
        change(peer)
        answer = asyncio.create_task(home.answer(job()))
        await home.pool.small.given("drafts")
        assert home.count("peer", code) == 1
        home.ending.set()
        home.pool.small.end.set()
        await answer


async def test_attack_a_peer_that_says_only_that_it_is_alive_is_left_out_and_this_machine_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the machine whose card is the best would take the drafts from every answer."""
    monkeypatch.setattr(limits, "DRAFT_OFFER_S", 0.2)
    async with fleet(tmp_path) as (node, (peer,)), home_of(node, [peer]) as home:
        gone = asyncio.Event()

        async def alive(_: str, body: bytes, stream: PeerStream) -> None:
            try:
                while True:
                    stream.send(ALIVE)
                    await asyncio.sleep(0.01)
            finally:
                gone.set()

        peer.node.handle(messages.FOLLOW, alive)
        answer = asyncio.create_task(home.answer(job()))
        async with asyncio.timeout(WITHIN_S):
            await home.pool.small.given("drafts")
            await gone.wait()
        members = home.drafting.members
        assert members.left_out(peer.node_id, "draft")
        assert not members.left_out(peer.node_id, "answer"), "it may do everything else well"
        home.ending.set()
        home.pool.small.end.set()
        await answer


async def test_a_peer_that_fails_midway_leaves_the_answer_alone(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (node, (peer,)), home_of(node, [peer]) as home:
        peer.engine.error, peer.engine.late = EngineDied("gone"), True
        answer = asyncio.create_task(home.answer(job()))
        await peer.engine.given("drafts")
        peer.engine.end.set()
        await peer.ended("engine_died")
        while not home.count("peer", "engine_died"):  # noqa: ASYNC110  (a metric)
            await asyncio.sleep(0.01)
        home.ending.set()
        await answer
        assert home.pool.small.follows == []
        while not home.traces:  # noqa: ASYNC110  (a list of a callback, which announces nothing)
            await asyncio.sleep(0.01)
        (trace,) = home.traces
        assert trace.drafter is not None
        assert (trace.drafter.machine, trace.drafter.code) == (peer.node.name, "engine_died")
        assert "gone" in trace.drafter.reason


async def test_more_texts_than_one_machine_drafts_for(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (node, (peer,)):
        ask = messages.encode(messages.DraftQuestion(SMALL, DIGEST, "r", WORDS))
        streams = [node.request(peer.node_id, messages.FOLLOW, ask) for _ in range(limits.FOLLOWS + 1)]
        try:
            async with asyncio.timeout(WITHIN_S):
                for stream in streams[:-1]:
                    messages.decode(await stream.receive() or b"", messages.DraftOffer)
                with pytest.raises(Overloaded):
                    await streams[-1].receive()
        finally:
            for stream in streams:
                stream.cancel()


# ---- who is asked, and in which order --------------------------------------------------------------------


def seen(name: str, *, rtt_s: float = 0.001, running: int = 0, sees: bool = True, **model: Any) -> Any:
    return Member(replace(card(name, **model), node_id=name, running=running), name, "", sees, rtt_s)


def order(found: list[Any], where: Any = "auto", this: Job | None = None, **options: Any) -> list[str]:
    members = Members(lambda: found, **options)
    drafting = AnswerDrafting(None, members, None, FakeModels(), None, model=SMALL, where=where)  # type: ignore[arg-type]
    shareable = (this or job()).shareable
    return [candidate.name for candidate in drafting.candidates("m", SMALL, shareable=shareable)]


def test_a_near_idle_peer_with_the_model_loaded_comes_before_this_machine() -> None:
    cold, busy = seen("cold", state="installed"), seen("busy", running=1)
    far, near, nearer = seen("far", rtt_s=0.2), seen("near"), seen("nearer", rtt_s=0.0001)
    found = [cold, busy, far, near, nearer]
    assert order(found) == ["nearer", "near", "this", "cold", "far", "busy"]
    assert order(found, "peers") == ["nearer", "near", "cold", "far", "busy"]
    assert order(found, "here") == ["this"]


def test_nobody_is_sent_a_text_that_it_must_not_see() -> None:
    found = [seen("blind", sees=False), seen("unhashed", digest="")]
    assert order(found) == ["this"]
    assert order([seen("peer")], local_only=True) == ["this"]
    assert order([seen("peer")], this=job(local_only=True)) == ["this"]
    # What came from a peer was allowed to leave it.
    assert order([seen("peer")], this=job(local_only=True, origin="peer")) == ["peer", "this"]


# ---- for people ------------------------------------------------------------------------------------------


async def planned(home: DraftingHome, tokens: int = 100) -> DraftsView:
    view = await home.drafting.plan(PlanView("m", tokens, 0, []), TARGET)
    assert view.drafts is not None
    return view.drafts


async def test_a_plan_names_sources_width_and_verdict() -> None:
    verdict = "exact: blocks of up to 16 tokens"
    async with home_of(model="") as home:
        assert await planned(home) == DraftsView(verdict, ["suffix", "lookup"], 16)
        late = await planned(home, 4095)
        assert (late.sources, late.width) == ([], 1)
        assert "up to 4096 tokens of context" in late.reason
        assert home.pool.home is not None
        home.pool.home.facts = replace(facts(), speculation="declined: x", speculation_width=1)
        assert await planned(home) == DraftsView("declined: x", reason="declined: x")
        home.pool.home.facts = None
        nothing = PlanView("m", 1, 0, [])
        assert await home.drafting.plan(nothing, TARGET) == nothing


async def test_a_plan_names_who_would_draft() -> None:
    async with home_of() as home:
        home.drafting.members = Members(lambda: [seen("far", rtt_s=0.2), seen("near")])
        found = await planned(home)
        assert (found.draft_model, found.drafters) == (SMALL, ["near", "this", "far"])
        assert found.sources == ["drafter", "suffix", "lookup"]
    async with home_of(missing=True) as home:
        found = await planned(home)
        assert (found.draft_model, found.drafters, found.sources) == (SMALL, [], ["suffix", "lookup"])
    async with home_of(model="m") as home:
        assert (await planned(home)).drafters == []  # no model drafts for itself
    assert home.pool.used == 0


@pytest.mark.parametrize("state", ["installed", "loaded"])
async def test_a_plan_says_that_a_drafter_does_not_fit_beside_its_model(state: str) -> None:
    """Both decode at the same time: they cannot take turns, as a scorer and its target do."""
    async with home_of() as home:
        here = replace(card("this", state=state, memory_bytes=4_000_000_000), usable_bytes=1_500_000_000)
        home.drafting.members = Members(lambda: [seen("far", rtt_s=0.2)], lambda: here)
        found = await planned(home)
        if state == "loaded":
            assert (found.drafters, found.no_room) == (["this", "far"], "")
            return
        assert found.drafters == ["far"]
        assert found.no_room == (
            "small needs 4.0 GB beside m on this machine; 1.5 GB are free, and neither gives way."
        )
        home.drafting.members = Members(tuple, lambda: here)
        assert (await planned(home)).sources == ["suffix", "lookup"]
    assert home.pool.used == 0


async def test_a_drafter_for_hidden_states_is_not_asked_as_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of the model that it is for has it."""
    monkeypatch.setattr(client, "drafter_kind", lambda config: "dflash")
    async with home_of() as home:
        found = await planned(home)
        assert (found.draft_model, found.drafters) == ("", [])
        home.ending.set()
        await home.answer(job())
        assert home.drafter is None
        assert home.pool.used == 0
        assert home.metrics.told == []


async def test_an_answer_says_who_drafts_for_it_while_it_runs() -> None:
    async with home_of() as home:
        answer = asyncio.create_task(home.answer(job()))
        await home.pool.small.given("drafts")
        assert home.pool.home is not None
        await home.pool.home.given("drafts")
        while home.drafter is None:  # noqa: ASYNC110  (set in the turn after that)
            await asyncio.sleep(0)
        assert home.drafter == DrafterView(SMALL, "this")
        home.ending.set()
        await answer
        assert home.request.attempt.drafter == DrafterView(SMALL, "this")


async def test_an_answer_that_was_drafted_for_leaves_a_trace() -> None:
    """Also where nothing was decided about its prompt, which was too short to be shared."""
    told = Speculated(16, 8, 4, 5, 9, 0.1, {"drafter": SourceCounts(8, 4, 2)})
    async with home_of() as home:

        async def events(*, drafted: bool) -> AsyncGenerator[Event, None]:
            yield Accepted("r1", 9)
            yield Prefill("r1", 5, 9, cached=5)
            if drafted:
                while home.drafter is None:  # noqa: ASYNC110  (nothing announces it)
                    await asyncio.sleep(0.001)
            yield Delta("r1", "hello")
            yield Finished("r1", "stop", speculation=told)

        async def run(*, drafted: bool = True, model: str = SMALL) -> None:
            home.drafting._model = model
            assert len(await home.through(job(), events(drafted=drafted))) == 4

        await run(drafted=False, model="")
        await run()
    plain, trace = home.traces
    assert (plain.drafter, plain.outcome) == (None, "local")
    assert (trace.id, trace.model, trace.prompt_tokens, trace.cached_tokens) == ("r1", "m", 9, 5)
    assert (trace.outcome, trace.chosen.kind, trace.losers) == ("local", "local", [])
    assert (trace.drafter, trace.speculation) == (DrafterView(SMALL, "this"), told)
    assert trace.ttft_s is not None
    assert trace.ttft_s < WITHIN_S


# ---- on the wire -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000,
        messages.encode(messages.DraftQuestion("/etc/passwd", DIGEST, "r", WORDS)),
        messages.encode(messages.DraftQuestion("m", "D" * 64, "r", WORDS)),
        messages.encode(messages.DraftQuestion("m", DIGEST, "", WORDS)),
        messages.encode(messages.DraftQuestion("m", DIGEST, "r", "")),
        messages.encode(messages.DraftQuestion("m", DIGEST, "r", "x" * 32)),
        messages.encode(messages.DraftQuestion("m", DIGEST, "r", "a" * 65)),
        messages.encode(messages.DraftQuestion("m", DIGEST, "r", WORDS)) + bytes(limits.SHARE_MESSAGE_BYTES),
    ],
)
def test_what_no_honest_peer_asks_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(body, messages.DraftQuestion)


@pytest.mark.parametrize(
    "steps",
    [
        [StepTime("drafted", float("nan"))],
        [StepTime("drafted", -1.0)],
        [StepTime("x" * (limits.ERROR_TEXT_CHARS + 1), 1.0)],
        [StepTime("drafted", 1.0)] * 17,
    ],
)
def test_steps_that_no_honest_peer_tells_are_refused(steps: list[StepTime]) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(messages.encode(messages.DraftDone(steps=steps)), messages.DraftDone)


def test_both_ends_compare_vocabularies() -> None:
    check_vocabulary(facts(), WORDS)
    with pytest.raises(Incompatible) as refused:
        check_vocabulary(facts("cd" * 16), WORDS)
    assert refused.value.param == "vocabulary"
    with pytest.raises(EngineDied):
        check_vocabulary(None, WORDS)
