"""Where jobs go: what stays, what travels, what is tried next, what people are told when nothing is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from fakes import FakeModels, FakePool, answer
from member_cards import MODEL, OWN, collect, machine, spoken
from msgspec.structs import replace
from nested_fields import changed
from peer_streams import FakeOthers, FakeStream
from runners import runner_over
from timelines import check_steps
from virtual_loop import VirtualLoop

from fleetd import limits
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import Trace, TraceStep
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Loading,
    TextPrompt,
    Timings,
    Usage,
)
from fleetd.engine.sampling.constraint import Constraint
from fleetd.errors import (
    InvalidValue,
    ModelNotFound,
    NoMachine,
    NotFound,
    OutOfMemory,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
)
from fleetd.limits import GIB
from fleetd.models.model_names import ModelNames
from fleetd.p2p.membership.cards import Card
from fleetd.plan.beginnings import KeptBeginning
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import RouteQuestion
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Member, Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.placement import KnownTokens, Placer, WantedModel, candidate
from fleetd.requests.remote import messages, remote
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.runner import RequestRunner
from fleetd.storage.store import Store

WHOLE = spoken(*answer())


def job(model: str = "big", **fields: Any) -> Job:
    return Job(model, Generate("r1", TextPrompt("x" * 400), max_tokens=10), "http", "chat", **fields)


def has(digest: str) -> bool:
    return True


Make = Callable[..., RequestRunner]


@pytest.fixture
def make(store: Store) -> Make:
    def build(
        others: FakeOthers,
        *,
        models: Any = None,
        pool: Any = None,
        own: Card = OWN,
        record: Callable[[Trace], None] = lambda trace: None,
        monotonic: Callable[[], float] = time.monotonic,
        **more: Any,
    ) -> RequestRunner:
        members = Members(others.machines, lambda: own, monotonic=monotonic, **more)
        return runner_over(
            pool or FakePool(answer()),
            models or FakeModels(names=[]),
            Ledger(store),
            Metrics("0"),
            names=ModelNames("big"),
            placer=Placer(members, others.request, wake=others.wake),
            members=members,
            record=record,
            monotonic=monotonic,
        )

    return build


@pytest.mark.parametrize(
    ("mine", "theirs", "exactness"),
    [
        ("bits", "bits", "exact"),
        ("bits", "other bits", "equivalent"),
        ("", "", "equivalent"),
        ("bits", "", "equivalent"),
    ],
)
def test_an_answer_from_elsewhere_is_exact_only_where_both_measured_the_same_arithmetic(
    mine: str, theirs: str, exactness: str
) -> None:
    here, there = (machine("a", arithmetic=arithmetic).card for arithmetic in (mine, theirs))
    assert planner_facts.alike(here, there, "big") is (exactness == "exact")
    assert not planner_facts.alike(here, machine("a", arithmetic=theirs, digest="e").card, "big")


async def test_the_header_says_exact_of_an_answer_with_the_bytes_that_this_machine_would_give(
    make: Make,
) -> None:
    others = FakeOthers(machine("studio", faster=100, arithmetic="bits"), studio=[WHOLE])
    own = replace(OWN, models=[replace(MODEL, arithmetic="bits")])
    seen = await collect(make(others, own=own).run(job()))
    assert seen[0] == Planned("remote", ("studio",), "exact")


async def test_an_answer_with_rows_of_other_bits_is_labelled_and_is_no_exact_one(make: Make) -> None:
    others = FakeOthers(machine("studio", faster=100, arithmetic="bits", kv_bits=8), studio=[WHOLE])
    own = replace(OWN, models=[replace(MODEL, arithmetic="bits")])
    runner = make(others, own=own, models=FakeModels(names=["big"]))
    seen = await collect(runner.run(job()))
    assert seen[0] == Planned("remote", ("studio",), "equivalent", kv_bits=8)
    exact = replace(job(), request=replace(job().request, exact=True))
    seen = await collect(runner.run(exact))
    assert (seen[0].kind, seen[0].exactness, seen[0].kv_bits) == ("local", "exact", 0)


@pytest.mark.parametrize("placement", [(), ("studio",)], ids=["left open", "named"])
@pytest.mark.parametrize("theirs", ["bits", "other bits", ""])
async def test_an_answer_that_must_be_exact_runs_only_where_the_bytes_are_the_same(
    make: Make, theirs: str, placement: tuple[str, ...]
) -> None:
    own = replace(OWN, models=[replace(MODEL, arithmetic="bits")])
    asked = job(placement=placement)
    asked = replace(asked, request=replace(asked.request, exact=True))
    others = FakeOthers(machine("studio", faster=100, arithmetic=theirs), studio=[WHOLE])
    runner = make(others, own=own, models=FakeModels(names=["big"]))
    if theirs != "bits" and placement:
        with pytest.raises(NoMachine, match="not shown that studio") as refused:
            await collect(runner.run(asked))
        assert refused.value.param == "exactness"
        return
    seen = await collect(runner.run(asked))
    if theirs == "bits":
        assert seen[0] == Planned("remote", ("studio",), "exact")
        # That machine, too, takes help only of machines that compute the same.
        assert others.asked[0][1].request.exact
    else:
        assert (seen[0].kind, seen[0].exactness) == ("local", "exact")
        assert not others.asked


async def test_a_model_that_only_machines_with_other_bytes_have_gives_no_exact_answer_and_says_why(
    make: Make,
) -> None:
    asked = job()
    asked = replace(asked, request=replace(asked.request, exact=True))
    others = FakeOthers(machine("studio", arithmetic="bits"), studio=[WHOLE])
    with pytest.raises(NoMachine, match="not shown that studio") as refused:
        await collect(make(others).run(asked))
    assert refused.value.param == "exactness"
    assert not others.asked


# ---- where ---------------------------------------------------------------------------------------------


async def test_a_model_that_is_not_here_runs_where_it_is(make: Make, store: Store) -> None:
    others = FakeOthers(machine("studio"), studio=[WHOLE])
    seen = await collect(make(others).run(job()))
    assert seen[0] == Planned("remote", ("studio",), "equivalent")
    assert seen[1:] == answer()
    ((_, run),) = others.asked
    assert (run.model, run.digest, run.route) == ("big", "d", "chat")
    assert others.streams[0].ended
    assert store.call(lambda db: db.execute("SELECT node, state FROM usage").fetchall()) == [
        ("studio", "settled")
    ]


async def test_the_machine_that_finishes_first_gets_it(make: Make) -> None:
    others = FakeOthers(machine("slow"), machine("fast", faster=3.0), fast=[WHOLE])
    await collect(make(others).run(job()))
    assert others.order == ["fast"]


def asleep(name: str, wake_s: float, faster: float = 10.0) -> Member:
    return msgspec.structs.replace(
        machine(name, faster=faster, reach="It is probably asleep."), wake_s=wake_s
    )


def reading(tokens: int) -> Job:
    return Job("big", Generate("r1", TextPrompt("x" * 4 * tokens), max_tokens=10), "http", "chat")


@pytest.mark.parametrize(
    ("tokens", "wake_s", "wakes"), [(10_000, 20.0, True), (1_000, 20.0, False), (1_000, 2.0, True)]
)
async def test_a_machine_is_woken_where_its_answer_still_comes_first(
    make: Make, tokens: int, wake_s: float, wakes: bool
) -> None:
    """Here the prompts take 100 s and 10 s, there a tenth of that."""
    others = FakeOthers(asleep("studio", wake_s), studio=[WHOLE])
    own = replace(OWN, models=[MODEL])
    runner = make(others, own=own, models=FakeModels(names=["big"]))
    seen = await collect(runner.run(reading(tokens)))
    assert others.woken == others.order == (["studio"] if wakes else [])
    if wakes:
        assert seen[:2] == [Planned("remote", ("studio",), "equivalent"), Loading("waking studio")]
    assert isinstance(seen[-1], Finished)


async def test_a_machine_that_does_not_wake_costs_no_answer(make: Make) -> None:
    others = FakeOthers(asleep("studio", 20.0), studio=[WHOLE])
    others.deaf = PeerUnreachable("studio did not wake within 40 s.")
    runner = make(others, own=replace(OWN, models=[MODEL]), models=FakeModels(names=["big"]))
    seen = await collect(runner.run(reading(10_000)))
    assert (others.woken, others.order) == (["studio"], [])
    assert isinstance(seen[-1], Finished)
    assert any("did not wake" in event.reason for event in seen if isinstance(event, Planned))


async def test_a_machine_that_is_asleep_and_not_to_be_woken_is_not_asked(make: Make) -> None:
    others = FakeOthers(machine("studio", faster=10, reach="It is probably asleep."), studio=[WHOLE])
    runner = make(others, own=replace(OWN, models=[MODEL]), models=FakeModels(names=["big"]))
    await collect(runner.run(reading(10_000)))
    assert others.woken == others.order == []


async def test_a_peer_that_may_not_see_prompts_never_gets_one(make: Make) -> None:
    others = FakeOthers(machine("nosy", faster=100.0, sees=False), machine("studio"), studio=[WHOLE])
    await collect(make(others).run(job()))
    assert others.order == ["studio"]


async def test_only_a_nosy_peer_left_is_said_so(make: Make) -> None:
    others = FakeOthers(machine("nosy", sees=False))
    with pytest.raises(NoMachine, match="nosy may not see prompts"):
        await collect(make(others).run(job()))
    assert others.order == []


@pytest.mark.parametrize("how", ["request", "settings"])
async def test_local_only_never_leaves(make: Make, how: str) -> None:
    others = FakeOthers(machine("studio", faster=100.0))
    with pytest.raises(ModelNotFound):
        await collect(make(others, local_only=how == "settings").run(job(local_only=how == "request")))
    here = make(others, models=FakeModels(names=["big"]), local_only=how == "settings")
    assert (await collect(here.run(job(local_only=how == "request"))))[0] == LOCAL
    assert others.order == []


async def test_a_job_from_a_peer_is_never_passed_on(make: Make) -> None:
    """Or two machines that each think the other has it would send it to and fro."""
    others = FakeOthers(machine("studio"))
    body = messages.encode(messages.RunJob("big", job().request, "chat"))
    with pytest.raises(ModelNotFound):
        await remote.JobServer(make(others).run, has)("peer", body, FakeStream([]))
    assert others.order == []


@pytest.mark.parametrize(("unaided", "method"), [(False, "job.run"), (True, "job.run_unaided")])
async def test_a_machine_with_rules_of_its_own_asks_for_an_answer_without_helpers(
    make: Make, unaided: bool, method: str
) -> None:
    others = FakeOthers(machine("old"), machine("studio"), old=[[NotFound("unknown")]], studio=[WHOLE])
    await collect(make(others, unaided=lambda: unaided).run(job()))
    # A version that does not know the method refuses, and the next machine is asked.
    assert (others.order, others.methods) == (["old", "studio"], [method] * 2)


SCHEMA = Constraint("json_schema", '{"type": "integer"}', "response_format")


@pytest.mark.parametrize(("unaided", "method"), [(False, "job.run_held"), (True, "job.run_held_unaided")])
@pytest.mark.parametrize(
    "changes",
    [{"constraint": SCHEMA}, {"prompt": ChatPrompt([{"role": "user"}], strict_tools={"look": ""})}],
    ids=["text", "tools"],
)
async def test_an_answer_with_a_form_is_asked_only_of_machines_that_hold_it_to_that(
    make: Make, changes: dict[str, Any], unaided: bool, method: str
) -> None:
    others = FakeOthers(machine("old"), machine("studio"), old=[[NotFound("unknown")]], studio=[WHOLE])
    held = job()
    held = replace(held, request=msgspec.structs.replace(held.request, **changes))
    await collect(make(others, unaided=lambda: unaided).run(held))
    assert (others.order, others.methods) == (["old", "studio"], [method] * 2)
    assert messages.METHODS[method] is unaided


@pytest.mark.parametrize("unaided", [False, True])
async def test_a_job_that_came_without_helpers_is_not_shared(unaided: bool) -> None:
    taken: list[Job] = []

    async def run(job: Job) -> AsyncGenerator[Any, None]:
        taken.append(job)
        for event in answer():
            yield event

    body = messages.encode(messages.RunJob("big", job().request, "chat"))
    await remote.JobServer(run, has, unaided=unaided)("peer", body, ServedStream())
    assert [(each.local_only, each.shareable) for each in taken] == [(True, not unaided)]


async def test_unreachable_machines_are_named_with_the_reason(make: Make) -> None:
    others = FakeOthers(machine("studio", reach="Nothing was heard from it for 3 s."))
    with pytest.raises(NoMachine, match="studio cannot be used: Nothing was heard"):
        await collect(make(others).run(job()))


# ---- what is tried next --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        PeerUnreachable("gone"),
        [PeerLost("cut")],
        [OutOfMemory("full")],
        [*WHOLE[:2], PeerLost("cut before the first token")],
        [b"garbage"],
        [],
    ],
    ids=["unreachable", "lost", "memory", "lost in prefill", "garbage", "ends at once"],
)
async def test_failures_before_the_first_token_are_not_seen(make: Make, failure: Any) -> None:
    others = FakeOthers(machine("first", faster=3.0), machine("second"), first=[failure], second=[WHOLE])
    seen = await collect(make(others).run(job()))
    assert others.order == ["first", "second"]
    plans = [event for event in seen if isinstance(event, Planned)]
    assert [plan.nodes for plan in plans] == [("first",), ("second",)]
    assert plans[1].reason
    assert seen[-len(answer()) :] == answer()


async def test_a_silent_machine_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOB_SILENCE_S", 0.05)
    others = FakeOthers(
        machine("first", faster=3.0), machine("second"), first=[[ALIVE, None]], second=[WHOLE]
    )
    assert (await collect(make(others).run(job())))[-1] == answer()[-1]
    assert others.streams[0].cancelled


async def test_after_the_first_token_the_failure_is_told(make: Make, store: Store) -> None:
    cut = [*spoken(*answer()[:-1]), PeerLost("cut")]
    others = FakeOthers(machine("first", faster=3.0), machine("second"), first=[cut])
    with pytest.raises(PeerLost):
        await collect(make(others).run(job()))
    assert others.order == ["first"]
    assert store.call(lambda db: db.execute("SELECT state FROM usage").fetchall()) == [("refunded",)]


async def test_what_every_machine_would_refuse_is_confirmed_once(make: Make) -> None:
    machines = machine("first", faster=3.0), machine("second", faster=2.0), machine("third")
    scripts = {each.node_id: [[InvalidValue("bad")]] for each in machines}
    others = FakeOthers(*machines, **scripts)
    with pytest.raises(InvalidValue):
        await collect(make(others).run(job()))
    assert others.order == ["first", "second"]


@pytest.mark.parametrize(
    ("state", "asked"), [("installed", ["first", "first"]), ("loaded", ["first", "first", "second"])]
)
async def test_no_machine_loads_a_model_to_confirm_what_one_refuses_that_has_served(
    make: Make, state: str, asked: list[str]
) -> None:
    others = FakeOthers(
        machine("first", faster=3.0),
        machine("second", state=state),
        first=[WHOLE, [InvalidValue("bad")]],
        second=[[InvalidValue("bad")]],
    )
    runner = make(others)
    await collect(runner.run(job()))
    with pytest.raises(InvalidValue):
        await collect(runner.run(job()))
    assert others.order == asked


async def test_another_machine_gives_no_longer_answer_than_its_model_s_context(make: Make) -> None:
    """The client asks for no length."""
    told = [Accepted("r1", 10), *(Delta("r1", "a") for _ in range(21))]
    others = FakeOthers(machine("studio", context_tokens=20), studio=[spoken(*told)])
    asked = Job("big", Generate("r1", TextPrompt("x" * 40)), "http", "chat")
    with pytest.raises(ProtocolError, match="sends more than 20 tokens"):
        await collect(make(others).run(asked))


@pytest.mark.parametrize(
    ("said", "had", "left_out"),
    [
        (KeptBeginning(memory_tokens=1000), 299, True),
        (KeptBeginning(disk_tokens=1000), 299, True),
        (KeptBeginning(memory_tokens=1000), 300, False),
        (KeptBeginning(memory_tokens=limits.FETCH_LEAST_TOKENS - 1), 0, False),
        (None, 0, False),
    ],
    ids=["less in memory", "less on its disk", "about as much", "hardly anything", "it said nothing"],
)
async def test_a_machine_that_had_less_of_a_prompt_than_it_said_is_not_asked_for_others(
    make: Make, said: KeptBeginning | None, had: int, left_out: bool
) -> None:
    told = [Accepted("r1", 1200), Delta("r1", "a")]
    told.append(Finished("r1", "stop", Usage(1200, had, 1, 0), Timings()))
    others = FakeOthers(machine("studio"), studio=[spoken(*told)])
    runner = make(others)

    class Survey:
        async def of_job(self, asked: Job, model: str) -> dict[str, KeptBeginning]:
            return {} if said is None else {"studio": said}

    runner._survey = Survey()  # type: ignore[assignment]
    await collect(runner.run(reading(1200)))
    assert bool(runner._members.left_out("studio", "fetch")) is left_out
    # What it answers is another matter.
    assert not runner._members.left_out("studio", "answer")


async def test_what_the_only_machine_refuses_is_refused(make: Make) -> None:
    others = FakeOthers(machine("first"), first=[[InvalidValue("bad")]])
    with pytest.raises(InvalidValue, match=r"\Abad\Z"):
        await collect(make(others).run(job()))
    assert others.order == ["first"]


async def test_no_more_machines_are_tried_than_the_limit(make: Make) -> None:
    names = ["a", "b", "c", "d"]
    others = FakeOthers(*map(machine, names), **{name: [[PeerLost(name)]] for name in names})
    with pytest.raises(PeerLost):
        await collect(make(others).run(job()))
    assert len(others.order) == limits.ATTEMPTS == len(set(others.order))


async def test_a_model_too_big_for_this_machine_goes_to_one_that_holds_it(make: Make) -> None:
    """The files are here, the engine refuses to load them."""
    others = FakeOthers(machine("studio"), studio=[WHOLE])
    pool = FakePool([OutOfMemory("It needs 40 GiB.")])
    own = replace(OWN, models=[MODEL])
    seen = await collect(make(others, models=FakeModels(names=["big"]), pool=pool, own=own).run(job()))
    assert [event.nodes for event in seen if isinstance(event, Planned)] == [("this",), ("studio",)]
    assert isinstance(seen[-1], Finished)


DIVISIBLE = {"layers": 4, "token_bytes": 4096, "hidden_bytes": 64, "any_chunks": True}


@pytest.mark.parametrize(
    ("state", "room_tokens", "where"),
    [("installed", 1_000, "studio"), ("installed", 900, "this"), ("loaded", 900, "studio")],
)
async def test_no_machine_loads_a_model_that_leaves_no_room_for_the_prompt(
    make: Make, state: str, room_tokens: int, where: str
) -> None:
    """By its letters the prompt has 1,300 tokens; three quarters of them are certain.

    An engine that is loaded counts them, and refuses at once.
    """
    beside = room_tokens * 4096 / (1 - limits.PREFIX_SHARE)
    cold = machine("studio", faster=100.0, state=state, **DIVISIBLE)
    room = cold.card.models[0].memory_bytes + int(beside)
    cold = replace(cold, card=replace(cold.card, usable_bytes=room))
    others = FakeOthers(cold, studio=[WHOLE])
    own = replace(OWN, models=[changed(MODEL, **DIVISIBLE)])
    runner = make(others, own=own, models=FakeModels(names=["big"]))
    seen = await collect(runner.run(reading(1_300)))
    assert [event.nodes for event in seen if isinstance(event, Planned)] == [(where,)]


async def test_leaving_cancels_the_work_there(make: Make) -> None:
    others = FakeOthers(machine("studio"), studio=[[*spoken(*answer()[:-1]), None]])
    async with aclosing(make(others).run(job())) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    assert others.streams[0].cancelled


class PacedStream(FakeStream):
    """Each of its bodies is there ``every_s`` after the one before, whether it is read or not."""

    def __init__(self, script: list[bytes], every_s: float) -> None:
        super().__init__(script)
        self._every_s = every_s
        self._due_s = asyncio.get_running_loop().time()

    async def receive(self) -> bytes | None:
        self._due_s += self._every_s
        await asyncio.sleep(self._due_s - asyncio.get_running_loop().time())
        return await super().receive()


class PacedOthers(FakeOthers):
    every_s = 0.1

    def request(self, node_id: str, method: str, body: bytes) -> FakeStream:
        asked = super().request(node_id, method, body)
        return PacedStream(asked.script, self.every_s)


@pytest.mark.parametrize(
    ("token_s", "read_s", "factor"),
    [(0.1, 0.0, 1.0), (0.1, 0.01, 1.0), (0.1, 0.4, 1.0), (0.4, 0.0, 2.4), (0.4, 1.6, 1.0)],
    ids=["as it says", "a usual client", "a slow client", "a slow machine", "a slow machine and client"],
)
def test_a_client_that_reads_slowly_makes_no_machine_look_slow(
    make: Make, token_s: float, read_s: float, factor: float
) -> None:
    """The card says ten tokens a second."""
    tokens = 100
    told = [Accepted("r1", 10), *(Delta("r1", "a") for _ in range(tokens))]
    told.append(Finished("r1", "stop", Usage(10, 0, tokens, 0), Timings()))
    others = PacedOthers(machine("studio"), studio=[spoken(*told)])
    others.every_s = token_s

    async def ask() -> float:
        clock = asyncio.get_running_loop().time
        runner = make(others, monotonic=clock)
        asked = Job("big", Generate("r1", TextPrompt("x" * 40), max_tokens=tokens), "http", "chat")
        async with aclosing(runner.run(asked)) as events:
            async for _ in events:
                await asyncio.sleep(read_s)
        return runner._members.correction("studio", "d", PrefillSpeed(0.1), "decode")

    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        assert loop.run(ask()) == pytest.approx(factor, rel=0.05)


# ---- the serving end -----------------------------------------------------------------------------------


class ServedStream(FakeStream):
    def __init__(self, enough: int = 10**9) -> None:
        super().__init__([])
        self.sent: list[bytes] = []
        self.enough = asyncio.Event()
        self._until = enough

    def send(self, body: bytes) -> None:
        self.sent.append(body)
        if len(self.sent) >= self._until:
            self.enough.set()


async def test_the_serving_end_sends_what_its_runner_yields(make: Make) -> None:
    runner = make(FakeOthers(), models=FakeModels(names=["big"]))
    stream = ServedStream()
    await remote.JobServer(runner.run, has)(
        "peer", messages.encode(messages.RunJob("big", job().request, "chat")), stream
    )
    assert [messages.decode_event(body) for body in stream.sent] == answer()


async def test_the_serving_end_says_that_it_is_alive(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOB_ALIVE_S", 0.01)
    gate = asyncio.Event()
    runner = make(FakeOthers(), models=FakeModels(names=["big"]), pool=FakePool([gate, *answer()]))
    stream = ServedStream(enough=3)
    task = asyncio.create_task(
        remote.JobServer(runner.run, has)(
            "peer", messages.encode(messages.RunJob("big", job().request, "chat")), stream
        )
    )
    await stream.enough.wait()
    assert stream.sent[:3] == [ALIVE] * 3
    gate.set()
    await task
    assert messages.decode_event(stream.sent[-1]) == answer()[-1]


async def test_other_files_under_the_same_name_are_refused(make: Make) -> None:
    runner = make(FakeOthers(), models=FakeModels(names=["big"]))
    body = messages.encode(messages.RunJob("big", job().request, "chat", digest="0" * 64))
    with pytest.raises(ModelNotFound, match="other files under the name"):
        await remote.JobServer(runner.run, has)("peer", body, ServedStream())


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\xff" * 100, b"\x81" * 5000])
async def test_garbage_instead_of_a_job_is_refused(make: Make, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        await remote.JobServer(make(FakeOthers()).run, has)("peer", body, ServedStream())


async def test_the_next_turn_goes_where_the_last_one_was_read(make: Make) -> None:
    """Of two equal machines the first by id would win otherwise."""
    text = "A long conversation. " * 400
    others = FakeOthers(machine("a", reach="It is away."), machine("b"), a=[WHOLE], b=[WHOLE, WHOLE])
    runner = make(others)
    first = Job("big", Generate("r1", TextPrompt(text), max_tokens=10), "http", "chat")
    await collect(runner.run(first))
    others.found[0] = machine("a")
    await collect(
        runner.run(Job("big", Generate("r2", TextPrompt(text + "More."), max_tokens=10), "http", "chat"))
    )
    assert others.order == ["b", "b"]
    await collect(runner.run(Job("big", Generate("r3", TextPrompt("Other."), max_tokens=10), "http", "chat")))
    assert others.order == ["b", "b", "a"]


async def test_who_helped_there_is_told_here(make: Make) -> None:
    """The machine that answers knows; the one that was asked shows it."""
    script = [
        messages.encode(messages.RanAt(("mini",))),
        *spoken(answer()[0]),
        messages.encode(messages.RanAt((), "mini: it went away.")),
        *spoken(*answer()[1:]),
    ]
    others = FakeOthers(machine("studio"), studio=[script])
    plans = [event for event in await collect(make(others).run(job())) if isinstance(event, Planned)]
    assert plans == [
        Planned("remote", ("studio",), "equivalent"),
        Planned("remote", ("studio", "mini"), "equivalent"),
        Planned("remote", ("studio",), "equivalent", "mini: it went away."),
    ]


# ---- the story of a request ----------------------------------------------------------------------------

THERE = Trace(
    "r1.c0ffee",
    1e9,
    "big",
    prompt_tokens=7,
    chosen=OptionView("layers", ["mini", "this"], 1.5, [StepView("computed", 1.0)], chosen=True),
    steps=[
        TraceStep("request", "studio", 0.0, 1.2, 1.2),
        TraceStep("waiting", "studio", 0.0, 0.1, 0.1, parent=0),
        TraceStep("reading", "studio", 0.1, 1.2, 1.1, parent=0),
        TraceStep("computed", "mini", 0.2, 1.1, 0.9, 1000, parent=2),
    ],
    outcome="shared",
    exactness="exact",
    ttft_s=1.2,
    took_s=0.0,
    asked_by="alpha",
)


class WrittenTraces(list[Trace]):
    """Traces as they are written down."""

    def __init__(self) -> None:
        super().__init__()
        self._any = asyncio.Event()

    def append(self, trace: Trace) -> None:
        super().append(trace)
        self._any.set()

    async def only(self) -> Trace:
        await self._any.wait()
        (found,) = self
        return found


async def story(make: Make, *scripts: Any, **machines: Any) -> Trace:
    """What is written down of a request that studio and then mini are asked to answer."""
    written, (studio, *mini) = WrittenTraces(), scripts
    found = [machine("studio", faster=9), *([machine("mini")] if mini else [])]
    others = FakeOthers(*found, studio=[studio], mini=mini)
    runner = make(others, record=written.append)
    assert isinstance((await collect(runner.run(job())))[-1], Finished)
    assert all(asked.trace for _, asked in others.asked)
    return await written.only()


async def test_where_it_was_asked_the_trace_has_the_steps_of_where_it_was_answered(make: Make) -> None:
    trace = await story(make, [*WHOLE, *spoken(messages.told_trace(THERE))])
    assert (trace.id, trace.outcome, trace.answered_by, trace.exactness) == (
        "r1",
        "remote",
        "studio",
        "equivalent",
    )
    assert (trace.chosen.kind, trace.chosen.nodes) == ("remote", ["studio"])
    assert trace.there == replace(THERE, steps=[])
    check_steps(trace)
    (computed,) = [step for step in trace.steps if step.machine == "mini"]
    assert (computed.name, trace.steps[computed.parent or 0].name) == ("computed", "reading")
    assert any((step.name, step.machine) == ("network and rest", "studio") for step in trace.steps)
    assert trace.completion_tokens == 2


@pytest.mark.parametrize("took_s", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("clock_s", [0.0, 1.0, 1e9])
async def test_whatever_another_machine_tells_lies_within_the_time_that_passed_here(
    make: Make, took_s: float, clock_s: float
) -> None:
    told = replace(THERE, took_s=took_s, clock_s=clock_s)
    check_steps(await story(make, [*WHOLE, *spoken(messages.told_trace(told))]))


async def test_a_machine_of_an_earlier_version_tells_no_steps(make: Make) -> None:
    trace = await story(make, WHOLE)
    assert (trace.outcome, trace.answered_by, trace.there) == ("remote", "studio", None)
    # What was seen from here is left.
    assert [step.name for step in trace.steps] == ["request", "waiting", "reading", "writing"]
    check_steps(trace)


async def test_a_machine_that_tells_nothing_more_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOB_SILENCE_S", 0.1)
    assert (await story(make, [*WHOLE, ALIVE, None])).there is None


async def test_a_machine_that_died_on_the_way_stays_in_the_story(make: Make) -> None:
    dying = [*spoken(*answer()[:2]), PeerLost("The connection broke.")]
    trace = await story(make, dying, [*WHOLE, *spoken(messages.told_trace(THERE))])
    assert (trace.answered_by, trace.there) == ("mini", replace(THERE, steps=[]))
    check_steps(trace)
    (failed,) = trace.earlier
    assert (failed.answered_by, failed.outcome, failed.code) == ("studio", "failed", "peer_lost")
    assert "The connection broke." in failed.reason
    assert failed.took_s is not None
    assert failed.there is None


async def test_an_answer_that_broke_off_says_where_it_was_and_why(make: Make) -> None:
    written = WrittenTraces()
    others = FakeOthers(machine("studio"), studio=[[*spoken(*answer()[:-1]), PeerLost("It broke.")]])
    with pytest.raises(PeerLost):
        await collect(make(others, record=written.append).run(job()))
    trace = await written.only()
    assert (trace.outcome, trace.answered_by, trace.code) == ("failed", "studio", "peer_lost")
    assert trace.earlier == []


def hostile(**fields: Any) -> bytes:
    return messages.encode(messages.JobTrace(replace(THERE, **fields)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x91" * 2000,
        messages.encode(answer()[-1]),
        bytes(limits.JOB_TRACE_BYTES + 1),
        hostile(there=THERE),
        hostile(earlier=[THERE]),
        hostile(ttft_s=float("nan")),
        hostile(took_s=float("inf")),
        hostile(took_s=-1.0),
        hostile(prompt_tokens=2**60),
        hostile(steps=[TraceStep("computed", seconds=-1.0)]),
        hostile(steps=[TraceStep("x")] * (limits.JOB_TRACE_STEPS + 1)),
        hostile(reason="x" * (limits.ERROR_TEXT_CHARS + 1)),
        hostile(steps=[TraceStep("x" * (limits.ERROR_TEXT_CHARS + 1))]),
    ],
)
async def test_a_trace_that_no_honest_machine_tells_is_not_kept(make: Make, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode_trace(body)
    trace = await story(make, [*WHOLE, body])
    assert (trace.outcome, trace.there) == ("remote", None)


def test_what_is_told_of_a_trace_is_bounded() -> None:
    name = "m" * limits.CARD_TEXT_CHARS
    many = [TraceStep("computed", name, seconds=1.0)] * limits.SHARE_STEPS
    option = replace(THERE.chosen, steps=[StepView("computed", 1.0, machine=name)] * limits.SHARE_STEPS)
    full = replace(THERE, chosen=option, losers=[option] * 8, steps=many, reason="x" * 10**6, earlier=[THERE])
    told = messages.decode_trace(messages.encode(messages.told_trace(full)))
    assert (told.losers, told.earlier, len(told.steps)) == ([], [], limits.JOB_TRACE_STEPS)


async def test_the_serving_end_tells_its_trace_after_the_last_event(make: Make) -> None:
    canary = "a sentence that no trace may hold"
    written = WrittenTraces()
    runner = make(FakeOthers(), models=FakeModels(names=["big"]), record=written.append)
    server, stream = remote.JobServer(runner.run, has, {"peer": "alpha"}.__getitem__), ServedStream()
    request = replace(job().request, prompt=TextPrompt(canary))
    await server("peer", messages.encode(messages.RunJob("big", request, "chat", trace=True)), stream)
    *events, last = stream.sent
    assert [messages.decode_event(body) for body in events] == answer()
    told = messages.decode_trace(last)
    assert told == replace(await written.only(), summary="")
    assert (told.asked_by, told.outcome, told.id.partition(".")[0]) == ("alpha", "local", "r1")
    check_steps(told)
    assert {"computed", "decoded"} <= {step.name for step in told.steps}
    assert not any(canary.encode() in body for body in stream.sent)
    assert not any(b"Hello" in body for body in stream.sent[-1:])


def test_a_machine_whose_memory_is_taken_has_none_to_give() -> None:
    """Free memory of the system is no room on a GPU that is full, or under critical pressure."""
    full = replace(OWN, available_bytes=32 * GIB, usable_bytes=0)
    assert candidate(Member(full, "me", "", True, 0.0), None).available_bytes == 0


def test_a_machine_with_nothing_to_do_is_priced_with_what_it_can_fetch_from_a_busy_one() -> None:
    model, busy = replace(MODEL, arithmetic="same"), {"running": 3, "max_streams": 16, "unread_tokens": 9_000}

    def seen(name: str, **told: Any) -> Member:
        card = replace(machine(name).card, models=[model], **told)
        return msgspec.structs.replace(machine(name), card=card, bytes_per_s=1e9)

    found = [seen("reader", **busy), seen("idle")]
    members = Members(lambda: found, lambda: replace(OWN, models=[model], **busy))
    for member in found:
        members.succeeded(member.node_id, "answer")
    placer = Placer(members, lambda *_: pytest.fail("nothing is sent"))
    kept = KeptBeginning(disk_tokens=9_984, n_bytes=500_000_000)
    chosen = placer.choose(
        reading(10_000),
        WantedModel("big", here=True),
        tried=frozenset(),
        why=None,
        places={"reader": kept, "idle": KeptBeginning(), THIS_NODE: KeptBeginning()},
    )
    assert chosen.node_id == "idle"
    assert chosen.kept_where.startswith("idle fetches about 9984 tokens of the prompt from reader")


@pytest.mark.parametrize(("known", "where"), [(51, "reader"), (50, "quicker")])
def test_a_prompt_goes_on_where_more_than_half_of_it_was_read(known: int, where: str) -> None:
    """The other machine answers a little sooner all the same."""
    found = [machine("reader"), machine("quicker", faster=1.08)]
    members = Members(lambda: found, lambda: OWN)
    placer = Placer(members, lambda *_: pytest.fail("nothing is sent"))
    ways = placer.ways(
        RouteQuestion("big", prompt_tokens=100, max_tokens=100_000),
        WantedModel("big", here=False),
        lambda member: KnownTokens(known if member.node_id == "reader" else 0),
    )
    assert ways.placements[0].node_id == where


def test_what_is_awaited_is_what_is_read_now_beyond_what_was_read() -> None:
    assert (KnownTokens(30, 50).tokens, KnownTokens(30, 50).awaited) == (50, 20)
    assert (KnownTokens(50, 30).tokens, KnownTokens(50, 30).awaited) == (50, 0)


@pytest.mark.parametrize("unaided", [False, True])
def test_a_machine_with_rules_of_its_own_is_still_helped_itself(unaided: bool) -> None:
    model = changed(MODEL, **DIVISIBLE)
    helper = msgspec.structs.replace(machine("helper", **DIVISIBLE), bytes_per_s=1e9)
    members = Members(lambda: [helper], lambda: replace(OWN, models=[model]), unaided=lambda: unaided)
    placer, asked = Placer(members, lambda *_: None), RouteQuestion("big", 10_000, 10)  # type: ignore[arg-type,return-value]

    def helped(member: Member) -> bool:
        here = members.here()
        home = placer._home(
            asked, WantedModel("big", here=True), member, [here, helper], [], KnownTokens(), 0, {}
        )
        return bool(home.helpers)

    assert helped(members.here())
    assert helped(helper) is not unaided


@pytest.mark.parametrize("state", ["loaded", "installed"])
def test_what_a_machine_says_that_its_memory_has_counts_while_its_model_is_loaded(state: str) -> None:
    found = [machine("told", state=state), machine("silent", state=state)]
    placer = Placer(Members(lambda: found, lambda: OWN), lambda *_: pytest.fail("nothing is sent"))
    ways = placer.ways(
        RouteQuestion("big", prompt_tokens=1000, max_tokens=10),
        WantedModel("big", here=False),
        places={"told": KeptBeginning(memory_tokens=900)},
    )
    prefills = {way.node_id: way.price.prefill_s for way in ways.placements}
    assert (prefills["told"] < 0.2 * prefills["silent"]) is (state == "loaded")
