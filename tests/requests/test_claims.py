"""A machine that claims any speed gets no more work than its hardware and its answers earn it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from fakes import FakeModels, FakePool, answer
from hypothesis import given
from hypothesis import strategies as st
from member_cards import FACTS, MODEL, OWN, machine, spoken
from msgspec.structs import replace
from nested_fields import changed
from peer_streams import FakeOthers, FakeStream, OnlyAlive
from runners import runner_over

from fleetd import limits
from fleetd.engine.protocol import Accepted, Generate, Prefill, TextPrompt
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    DiskFull,
    Draining,
    FleetError,
    Forbidden,
    ModelCorrupt,
    ModelNotFound,
    ModelRefused,
    ModelUnsupported,
    OutOfMemory,
    Overloaded,
)
from fleetd.models.model_names import ModelNames
from fleetd.p2p.membership.cards import Card, MachineFacts
from fleetd.plan import chip_speeds
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.speed_corrections import CHANGED, MOST, MOST_SEEN
from fleetd.requests.drafting import drafters
from fleetd.requests.job import Job
from fleetd.requests.ledger import Ledger, Reservation
from fleetd.requests.members import claims
from fleetd.requests.members.members import Member, Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.placement import AnswerTokens, Placement, Placer, WantedModel
from fleetd.requests.placement.planner_facts import speed_of
from fleetd.requests.remote import messages
from fleetd.requests.remote.answer_deadline import AnswerDeadline
from fleetd.requests.runner import RequestRunner
from fleetd.storage.store import Store

INFINITE = 1e12  # the most that a card may say
KINDS = [
    MachineFacts(chip="Apple M1", cores=8, accelerator="metal"),
    MachineFacts(chip="Apple M5 Max", cores=18, accelerator="metal"),
    MachineFacts(chip="Apple M9 Ultra", cores=40, accelerator="metal"),
    MachineFacts(chip="NVIDIA GB10", cores=20, accelerator="cuda"),
    MachineFacts(chip="NVIDIA H200", cores=64, accelerator="cuda"),
    MachineFacts(chip="", cores=4, accelerator="cpu"),
    MachineFacts(chip="unheard of", cores=1 << 40, accelerator="cpu"),
    MachineFacts(),
]


def card(facts: MachineFacts, **model: Any) -> Card:
    return Card("liar", 1, 1, name="liar", machine=facts, models=[changed(MODEL, **model)])


# ---- what is possible ------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", KINDS, ids=lambda facts: f"{facts.accelerator} {facts.chip}")
@pytest.mark.parametrize("claim", [1e9, INFINITE])
def test_attack_a_speed_that_no_hardware_has_is_not_believed(facts: MachineFacts, claim: float) -> None:
    told = card(facts, prefill_tok_s=claim, decode_tok_s=claim, load_s=1e-9, weights_bytes=0)
    own = replace(OWN, models=[MODEL])
    (model,) = claims.believed(told, own).models
    most = chip_speeds.most_of(facts.chip, facts.accelerator, facts.cores)
    # The size is that of the same files here, whatever the card says of them.
    assert model.speed.prefill_tok_s <= 200 * most.prefill_tok_s(MODEL.shape.weights_bytes)
    assert model.speed.decode_tok_s <= 200 * most.decode_tok_s(MODEL.shape.weights_bytes)
    assert model.load_s > 0.01
    assert "are believed" in claims.capped(told, claims.believed(told, own))["big"]


@pytest.mark.parametrize("facts", KINDS, ids=lambda facts: f"{facts.accelerator} {facts.chip}")
def test_what_a_chip_should_reach_is_believed_and_a_sparse_model_is_faster(facts: MachineFacts) -> None:
    chip = chip_speeds.hardware_of(facts.chip, facts.accelerator, facts.cores)
    prefill, decode = (
        chip.prefill_tok_s(MODEL.shape.weights_bytes),
        chip.decode_tok_s(MODEL.shape.weights_bytes),
    )
    for factor in (0.1, 1.0, 3.5):
        told = card(facts, prefill_tok_s=factor * prefill, decode_tok_s=factor * decode, load_s=3.0)
        assert claims.believed(told, replace(OWN, models=[MODEL])) is told
    # A CPU that multiplies by packed weights is faster.
    packed = chip_speeds.hardware_of(facts.chip, facts.accelerator, facts.cores, "int8")
    fast = card(
        facts, cpu_arithmetic="int8", prefill_tok_s=3.5 * packed.prefill_tok_s(MODEL.shape.weights_bytes)
    )
    assert claims.believed(fast, replace(OWN, models=[MODEL])) is fast
    # Where this machine has not measured the model, it may compute with a small part of its weights.
    told = card(facts, prefill_tok_s=30 * prefill, decode_tok_s=30 * decode)
    assert claims.believed(told) is told


def test_where_the_model_was_measured_its_speed_elsewhere_follows() -> None:
    facts = KINDS[1]
    chip = chip_speeds.hardware_of(facts.chip, facts.accelerator, facts.cores)
    told = card(facts, prefill_tok_s=30 * chip.prefill_tok_s(MODEL.shape.weights_bytes))
    here = chip_speeds.hardware_of(FACTS.chip, FACTS.accelerator, FACTS.cores)
    dense = changed(MODEL, prefill_tok_s=here.prefill_tok_s(MODEL.shape.weights_bytes))
    sparse = changed(dense, prefill_tok_s=20 * dense.speed.prefill_tok_s)
    assert claims.believed(told, replace(OWN, models=[dense])) is not told
    assert claims.believed(told, replace(OWN, models=[sparse])) is told


@given(
    st.sampled_from(KINDS),
    st.floats(0, 1e12),
    st.floats(0, 1e12),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
)
def test_what_is_believed_is_never_more_than_claimed_and_stays_the_same(
    facts: MachineFacts, prefill: float, decode: float, weights: int, own_weights: int
) -> None:
    told = card(facts, prefill_tok_s=prefill, decode_tok_s=decode, weights_bytes=weights)
    own = replace(OWN, models=[changed(MODEL, weights_bytes=own_weights)])
    seen = claims.believed(told, own)
    (model,) = seen.models
    assert 0 <= model.speed.prefill_tok_s <= prefill
    assert 0 <= model.speed.decode_tok_s <= decode
    assert claims.believed(seen, own) is seen


def test_every_service_reads_the_bounded_figures() -> None:
    liar = machine("liar", prefill_tok_s=INFINITE, decode_tok_s=INFINITE)
    own = replace(OWN, models=[MODEL])
    members = Members(lambda: [liar], lambda: own)
    (most,) = claims.believed(liar.card, own).models
    for work in ("answer", "prefill", "score", "draft"):
        (found,) = members.others(work)  # type: ignore[arg-type]
        assert found.card.models == [most]
        assert speed_of(found.card.models[0]) == speed_of(most), "smart prefill"
        # Shared prefill: a helper's speed has a floor in seconds for each token.
        assert planner_facts.helper(found, MODEL).speed.token_s >= 0.2 / most.speed.prefill_tok_s
        assert drafters.candidates([found], "other", "big", "peers")
    assert members.model_at("liar", "big")[0] == most
    assert members.capped("big") == [
        f"liar claims {claims.capped(liar.card, found.card)['big']}: its hardware can do no more."
    ]
    assert members.capped("another") == []


# ---- what was seen here ----------------------------------------------------------------------------------


class LiarFleet:
    """A machine that may be a liar, beside this one, on a clock that stands still unless it is moved."""

    def __init__(self, **model: Any) -> None:
        self.now_s = 1000.0
        self.found = machine("liar", **model)
        self.own = replace(OWN, models=[MODEL])
        self.members = Members(lambda: [self.found], lambda: self.own, monotonic=lambda: self.now_s)
        self.placer = Placer(self.members, lambda *_: None)  # type: ignore[arg-type,return-value]
        self.wanted = WantedModel("big", here=True, folder=None)

    def chosen(self, tokens: int = 4000) -> Placement:
        asked = Job("big", Generate("r", TextPrompt("x" * 4 * tokens), max_tokens=100), "http", "chat")
        return self.placer.choose(asked, self.wanted, tried=frozenset(), why=None)

    def answers(self, took_s: float, *, prefilled: int = 4000, decoded: int = 100) -> None:
        tokens = AnswerTokens(0, prefilled, decoded)
        self.placer.answered(
            Placement("liar", self.chosen().planned, "d"), self.wanted, tokens, took_s, took_s
        )


@pytest.mark.parametrize("claim", [1e4, 1e6, INFINITE])
def test_a_claim_that_one_answer_disproves_is_believed_no_more(claim: float) -> None:
    fleet = LiarFleet(prefill_tok_s=claim, decode_tok_s=claim)
    assert fleet.chosen().node_id == "liar"
    # This machine would take some 40 s for the prompt, and 10 s for the answer.
    fleet.answers(300.0)
    assert fleet.chosen().node_id == ""
    # Another claim changes nothing of what was seen.
    fleet.found = machine("liar", prefill_tok_s=2 * claim, decode_tok_s=2 * claim)
    assert fleet.chosen().node_id == ""


def test_an_honest_machine_is_not_called_slow_for_what_a_request_takes_besides() -> None:
    fleet = LiarFleet(prefill_tok_s=1000.0, decode_tok_s=100.0)
    price = fleet.chosen().prefill_s
    fleet.answers(4.5)
    assert fleet.chosen().prefill_s == price
    for _ in range(9):
        fleet.answers(2.0, prefilled=limits.ANSWER_SPEED_TOKENS - 1, decoded=5)
    assert fleet.chosen().prefill_s == price


def test_what_was_seen_here_outlives_a_faster_claim_and_fades() -> None:
    fleet = LiarFleet()
    learn = fleet.members.waited
    learn("liar", "d", 1e-6, "prefill", expected_s=0.01, took_s=1e9)
    factor = fleet.members.correction("liar", "d", PrefillSpeed(1e-6))
    assert MOST < factor <= MOST_SEEN
    assert fleet.members.correction("liar", "d", PrefillSpeed(1e-6 / CHANGED / 2)) > factor
    assert fleet.members.correction("liar", "d", PrefillSpeed(1e-6 * CHANGED * 2)) == 1.0
    fleet.now_s += 86_400
    assert fleet.members.correction("liar", "d", PrefillSpeed(1e-6)) == pytest.approx(1.0)


# ---- seventeen requests ----------------------------------------------------------------------------------


class Liars(FakeOthers):
    first: tuple[Any, ...] = ()

    def __init__(self, *found: Member) -> None:
        super().__init__(*found)
        self.were_asked = asyncio.Event()

    def request(self, node_id: str, method: str, body: bytes) -> FakeStream:
        self.were_asked.set()
        self.asked.append((node_id, messages.decode_run(body)))
        self.streams.append(OnlyAlive(spoken(*self.first)))
        return self.streams[-1]


class GatheredLedger(Ledger):
    """No request goes on before so many of them have their machine. On a busy machine the first one may
    otherwise be over before the next one is placed."""

    def __init__(self, store: Store, requests: int) -> None:
        super().__init__(store)
        self._left, self._all = requests, asyncio.Event()

    async def reserve(self, reservation: Reservation) -> None:
        await super().reserve(reservation)
        self._left -= 1
        if self._left <= 0:
            self._all.set()
        await self._all.wait()


Make = Callable[..., RequestRunner]


@pytest.fixture
def make(store: Store) -> Make:
    def build(others: FakeOthers, own: Card, *names: str, at_once: int = 0) -> RequestRunner:
        members = Members(others.machines, lambda: own)
        return runner_over(
            FakePool(answer()),
            FakeModels(names=[*names]),
            GatheredLedger(store, at_once),
            Metrics("0"),
            names=ModelNames("big"),
            placer=Placer(members, others.request),
            members=members,
        )

    return build


async def answered(runner: RequestRunner, number: int) -> list[Any]:
    asked = Job("big", Generate(f"r{number}", TextPrompt("x" * 4000), max_tokens=10), "http", "chat")
    async with aclosing(runner.run(asked)) as events:
        return [event async for event in events]


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB_BEGIN_S", "JOB_QUEUE_S", "JOB_STALL_S"):
        monkeypatch.setattr(limits, name, 0.05)
    monkeypatch.setattr(limits, "JOB_LATE", 0.0)


@pytest.mark.one_loop
@pytest.mark.parametrize("claim", [INFINITE, 1e6])
@pytest.mark.parametrize("first", [(), (Accepted("r", 1000), Prefill("r", 1, 1000))], ids=["mute", "begins"])
async def test_attack_seventeen_requests_and_a_machine_that_claims_any_speed_and_hangs(
    make: Make, monkeypatch: pytest.MonkeyPatch, claim: float, first: tuple[Any, ...]
) -> None:
    hurried(monkeypatch)
    liars = Liars(machine("liar", prefill_tok_s=claim, decode_tok_s=claim))
    liars.first = first
    runner = make(liars, replace(OWN, models=[MODEL]), "big", at_once=17)
    found = await asyncio.gather(*(answered(runner, number) for number in range(17)))
    assert all(events[-1] == answer()[-1] for events in found), "all were answered, here"
    assert len(liars.asked) == limits.ANSWERS_ON_TRIAL
    assert all(stream.cancelled for stream in liars.streams)
    # It is left out after that, and a later request is answered here at once.
    await answered(runner, 17)
    assert len(liars.asked) == limits.ANSWERS_ON_TRIAL


@pytest.mark.one_loop
async def test_a_machine_that_answers_gets_as_many_requests_as_come(make: Make) -> None:
    fast = machine("fast", prefill_tok_s=5e3, decode_tok_s=5e2)
    fast = type(fast)(replace(fast.card, max_streams=32), "fast", rtt_s=0.001)
    others = FakeOthers(fast, fast=[spoken(*answer())] * 20)
    runner = make(others, replace(OWN, models=[MODEL]), "big")
    await answered(runner, 0)
    await asyncio.gather(*(answered(runner, number) for number in range(1, 6)))
    assert len(others.asked) == 6


@pytest.mark.one_loop
async def test_on_trial_is_asked_all_the_same_where_no_other_machine_has_the_model(make: Make) -> None:
    fast = machine("fast")
    others = FakeOthers(fast, fast=[spoken(*answer())] * 20)
    runner = make(others, OWN)
    await asyncio.gather(*(answered(runner, number) for number in range(5)))
    assert len(others.asked) == 5


@pytest.mark.one_loop
async def test_a_client_that_gives_up_a_silent_machine_counts_as_late(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a machine that hangs for longer than clients wait is never left out."""
    monkeypatch.setattr(limits, "JOB_CANCELLED_S", 0.0)
    monkeypatch.setattr(limits, "JOB_LATE", 0.0)
    liar = machine("liar", prefill_tok_s=1e6, decode_tok_s=1e6)
    liar = type(liar)(replace(liar.card, max_streams=4), "liar", rtt_s=0.001)
    liars = Liars(liar)
    runner = make(liars, replace(OWN, models=[MODEL]), "big")
    asked = asyncio.create_task(answered(runner, 0))
    await liars.were_asked.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await answered(runner, 1)
    assert len(liars.asked) == 1


class RefusingOthers(FakeOthers):
    """Ends every request with one error."""

    def __init__(self, error: FleetError, *found: Member) -> None:
        super().__init__(*found)
        self.error = error

    def request(self, node_id: str, method: str, body: bytes) -> FakeStream:
        self.asked.append((node_id, messages.decode_run(body)))
        return FakeStream([self.error])


WRONG = [BadRequest("No."), ContextLengthExceeded("No."), ModelRefused("No."), ModelUnsupported("No.")]


@pytest.mark.one_loop
@pytest.mark.parametrize("error", WRONG, ids=lambda error: error.code)
@pytest.mark.parametrize("state", ["loaded", "installed"])
async def test_attack_seventeen_requests_and_a_machine_that_calls_them_all_wrong(
    make: Make, error: FleetError, state: str
) -> None:
    liars = RefusingOthers(error, machine("liar", prefill_tok_s=1e6, decode_tok_s=1e6))
    runner = make(liars, replace(OWN, models=[replace(MODEL, state=state)]), "big")
    first = await answered(runner, 0)
    assert first[-1] == answer()[-1]
    assert runner._members.left_out("liar", "answer", MODEL.digest)
    found = await asyncio.gather(*(answered(runner, number) for number in range(1, 17)))
    assert all(events[-1] == answer()[-1] for events in found)
    assert len(liars.asked) == 1


CANNOT = [
    Overloaded("Not now."),
    Draining("Not now."),
    OutOfMemory("Not now."),
    ModelNotFound("Not here."),
    ModelCorrupt("Not whole."),
    Forbidden("Not you."),
    DiskFull("No room."),
]


@pytest.mark.one_loop
@pytest.mark.parametrize("error", CANNOT, ids=lambda error: error.code)
async def test_attack_seventeen_requests_and_a_machine_that_says_of_each_that_it_cannot(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: FleetError
) -> None:
    # However long the requests take here.
    monkeypatch.setattr(limits, "BACKOFF_S", 1e6)
    monkeypatch.setattr(limits, "BACKOFF_MOST_S", 1e6)
    monkeypatch.setattr(limits, "BACKOFF_REFUSED_S", 1e6)
    liars = RefusingOthers(error, machine("liar", prefill_tok_s=1e6, decode_tok_s=1e6))
    runner = make(liars, replace(OWN, models=[MODEL]), "big")
    for number in range(17):
        assert (await answered(runner, number))[-1] == answer()[-1]
    assert len(liars.asked) == 2
    assert error.code in runner._members.left_out("liar", "answer", MODEL.digest)
    of_one_model = isinstance(error, ModelNotFound | ModelCorrupt | OutOfMemory)
    assert bool(runner._members.left_out("liar", "answer", "another")) is not of_one_model
    assert not runner._members.left_out("liar", "fetch", MODEL.digest), "it may do everything else well"


@pytest.mark.one_loop
@pytest.mark.parametrize("error", WRONG, ids=lambda error: error.code)
async def test_a_request_that_is_wrong_is_asked_twice_at_most_and_leaves_no_machine_out(
    make: Make, error: FleetError
) -> None:
    names = [f"fast{number}" for number in range(4)]
    others = RefusingOthers(error, *(machine(name, faster=1e3) for name in names))
    runner = make(others, replace(OWN, models=[MODEL]), "big")
    with pytest.raises(type(error), match=r"No\."):
        await answered(runner, 0)
    assert len(others.asked) == 2
    assert not any(runner._members.left_out(name, "answer") for name in names)


@pytest.mark.one_loop
async def test_a_machine_that_has_served_is_believed_before_a_model_is_loaded_to_check(make: Make) -> None:
    fast = machine("fast", faster=1e3)
    others = FakeOthers(fast, fast=[spoken(*answer()), [BadRequest("No.")]])
    runner = make(others, replace(OWN, models=[replace(MODEL, state="installed")]), "big")
    await answered(runner, 0)
    with pytest.raises(BadRequest, match=r"No\."):
        await answered(runner, 1)
    assert len(others.asked) == 2


def test_a_prefill_is_waited_for_by_the_plans_own_figures() -> None:
    planned = AnswerDeadline(0.0, busy=False, prefill_s=2.0)
    planned.on_event(Accepted("r", 100_000), 10.0)
    assert planned.due_s == 10.0 + limits.JOB_STALL_S + limits.JOB_LATE * 2.0
    planned.on_event(Prefill("r", 50_000, 100_000), 20.0)
    assert planned.due_s == 20.0 + limits.JOB_STALL_S + limits.JOB_LATE * 1.0
    # A slow machine has as long as its price says, up to that of a slow core.
    slow = AnswerDeadline(0.0, busy=False, prefill_s=1e9)
    slow.on_event(Accepted("r", 1000), 0.0)
    assert slow.due_s == limits.JOB_STALL_S + 1000 / limits.JOB_LEAST_TOK_S
