"""Vectors over machines: who computes what, what fails, what a chat is spared, and what is believed."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fault_seams import settled
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from peer_streams import RequestPipe
from vector_fakes import (
    DIGEST,
    MODEL,
    WIDTH,
    EncoderFolder,
    Locator,
    VectorPool,
    answers,
    card,
    embed_job,
    in_order,
    rerank_job,
    score,
    vector,
)

from fleetd import limits
from fleetd.control.prefill_trace import MachineTexts, TextsWork, Trace
from fleetd.engine.protocol import EmbedTexts, Finished, Loading, RerankTexts, TextsEmbedded, TextsReranked
from fleetd.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDied,
    FleetError,
    ModelNotFound,
    ModelUnsupported,
    Overloaded,
    PeerLost,
    ProtocolError,
)
from fleetd.models.purposes import check_purpose
from fleetd.p2p.membership.cards import Card
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.admission import ServingContext
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Member, Members, SentRequests
from fleetd.requests.metrics import Metrics
from fleetd.requests.vectors import messages
from fleetd.requests.vectors.job import LongJob, MachineRun, TextsDone, VectorJob
from fleetd.requests.vectors.machines import EncoderModel, VectorMachines
from fleetd.requests.vectors.messages import TextsRequest, VectorPart, texts_of
from fleetd.requests.vectors.part_answer import PartAnswer, floats
from fleetd.requests.vectors.parts import Unclaimed, VectorMachine, shares
from fleetd.requests.vectors.record import VectorRecord
from fleetd.requests.vectors.server import VectorServer
from fleetd.requests.vectors.service import VectorService, _GivenPart, _Spread

TEXTS = [f"text {n} " + "word " * (n % 40) for n in range(600)]
WANTED = [vector(text) for text in TEXTS]


class NoLedger(Ledger):
    """Rows as they end."""

    def __init__(self) -> None:
        self.settled: list[int] = []
        self.refunded: list[str] = []

    async def reserve(self, row: Any) -> None: ...

    def settle(self, row: Any, usage: Any, timings: Any, reason: str, **_: Any) -> None:
        self.settled.append(usage.prompt_tokens)

    def refund(self, row: Any, reason: str) -> None:
        self.refunded.append(reason)


@dataclass
class Fleet:
    """This machine and others, each with a pool of its own; their servers answer as real ones do."""

    here: VectorPool | None = field(default_factory=VectorPool)
    others: dict[str, VectorPool] = field(default_factory=dict)
    cards: dict[str, Card] = field(default_factory=dict)
    purpose: Any = "embedding"
    pipes: list[RequestPipe] = field(default_factory=list)
    ledger: NoLedger = field(default_factory=NoLedger)
    serve: Callable[[str, Any, bytes], Any] | None = None
    chatting: dict[str, bool] = field(default_factory=dict)
    draining: bool = False
    metrics: Metrics = field(default_factory=lambda: Metrics("0"))
    traces: list[Trace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = card("here")
        self.members = Members(self._listed, lambda: self.own)
        self.members.requests_at = lambda node_id: SentRequests(int(self.chatting.get(node_id, False)))
        folder = EncoderFolder(purpose=self.purpose) if self.here is not None else None
        locator: Any = Locator(folder)
        pool: Any = self.here or VectorPool()
        self.machines = VectorMachines(pool, locator, self.members)
        self.service = VectorService(
            pool,
            locator,
            self.machines,
            self.ledger,  # type: ignore[arg-type]
            self.metrics,
            self._request,  # type: ignore[arg-type]
            record=self.traces.append,
            name="desk",
            draining=lambda: self.draining,
            failed=lambda node_id, error, model: self.members.failed(node_id, "vectors", error, model),
        )

    def _listed(self) -> list[Member]:
        return [Member(self.cards.get(name) or card(name), name, bytes_per_s=1e8) for name in self.others]

    def _request(self, node_id: str, method: str, body: bytes) -> RequestPipe:
        assert method == messages.VECTORS
        server = VectorServer(self.others[node_id], context(), self.ledger)  # type: ignore[arg-type]
        serve = self.serve
        work = (lambda pipe: serve(node_id, pipe, body)) if serve else lambda pipe: server("p", body, pipe)
        self.pipes.append(RequestPipe(work))
        return self.pipes[-1]

    async def run(self, job: VectorJob) -> list[TextsDone]:
        async with asyncio.timeout(60), aclosing(self.service.run(job)) as steps:
            return [step async for step in steps if isinstance(step, TextsDone)]


@dataclass
class Store:
    name: str = MODEL

    def resolve(self, ref: str) -> EncoderFolder:
        return EncoderFolder(ref)


def context(own: Card | None = None) -> ServingContext:
    return ServingContext(Store(), lambda: own or card("x"), lambda: False)  # type: ignore[arg-type]


# ---- the parts ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=600),
    st.lists(st.floats(1, 5000), min_size=1),
    st.data(),
)
def test_every_text_is_in_just_one_part_whatever_comes_back(
    tokens: list[int], sizes: list[float], data: st.DataObject
) -> None:
    left, done = Unclaimed(tokens), set[int]()
    for turn in range(10_000):
        if not left:
            break
        part = left.take(sizes[turn % len(sizes)])
        assert 0 < len(part) <= limits.VECTOR_PART_TEXTS
        assert done.isdisjoint(part)
        assert [tokens[text] for text in part] == sorted((tokens[text] for text in part), reverse=True)
        if turn < 20 and data.draw(st.booleans()):
            left.give_back(part)
        else:
            done |= set(part)
        assert left.tokens == sum(tokens[n] for n in range(len(tokens)) if n not in done)
    assert done == set(range(len(tokens)))


def machine(node_id: str, tok_s: float = 1000.0, **fields: Any) -> VectorMachine:
    return VectorMachine(node_id, node_id, tok_s, **fields)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_part_that_compiles_kernels_says_nothing_of_a_machines_speed(*, compiles: bool) -> None:
    machines = VectorMachines(None, None, None)  # type: ignore[arg-type]
    for seconds in (50.0, 0.5):
        machines.learn(machine("spark", compiles=compiles), EncoderModel("e", "d"), 500, seconds)
    (known,) = machines._tok_s.values()
    assert (known == 1000.0) == compiles


def named(found: list[Any]) -> list[str]:
    return [share.machine.node_id for share in found]


def test_a_machine_joins_only_if_the_end_comes_sooner_with_it() -> None:
    here, there = machine(THIS_NODE), machine("a", load_s=5.0)
    assert named(shares([here, there], frozenset(), 3000)) == [THIS_NODE]
    assert named(shares([here, there], frozenset(), 60_000)) == [THIS_NODE, "a"]
    assert named(shares([here, there], frozenset({THIS_NODE}), 60_000)) == ["a"]


def test_the_machine_that_would_end_first_gets_a_short_request() -> None:
    here, there = machine(THIS_NODE, load_s=3.0), machine("a", rtt_s=0.01)
    assert named(shares([here, there], frozenset(), 20)) == ["a"]
    assert named(shares([replace(here, load_s=0.0), there], frozenset(), 20)) == [THIS_NODE]


def test_a_fast_machine_gets_larger_parts_and_the_last_ones_are_small() -> None:
    slow, fast = machine("slow", 1000.0), machine("fast", 4000.0)
    sizes = {share.machine.node_id: share.tokens for share in shares([slow, fast], frozenset(), 1_000_000)}
    assert sizes["fast"] == 4 * sizes["slow"]
    near = {share.machine.node_id: share.tokens for share in shares([slow, fast], frozenset(), 3000)}
    assert near["fast"] < sizes["fast"]


def test_a_machine_that_chats_gets_a_small_part_only_if_no_other_works_and_then_rests() -> None:
    chats, idle = machine(THIS_NODE, chats=True), machine("a")
    assert named(shares([chats, idle], frozenset(), 100_000)) == ["a"]
    assert shares([chats], frozenset({"a"}), 100_000) == []
    (only,) = shares([chats], frozenset(), 100_000)
    assert only.tokens == limits.VECTOR_CHAT_PART_S * 1000.0
    assert shares([replace(chats, rests=True)], frozenset(), 100_000) == []


def test_a_machine_that_has_much_to_do_already_gets_less_of_what_comes() -> None:
    here, there = machine(THIS_NODE), machine("a", rtt_s=0.01)
    assert named(shares([here, there], frozenset(), 20)) == [THIS_NODE]
    assert named(shares([replace(here, queued=100.0), there], frozenset(), 20)) == ["a"]
    full = replace(there, full=True)
    assert named(shares([replace(here, queued=100.0), full], frozenset(), 20)) == [THIS_NODE]
    assert shares([full], frozenset(), 20) == []
    chats = machine(THIS_NODE, chats=True)
    assert named(shares([replace(chats, queued=20.0)], frozenset(), 20)) == [THIS_NODE]
    assert shares([replace(chats, queued=1000.0)], frozenset(), 20) == []


# ---- one request -------------------------------------------------------------------------------------------


async def test_one_machine_finds_a_vector_for_each_text_in_any_order() -> None:
    fleet = Fleet()
    job = embed_job(TEXTS)
    parts = await fleet.run(job)
    assert in_order(parts) == WANTED
    assert (job.plan, job.exactness, job.width) == ("local; nodes=this", "exact", WIDTH)
    assert fleet.ledger.settled == [job.tokens]
    lengths = [len(text) // 4 for text in fleet.here.texts]  # type: ignore[union-attr]
    assert lengths == sorted(lengths, reverse=True)


async def test_two_machines_find_the_same_bytes_as_one() -> None:
    fleet = Fleet(others={"a": VectorPool(), "b": VectorPool()})
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    kind, _, nodes = job.plan.partition("; nodes=")
    # In the order in which they had something.
    assert (kind, set(nodes.split(","))) == ("spread", {"this", "a", "b"})
    assert job.exactness == "exact"
    assert all(pool.texts for pool in fleet.others.values())
    every = [*fleet.here.texts, *fleet.others["a"].texts, *fleet.others["b"].texts]  # type: ignore[union-attr]
    assert sorted(every) == sorted(TEXTS)


async def test_vectors_that_must_be_exact_come_of_machines_of_one_kind() -> None:
    others = {"a": VectorPool(), "b": VectorPool()}
    fleet = Fleet(others=others, cards={"a": card("a", chip="M1")})
    job = embed_job(TEXTS, exact=True)
    assert in_order(await fleet.run(job)) == WANTED
    kind, _, nodes = job.plan.partition("; nodes=")
    assert (kind, set(nodes.split(",")), job.exactness) == ("spread", {"this", "b"}, "exact")
    assert not others["a"].texts


async def test_exact_vectors_of_one_other_machine_need_no_machine_like_this_one() -> None:
    fleet = Fleet(here=None, others={"a": VectorPool()}, cards={"a": card("a", chip="M1")})
    job = embed_job(TEXTS, exact=True)
    assert in_order(await fleet.run(job)) == WANTED
    assert (job.plan, job.exactness) == ("remote; nodes=a", "exact")


@pytest.mark.parametrize("exact", [False, True])
async def test_vectors_that_this_machine_would_compute_otherwise_are_not_called_exact(exact: bool) -> None:
    fleet = Fleet(
        here=VectorPool(trouble=Overloaded("full")),
        others={"a": VectorPool()},
        cards={"a": card("a", chip="M1")},
    )
    job = embed_job(TEXTS, exact=exact)
    if exact:
        with pytest.raises(Overloaded):
            await fleet.run(job)
        assert not fleet.others["a"].texts
        return
    assert in_order(await fleet.run(job)) == WANTED
    assert (job.plan, job.exactness) == ("remote; nodes=a", "equivalent")


def test_the_load_of_one_machine_is_no_other_machine_s() -> None:
    """A machine that had its model would count as having computed its part in no time."""
    service, job = Fleet().service, embed_job(TEXTS)
    loads, computes = (_GivenPart(machine(name), (0,), 1, begun_s=5.0) for name in "ab")
    job.ran = {part.machine.node_id: MachineRun(part.machine, 5.0) for part in (loads, computes)}
    spread = _Spread(job, VectorRecord(job, "desk", 0.0, 5.0), EncoderModel(MODEL), Unclaimed([]))
    service._loads(spread, loads, Loading("reading"))
    service._loads(spread, computes, None)
    assert computes.loaded_s is None
    assert job.loading is not None
    service._loads(spread, loads, None)
    assert [run.loaded_s > 0 for run in job.ran.values()] == [True, False]
    assert loads.loaded_s is not None
    assert job.loading is None


async def test_a_machine_with_another_chip_makes_it_equivalent() -> None:
    fleet = Fleet(others={"a": VectorPool()}, cards={"a": card("a", chip="M1")})
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    assert job.exactness == "equivalent"


async def test_documents_are_scored_by_all_machines_as_by_one() -> None:
    documents = ["a red fox", "two blue cats", "a red cat", *TEXTS]
    fleet = Fleet(others={"a": VectorPool()}, purpose="rerank", cards={"a": card("a", purpose="rerank")})
    found = in_order(await fleet.run(rerank_job("red cat", documents)))
    assert found == [score("red cat", document) for document in documents]
    assert fleet.others["a"].texts


@pytest.mark.parametrize("trouble", [EngineDied("gone"), Overloaded("full"), PeerLost("silent")])
async def test_the_part_of_a_machine_that_fails_goes_to_another(trouble: FleetError) -> None:
    fleet = Fleet(others={"a": VectorPool(trouble=trouble)})
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    assert len(fleet.others["a"].asked) == 1
    assert job.plan == "local; nodes=this"


async def test_a_machine_that_dies_in_the_middle_has_done_what_it_has_done() -> None:
    pool, here = VectorPool(), VectorPool(gate=asyncio.Event())

    def dies(request: Any) -> None:
        if len(pool.asked) == 2:
            pool.trouble = PeerLost("gone")
            here.gate.set()  # type: ignore[union-attr]

    pool.on_ask = dies
    fleet = Fleet(here=here, others={"a": pool})
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    assert job.plan == "spread; nodes=a,this"
    assert len(pool.asked) == 2


async def test_a_request_without_a_machine_left_has_the_last_machines_error() -> None:
    fleet = Fleet(here=None, others={"a": VectorPool(trouble=EngineDied("It died."))})
    with pytest.raises(EngineDied, match="a: It died"):
        await fleet.run(embed_job(TEXTS))
    assert "engine_died" in fleet.ledger.refunded


async def test_a_request_that_is_wrong_is_refused_at_once() -> None:
    fleet = Fleet(here=VectorPool(trouble=ContextLengthExceeded("700 tokens")))
    with pytest.raises(ContextLengthExceeded):
        await fleet.run(embed_job(TEXTS))
    assert len(fleet.here.asked) == 1  # type: ignore[union-attr]


async def test_a_client_that_leaves_ends_all_parts() -> None:
    gate = asyncio.Event()
    fleet = Fleet(here=VectorPool(gate=gate), others={"a": VectorPool(gate=gate)})

    async def read() -> None:
        async with aclosing(fleet.service.run(embed_job(TEXTS))) as steps:
            async for _ in steps:
                pass

    reading = asyncio.create_task(read())
    async with asyncio.timeout(60):
        await fleet.here.begun.wait()  # type: ignore[union-attr]
        await fleet.others["a"].begun.wait()
        reading.cancel()
        await asyncio.wait({reading})
        assert fleet.here.cancelled == 1  # type: ignore[union-attr]
        assert fleet.pipes[0].cancelled
        await fleet.others["a"].left.wait()
    await settled(lambda: fleet.ledger.refunded.count("cancelled") == 2, "both rows are closed")
    assert fleet.service.running() == []


async def test_a_client_that_leaves_as_a_part_ends_that_it_waited_for_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11's ``wait_for`` lost the cancellation, and the job went on."""
    service = Fleet(here=VectorPool()).service
    monkeypatch.setattr(service, "_able", lambda spread: [machine("a")])
    # More turns of the loop than it takes until the end of a part is known.
    for turns in range(6):
        waiting = asyncio.create_task(service._wait_for_machine(cast("Any", None)))
        await asyncio.sleep(0)
        service._part_over.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            await asyncio.wait([waiting])
            assert waiting.cancelled()
        service._part_over = asyncio.Event()


async def test_a_model_that_only_another_machine_has_is_asked_there() -> None:
    fleet = Fleet(here=None, others={"a": VectorPool()})
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    assert job.plan == "remote; nodes=a"


async def test_texts_that_must_stay_do_not_leave() -> None:
    fleet = Fleet(others={"a": VectorPool()})
    assert in_order(await fleet.run(embed_job(TEXTS, local_only=True))) == WANTED
    assert not fleet.others["a"].asked
    with pytest.raises(ModelNotFound):
        await Fleet(here=None, others={"a": VectorPool()}).run(embed_job(TEXTS, local_only=True))


async def test_other_files_of_the_same_name_are_not_asked() -> None:
    other = card("a")
    other = replace(other, models=[replace(other.models[0], digest="f" * 64)])
    fleet = Fleet(others={"a": VectorPool()}, cards={"a": other})
    await fleet.run(embed_job(TEXTS))
    assert not fleet.others["a"].asked


async def test_a_machine_that_answers_a_chat_computes_nothing_while_another_can() -> None:
    fleet = Fleet(others={"a": VectorPool()}, chatting={THIS_NODE: True})
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    assert job.plan == "remote; nodes=a"
    fleet = Fleet(others={"a": VectorPool()}, cards={"a": card("a", running=1)})
    job = embed_job(TEXTS)
    await fleet.run(job)
    assert job.plan == "local; nodes=this"


async def test_a_question_of_one_text_goes_before_a_corpus_and_beside_a_chat_at_once() -> None:
    fleet = Fleet(chatting={THIS_NODE: True})
    assert in_order(await fleet.run(embed_job(["one question"]))) == [vector("one question")]
    await Fleet().run(embed_job(TEXTS))
    assert not fleet.here.asked[0].background  # type: ignore[union-attr]
    fleet = Fleet()
    await fleet.run(embed_job(TEXTS))
    assert all(request.background for request in fleet.here.asked)  # type: ignore[union-attr]


async def test_a_load_is_told_and_its_time_is_no_speed() -> None:
    fleet = Fleet(here=VectorPool(loaded=False))
    job = embed_job(TEXTS[:2])
    async with aclosing(fleet.service.run(job)) as steps:
        async for _ in steps:
            pass
    assert job.load_s > 0


async def test_requests_beyond_the_limit_and_while_draining_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "VECTOR_JOBS_WAITING", -limits.VECTOR_JOBS)
    with pytest.raises(Overloaded):
        await Fleet().run(embed_job(TEXTS))
    monkeypatch.undo()
    monkeypatch.setattr(limits, "VECTOR_HELD_CHARS", 100)
    fleet = Fleet(here=VectorPool(gate=asyncio.Event()))
    assert fleet.here is not None
    assert fleet.here.gate is not None
    # One alone may be larger than what several may hold.
    alone = asyncio.create_task(fleet.run(embed_job(TEXTS[:60])))
    await fleet.here.begun.wait()
    with pytest.raises(Overloaded, match="characters"):
        await fleet.run(embed_job(TEXTS[:1]))
    fleet.here.gate.set()
    assert in_order(await alone) == WANTED[:60]
    assert in_order(await fleet.run(embed_job(TEXTS[:1]))) == WANTED[:1]
    with pytest.raises(Draining):
        await Fleet(draining=True).run(embed_job(TEXTS))


async def test_more_than_are_computed_at_once_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may ask for each text of a document by itself, for all of them at once."""
    monkeypatch.setattr(limits, "VECTOR_JOBS", 3)
    pool = VectorPool(gate=asyncio.Event())
    fleet = Fleet(here=pool)
    asked = [asyncio.create_task(fleet.run(embed_job([text]))) for text in TEXTS[:40]]
    # Folders are looked at in threads, which take their time.
    await settled(lambda: len(pool.asked) >= 3 and len(fleet.service.running()) == 40, "all are here")
    assert len(pool.asked) == 3
    assert [each.stage for each in fleet.service.running()].count("") == 37
    assert pool.gate is not None
    pool.gate.set()
    found = [in_order(await each) for each in asked]
    assert [each for (each,) in found] == WANTED[:40]
    assert fleet.service.running() == []


async def test_requests_of_one_text_are_spread_over_machines_by_their_speed() -> None:
    """As programs send them: each text of a document in a request of its own, all of them at once."""
    gate = asyncio.Event()
    quick, slow = VectorPool(gate=gate), VectorPool(gate=gate)
    fleet = Fleet(here=VectorPool(gate=gate), others={"quick": quick, "slow": slow})
    here = fleet.here
    assert here is not None
    for name, tok_s in ((THIS_NODE, 1000.0), ("quick", 500.0), ("slow", 100.0)):
        fleet.machines._tok_s[name, DIGEST] = tok_s
    texts = [f"{'word ' * 20}{n}" for n in range(16)]
    pools, given = (here, quick, slow), asyncio.Event()

    def asks(request: TextsRequest) -> None:
        if sum(len(pool.asked) for pool in pools) == len(texts):
            given.set()

    for pool in pools:
        pool.on_ask = asks
    jobs = [embed_job([text]) for text in texts]
    asked = [asyncio.create_task(fleet.run(job)) for job in jobs]
    await given.wait()
    assert [len(pool.asked) for pool in pools] == [10, 5, 1]
    gate.set()
    assert [in_order(await each) for each in asked] == [[vector(text)] for text in texts]
    assert {job.plan for job in jobs} == {"local; nodes=this", "remote; nodes=quick", "remote; nodes=slow"}
    assert {job.exactness for job in jobs} == {"exact"}
    assert not any(fleet.machines._given_tokens.values())
    assert not any(fleet.machines._given_parts.values())


async def test_one_other_machine_is_given_no_more_parts_than_it_takes() -> None:
    pool = VectorPool(gate=asyncio.Event())
    fleet = Fleet(here=None, others={"a": pool})
    jobs = [embed_job([text]) for text in TEXTS[:40]]
    asked = [asyncio.create_task(fleet.run(job)) for job in jobs]
    most = limits.VECTOR_PARTS_GIVEN
    await settled(lambda: len(pool.asked) >= most and len(fleet.service.running()) == 40, "all are here")
    assert len(pool.asked) == most
    assert pool.gate is not None
    pool.gate.set()
    assert [found for each in asked for found in in_order(await each)] == WANTED[:40]
    assert not any(job.lost for job in jobs)
    # They waited for a machine, not for a chat.
    assert not any(step.name == "left to chats" for trace in fleet.traces for step in trace.steps)


# ---- what is written down ----------------------------------------------------------------------------------


def scraped(fleet: Fleet, name: str) -> list[str]:
    """The lines of a series."""
    lines = fleet.metrics.render()[0].decode().splitlines()
    return [line for line in lines if line.startswith(name)]


async def test_a_trace_says_which_machine_computed_what() -> None:
    fleet = Fleet(others={"a": VectorPool()})
    job = embed_job(TEXTS, client="notes")
    await fleet.run(job)
    (trace,) = fleet.traces
    assert (trace.id, trace.model, trace.outcome, trace.exactness) == ("v1", MODEL, "spread", job.exactness)
    assert (trace.client, trace.machine, trace.chosen.kind) == ("notes", "desk", "spread")
    assert set(trace.chosen.nodes) == {"this", "a"}
    work = trace.texts
    assert work is not None
    assert (work.route, work.texts, trace.prompt_tokens) == ("embeddings", len(TEXTS), job.tokens)
    assert {each.name for each in work.machines} == {"this", "a"}
    assert sum(each.texts for each in work.machines) == len(TEXTS)
    assert sum(each.tokens for each in work.machines) == job.tokens
    assert all(each.parts and each.computed_s for each in work.machines)
    computed = {step.machine: step for step in trace.steps if step.name == "computed"}
    assert set(computed) == {"desk", "a"}
    phases = [step for step in trace.steps[1:] if step.name in ("waiting", "loading", "reading")]
    assert sum(step.seconds for step in phases) == pytest.approx(trace.took_s)
    assert f"{len(TEXTS)} texts" in trace.summary
    assert "by 2 machines" in trace.summary
    assert scraped(fleet, "fleetd_texts_total") == [f'fleetd_texts_total{{model_name="{MODEL}"}} 600.0']
    assert scraped(fleet, "fleetd_plan_total") == ['fleetd_plan_total{kind="spread",reason="only"} 1.0']
    assert scraped(fleet, "vllm:request_success_total")[0].endswith(" 1.0")
    assert scraped(fleet, "vllm:prompt_tokens_total")[0].endswith(f" {float(job.tokens)}")
    # No prefix cache was asked.
    assert scraped(fleet, "vllm:prefix_cache_queries_total") == []
    assert scraped(fleet, "vllm:num_requests_running") == [
        f'vllm:num_requests_running{{model_name="{MODEL}"}} 0.0'
    ]


async def test_the_requests_of_a_long_job_are_one_row_with_its_progress() -> None:
    fleet = Fleet(others={"a": VectorPool()})
    of, most = LongJob("0123456789abcdef", 900), 0
    for texts in (TEXTS[:300], TEXTS[300:], TEXTS[:300]):
        job = embed_job(texts)
        job.part_of = of
        async with aclosing(fleet.service.run(job)) as parts:
            async for _ in parts:
                (running,) = fleet.service.running()
                assert (running.id, running.total) == ("v1-0123456789abcdef", 900)
                assert running.done > most
                most = running.done
    assert most == 900
    assert len({(trace.id, trace.at_s) for trace in fleet.traces}) == 1
    assert [trace.texts.texts for trace in fleet.traces if trace.texts] == [300, 600, 900]
    last = fleet.traces[-1]
    assert last.outcome == "spread"
    assert last.texts is not None
    assert sum(each.texts for each in last.texts.machines) == 900
    assert last.prompt_tokens == sum(each.tokens for each in last.texts.machines) > 0
    assert last.took_s >= fleet.traces[0].took_s
    # Each request stays one of the accounts and of the metrics.
    assert sum(fleet.ledger.settled[-3:]) < 2 * last.prompt_tokens


async def test_two_requests_of_a_long_job_at_once_and_those_of_others_do_not_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "VECTOR_LONG_JOBS", 1)
    fleet = Fleet()

    def asked(name: str, client: str = "") -> VectorJob:
        job = embed_job(TEXTS[:100])
        job.part_of, job.client = LongJob(name), client
        return job

    await asyncio.gather(fleet.run(asked("one")), fleet.run(asked("one")))
    assert [trace.texts.texts for trace in fleet.traces if trace.texts] == [100, 100]
    await fleet.run(asked("one", "another"))
    assert [trace.texts.texts for trace in fleet.traces if trace.texts] == [100, 100, 100]
    # As many as are known wait for their next request.
    await fleet.run(asked("two"))
    assert list(fleet.service._long) == [("", "two")]


async def test_a_trace_names_the_machine_that_failed_and_who_did_its_part() -> None:
    fleet = Fleet(others={"a": VectorPool(trouble=EngineDied("It died."))})
    await fleet.run(embed_job(TEXTS))
    (trace,) = fleet.traces
    assert (trace.outcome, trace.code) == ("local", "engine_died")
    assert trace.texts is not None
    lost = {each.name: each for each in trace.texts.machines}["a"]
    assert (lost.texts, lost.code) == (0, "engine_died")
    assert scraped(fleet, "fleetd_plan_total") == ['fleetd_plan_total{kind="local",reason="fallback"} 1.0']


async def test_a_load_and_the_time_beside_a_chat_are_steps_of_their_own() -> None:
    fleet = Fleet(here=VectorPool(loaded=False))
    await fleet.run(embed_job(TEXTS[:2]))
    steps = [step.name for step in fleet.traces[0].steps[1:]]
    assert sorted(steps) == ["computed", "loaded", "loading", "reading", "waiting"]
    beside = Fleet(chatting={THIS_NODE: True})
    await beside.run(embed_job([text * 40 for text in TEXTS[:40]]))
    (left,) = [step for step in beside.traces[0].steps if step.name == "left to chats"]
    assert 0 < left.seconds <= beside.traces[0].took_s  # type: ignore[operator]


async def test_a_request_that_fails_or_is_left_has_a_trace() -> None:
    fleet = Fleet(here=None)
    with pytest.raises(ModelNotFound):
        await fleet.run(embed_job(TEXTS[:2]))
    (trace,) = fleet.traces
    assert (trace.outcome, trace.code, trace.texts) == (
        "failed",
        "model_not_found",
        TextsWork("embeddings", 2),
    )
    assert trace.summary.startswith("Failed after")
    assert scraped(fleet, "fleetd_request_failures_total")
    pool = VectorPool(gate=asyncio.Event())
    left = Fleet(here=pool, purpose="rerank")
    asking = asyncio.create_task(left.run(rerank_job("q", ["a", "b"])))
    await pool.begun.wait()
    (shown,) = left.service.running()
    assert (shown.route, shown.total, shown.done) == ("rerank", 2, 0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (trace,) = left.traces
    assert trace.outcome == "cancelled"
    assert trace.texts == TextsWork("rerank", 2, [MachineTexts("this")])
    assert "0 of 2 documents" in trace.summary


@pytest.mark.parametrize("purpose", ["chat", "rerank"])
async def test_a_model_for_something_else_is_refused_by_name(purpose: Any) -> None:
    with pytest.raises(ModelUnsupported, match="minilm"):
        await Fleet(purpose=purpose).run(embed_job(TEXTS))
    elsewhere = Fleet(here=None, others={"a": VectorPool()}, cards={"a": card("a", purpose=purpose)})
    with pytest.raises(ModelUnsupported, match="minilm"):
        await elsewhere.run(embed_job(TEXTS))


async def test_a_chat_model_of_the_catalog_is_not_fetched_for_vectors() -> None:
    job = VectorJob("v", "smollm2-135m", EmbedTexts("v", ["one"]))
    with pytest.raises(ModelUnsupported, match="smollm2-135m answers chats"):
        await Fleet(here=None).run(job)


def test_a_refusal_says_where_the_model_is_asked() -> None:
    with pytest.raises(ModelUnsupported) as refused:
        check_purpose("minilm", "embedding", "chat")
    assert "/v1/embeddings" in refused.value.hint
    check_purpose("qwen", "chat", "chat")


# ---- what another machine may say and ask -----------------------------------------------------------------


def lied(event: TextsEmbedded) -> list[TextsEmbedded]:
    """Answers that no honest machine gives."""
    nan = struct.pack("<f", math.nan) + event.vectors[4:]
    return [
        replace(event, tokens=event.tokens[:1], vectors=event.vectors[: 4 * WIDTH]),
        replace(event, width=WIDTH + 1),
        replace(event, width=0),
        replace(event, vectors=event.vectors[:-1]),
        replace(event, vectors=nan),
        replace(event, tokens=[]),
        replace(event, tokens=event.tokens * 99, vectors=event.vectors * 99),
    ]


ONE = answers(EmbedTexts("v", ["one", "two"]))[1]
assert isinstance(ONE, TextsEmbedded)


@pytest.mark.parametrize("lie", lied(ONE), ids=range(len(lied(ONE))))
def test_vectors_that_cannot_be_are_refused(lie: TextsEmbedded) -> None:
    with pytest.raises(ProtocolError):
        PartAnswer(EmbedTexts("v", ["one", "two"]), WIDTH).feed(lie)


def test_scores_are_those_of_the_documents() -> None:
    answer = PartAnswer(RerankTexts("v", "q", ["one", "two"]))
    with pytest.raises(ProtocolError):
        answer.feed(TextsReranked("v", [0.5], [3, 3]))
    with pytest.raises(ProtocolError):
        answer.feed(ONE)  # type: ignore[arg-type]
    answer.feed(TextsReranked("v", [0.5, 1.0], [3, 3]))
    assert answer.whole
    with pytest.raises(ProtocolError, match="twice"):
        answer.feed(TextsReranked("v", [0.5, 1.0], [3, 3]))


def test_floats_are_those_of_the_bytes() -> None:
    assert floats(struct.pack("<2f", 0.5, -2.0)).tolist() == [0.5, -2.0]


@pytest.mark.parametrize("lie", lied(ONE), ids=range(len(lied(ONE))))
async def test_a_machine_that_lies_is_not_believed_and_its_texts_are_computed_elsewhere(
    lie: TextsEmbedded,
) -> None:
    async def serve(node_id: str, pipe: RequestPipe, body: bytes) -> None:
        pipe.send(messages.encode(lie))
        pipe.send(messages.encode(Finished("x", "stop")))

    fleet = Fleet(others={"a": VectorPool()}, serve=serve)
    job = embed_job(TEXTS)
    assert in_order(await fleet.run(job)) == WANTED
    assert job.plan == "local; nodes=this"
    assert len(fleet.pipes) == 1


async def test_a_machine_that_ends_early_is_not_believed() -> None:
    async def serve(node_id: str, pipe: RequestPipe, body: bytes) -> None:
        pipe.send(messages.encode(Loading("reading")))
        pipe.send(messages.encode(Finished("x", "stop")))

    fleet = Fleet(others={"a": VectorPool()}, serve=serve)
    assert in_order(await fleet.run(embed_job(TEXTS))) == WANTED


def part(**fields: Any) -> bytes:
    request = EmbedTexts("v", **{"texts": ["one"], **fields})
    return messages.encode(VectorPart(MODEL, DIGEST, request))


@pytest.mark.parametrize("texts", [[], ["x"] * (limits.VECTOR_PART_TEXTS + 1)])
def test_a_part_without_texts_or_with_too_many_is_refused(texts: list[str]) -> None:
    with pytest.raises(ProtocolError):
        messages.decode_part(part(texts=texts))


def test_a_part_names_a_model_and_no_path() -> None:
    bad = messages.encode(VectorPart("/etc/passwd", DIGEST, EmbedTexts("v", ["one"])))
    with pytest.raises(ProtocolError):
        messages.decode_part(bad)


async def test_a_machine_that_answers_a_chat_takes_no_part() -> None:
    pool = VectorPool()
    server = VectorServer(pool, context(), NoLedger(), chats=lambda: True)  # type: ignore[arg-type]
    with pytest.raises(Overloaded):
        await server("p", part(), None)  # type: ignore[arg-type]
    assert not pool.asked


async def test_files_that_the_card_does_not_show_are_not_served() -> None:
    server = VectorServer(VectorPool(), context(Card("x", 1, 1)), NoLedger())  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound):
        await server("p", part(), None)  # type: ignore[arg-type]


async def test_what_is_served_waits_behind_the_machines_own_work_under_an_id_of_its_own() -> None:
    pool, ledger = VectorPool(), NoLedger()
    server = VectorServer(pool, context(), ledger)  # type: ignore[arg-type]
    pipe = RequestPipe(lambda stream: server("p", part(texts=["one", "two"]), stream))
    said = []
    while (body := await pipe.receive()) is not None:
        said.append(messages.decode_event(body))
    assert isinstance(said[-1], Finished)
    (asked,) = pool.asked
    assert asked.background
    assert asked.id != "v"
    assert texts_of(asked) == ["one", "two"]
    assert ledger.settled == [2]
