"""Prompts scored on other machines: what is asked of them, what they may ask, what happens when they fail."""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed
from peer_streams import RequestPipe
from runners import runner_over
from smart_fakes import NEEDLE, PROFILE, QUESTION, Profiles, ScoringPool, chat, haystack, models, scored
from timelines import check_steps

from fleetd import limits
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.control.prefill_trace import Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import ChatPrompt, Finished, Loading, Prefill, Profile, Score
from fleetd.errors import (
    Draining,
    EngineDied,
    FleetError,
    InvalidValue,
    ModelNotFound,
    ModelUnsupported,
    Overloaded,
    PeerLost,
    ProtocolError,
    ScorerNotReady,
)
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.scoring import Scorer, Segments, SmartPrefillQuestion, plan
from fleetd.requests.admission import ServingContext
from fleetd.requests.job import Job, Planned
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Member, Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.runner import RequestRunner
from fleetd.requests.smart_prefill import messages
from fleetd.requests.smart_prefill.client import SmartPrefill
from fleetd.requests.smart_prefill.compression_job import CompressionService
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.segment_scoring import (
    CompressorModel,
    ScorerRun,
    ScoringJob,
    ScoringQuestion,
    SegmentScoring,
    cut,
)
from fleetd.requests.smart_prefill.server import ScoreServer
from fleetd.storage.store import Store

WITHIN_S = 60.0
DIGEST = "d" * 64
SMOL = "smollm2-135m"
ASKED = SmartPrefillPolicy(enabled=True, target_ratio=0.2, min_prompt_tokens=500)


def card(node_id: str, tier: str = "tiny", **fields: Any) -> Card:
    model = ModelCard(
        SMOL,
        digest=DIGEST,
        roles=["chat", "compressor"],
        state="loaded",
        shape=ModelShape(weights_bytes=1000, context_tokens=100_000),
        speed=MeasuredSpeed(2000.0),
        scoring="ready",
    )
    machine = MachineFacts(tier=tier, cores=2, accelerator="cpu")
    return Card(node_id, 1, 1, models=[changed(model, **fields)], machine=machine)


@dataclass
class Mini:
    """A small machine."""

    name: str
    ledger: Ledger
    pool: ScoringPool = field(default_factory=ScoringPool)
    sees_prompts: bool = True
    reach: str = ""
    silent: bool = False
    draining: bool = False
    context_tokens: int = 100_000
    scoring: str = "ready"
    state: Any = "loaded"
    pipes: list[RequestPipe] = field(default_factory=list)

    @property
    def machine(self) -> Member:
        shown = card(self.name, context_tokens=self.context_tokens, scoring=self.scoring, state=self.state)
        return Member(shown, self.name, self.reach, self.sees_prompts, 0.001, 1e9)

    @property
    def server(self) -> ScoreServer:
        found = models(SMOL)
        context = ServingContext(found, lambda: card(self.name), draining=lambda: self.draining)
        return ScoreServer(self.pool, context, self.ledger)

    def open(self, body: bytes) -> RequestPipe:
        async def serve(pipe: RequestPipe) -> None:
            if self.silent:
                await asyncio.Event().wait()
            await self.server("me", body, pipe)

        self.pipes.append(RequestPipe(serve))
        return self.pipes[-1]


@dataclass
class Neighbours:
    minis: list[Mini]

    def machines(self) -> Iterable[Member]:
        return [mini.machine for mini in self.minis]

    def request(self, node_id: str, method: str, body: bytes) -> RequestPipe:
        assert method == messages.SCORE
        return next(mini for mini in self.minis if mini.name == node_id).open(body)


@dataclass
class HomeOfMinis:
    runner: RequestRunner
    pool: ScoringPool
    minis: list[Mini]
    store: Store
    speeds: ModelSpeeds
    traces: list[Trace]
    warmed: list[str] = field(default_factory=list)
    # By which scores are late.
    clock: Callable[[], float] = time.monotonic

    async def told(
        self, policy: SmartPrefillPolicy = ASKED, *, text: str | None = None, **fields: Any
    ) -> SmartPrefillResult:
        job = Job("m", chat(text), **{"origin": "socket", "route": "chat", "smart": policy, **fields})
        async with asyncio.timeout(WITHIN_S):
            events = [event async for event in self.runner.run(job)]
        assert isinstance(events[-1], Finished)
        told = [event.smart for event in events if isinstance(event, Planned)][-1]
        assert told is not None
        return told

    @property
    def sent(self) -> str:
        return str(self.pool.asked[-1].prompt)

    def nodes(self) -> dict[str, str]:
        select = "SELECT node, state FROM usage WHERE request_id LIKE 'r1.score_'"
        return dict(self.store.call(lambda db: db.execute(select).fetchall()))


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Any:
    def make(
        *names: str,
        compressor_here: bool = False,
        own: Card | None = None,
        profiles: Profiles | None = None,
    ) -> HomeOfMinis:
        minis = [Mini(name, ledger) for name in names]
        pool, speeds, traces = ScoringPool(), ModelSpeeds(), list[Trace]()
        speeds.seed("m", MeasuredSpeed(100.0, 100.0), now_s=0.0)
        speeds.seed(SMOL, MeasuredSpeed(500.0, 100.0), now_s=0.0)
        found = models("m", SMOL) if own is not None or compressor_here else models("m")
        others = Neighbours(minis)
        if compressor_here:
            own = Card("me", 1, 1, models=[ModelCard(SMOL, digest=DIGEST)])
        members = Members(others.machines, lambda: own)
        warmed: list[str] = []
        scorers = Scorers(
            pool,
            found,
            speeds,
            members,
            profiles=profiles or Profiles({}),
            warm=lambda load, _: warmed.append(load.node_id),
        )
        scoring = SegmentScoring(pool, others.request, monotonic=time.monotonic)
        compressing = CompressionService(scoring, scorers, ledger, monotonic=lambda: made.clock())
        smart = SmartPrefill(compressing, members, pool, metrics)
        runner = runner_over(
            pool,
            found,
            ledger,
            metrics,
            smart=smart,
            speeds=speeds,
            members=members,
            record=traces.append,
        )
        made = HomeOfMinis(runner, pool, minis, store, speeds, traces, warmed)
        return made

    return make


# ---- The machine that asks -------------------------------------------------------------------------------


async def test_a_small_machine_scores_what_a_large_one_reads(home: Any) -> None:
    this = home("mini")
    told = await this.told()
    assert (told.form, told.nodes) == ("text", ("mini",))
    (trace,) = this.traces
    check_steps(trace)
    (scored,) = [at for at, step in enumerate(trace.steps) if step.name == "scored"]
    (computed,) = [step for step in trace.steps if step.parent == scored]
    assert (computed.name, computed.machine) == ("computed", "mini")
    assert (trace.prompt_tokens, trace.kept_tokens) == (told.original_tokens, told.compressed_tokens)
    assert NEEDLE in this.sent
    assert not this.pool.scores
    assert len(this.minis[0].pool.scores) == 1
    assert this.nodes() == {"mini": "settled"}


async def test_two_machines_score_side_by_side_and_their_scores_merge(home: Any) -> None:
    this = home("mini", "air")
    told = await this.told()
    segments = [score.segment for mini in this.minis for score in mini.pool.scores]
    whole = len(this.minis[0].pool.scores[0].text)
    assert sorted(segments)[0][0] == 0
    assert sorted(segments)[-1][1] == whole
    assert set(told.nodes) == {"mini", "air"}
    assert NEEDLE in this.sent
    # The second one was told which heads the first one found.
    assert [score.profile for mini in this.minis for score in mini.pool.scores].count(PROFILE) >= 1


async def test_a_prompt_that_stays_is_not_scored_elsewhere(home: Any) -> None:
    told = await home("mini").told(local_only=True)
    assert told.code == "no_compressor"


@pytest.mark.parametrize("change", [{"sees_prompts": False}, {"reach": "unreachable"}])
async def test_machines_that_may_not_or_cannot_are_not_asked(home: Any, change: dict[str, Any]) -> None:
    this = home("mini")
    for name, value in change.items():
        setattr(this.minis[0], name, value)
    assert (await this.told()).code == "no_compressor"
    assert not this.minis[0].pipes


async def test_what_a_machine_leaves_the_next_one_scores(home: Any) -> None:
    this = home("mini", "air")
    for mini in this.minis:
        mini.pool.trouble = [EngineDied("The engine died.")]
    this.minis[1].pool.trouble = []
    told = await this.told()
    assert told.nodes == ("air",)
    assert this.nodes()["air"] == "settled"


async def test_this_machine_steps_in_for_one_that_dies(home: Any) -> None:
    this = home("mini", compressor_here=True)
    this.minis[0].pool.trouble = [PeerLost("It went away.")]
    told = await this.told()
    assert (told.form, told.nodes) == ("text", ("this",))
    assert this.nodes() == {"mini": "refunded", "this": "settled"}
    (trace,) = this.traces
    assert (trace.outcome, trace.code) == ("smart", "peer_lost")
    assert "mini: It went away." in trace.reason


async def test_a_silent_machine_is_given_up_and_the_prompt_read_whole(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOB_SILENCE_S", 0.1)
    this = home("mini")
    this.minis[0].silent = True
    told = await this.told()
    assert told.code == "peer_lost"
    assert this.minis[0].pipes[0].cancelled
    assert this.pool.asked == [chat()]


SPOILED = ["garbage", "elsewhere", "one", "heads", "endless", "free"]


@pytest.mark.parametrize("how", SPOILED)
async def test_attack_scores_that_do_not_fit_are_a_failure_like_any_other(home: Any, how: str) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = [how]
    told = await this.told()
    assert told.code == "protocol_error"
    assert told.reason.startswith("mini: ")
    assert this.pool.asked == [chat()]
    assert (await this.told()).code == "no_compressor"


@pytest.mark.parametrize("how", SPOILED)
async def test_attack_for_scores_that_do_not_fit_the_next_one_scores(home: Any, how: str) -> None:
    this = home("mini", compressor_here=True)
    this.minis[0].pool.trouble = [how]
    told = await this.told()
    assert (told.form, told.nodes) == ("text", ("this",))
    assert this.nodes() == {"mini": "refunded", "this": "settled"}
    # And it is not asked again at once.
    await this.told(text=haystack(220))
    assert len(this.minis[0].pipes) == 1


async def test_attack_heads_that_somebody_made_up_are_forgotten(home: Any) -> None:
    """Or every other machine would refuse them until this one starts anew."""
    this = home("mini", "air")
    await this.told()
    for mini in this.minis:
        mini.pool.trouble = [InvalidValue("Layer 99 of this model has no head 7 that could be asked.")]
    assert (await this.told(text=haystack(220))).code == "invalid_value"
    # What was read whole is cached: another text.
    assert (await this.told(text=f"Another log.\n\n{haystack(240)}")).used
    profiles = [score.profile for mini in this.minis for score in mini.pool.scores]
    # Found by the first one, refused by both, found once more.
    assert profiles.count(None) == 2


async def test_heads_that_this_machine_found_go_before_those_that_another_told(home: Any) -> None:
    found = dict[str, Profile]()
    this = home("mini", profiles=Profiles(found))
    await this.told()
    found[DIGEST] = Profile(heads=[(0, 1)], exit_layer=1)
    await this.told(text=f"Another log.\n\n{haystack(240)}")
    assert [score.profile for score in this.minis[0].pool.scores] == [None, found[DIGEST]]


async def test_a_machine_that_refuses_is_named_and_not_held_against_it(home: Any) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = [Overloaded("This machine scores 2 prompts already.")]
    told = await this.told()
    assert (told.code, told.reason) == ("overloaded", "mini: This machine scores 2 prompts already.")
    assert (await this.told(text=f"Another log.\n\n{haystack()}")).used


async def test_a_model_that_cannot_score_is_tried_once(home: Any) -> None:
    """Once by each machine: what another one says concerns that one alone."""
    this = home("mini", "air", compressor_here=True)
    for pool in (this.pool, *(mini.pool for mini in this.minis)):
        pool.trouble = [ModelUnsupported("Its attention finds 3% of what is asked for.")]
    assert (await this.told()).code == "model_unsupported"
    told = await this.told()
    assert told.code == "no_compressor"
    named = await this.told(replace(ASKED, compressor_model=SMOL))
    assert SMOL in named.reason
    assert max(len(pool.scores) for pool in (this.pool, *(mini.pool for mini in this.minis))) == 1


async def test_attack_a_machine_that_says_that_a_model_cannot_score_speaks_for_itself(home: Any) -> None:
    this = home("mini", "air")
    this.minis[0].pool.trouble = [ModelUnsupported("It cannot score.")] * 9
    for count in (240, 260):
        told = await this.told(text=f"Log {count}.\n\n{haystack(count)}")
        assert told.used, told
        assert told.nodes == ("air",)
    assert len(this.minis[0].pipes) == 1


async def test_a_machine_whose_card_says_that_it_is_measured_scores(home: Any) -> None:
    """This one knows no profile, so only machines that have one are asked, and for their own."""
    this = home("mini", "air")
    this.minis[0].scoring = "unmeasured"
    told = await this.told()
    assert told.nodes == ("air",)
    assert not this.minis[0].pipes
    this = home("mini")
    this.minis[0].scoring = "unmeasured"
    told = await this.told()
    assert (told.code, this.warmed) == ("measuring", [])
    assert "mini does that while it has nothing else to do" in told.reason
    assert not this.minis[0].pipes


@pytest.mark.parametrize("known", ["unmeasured", "", "unable"])
async def test_a_profile_that_this_machine_knows_holds_for_the_same_files_elsewhere(
    home: Any, known: str
) -> None:
    this = home("mini", profiles=Profiles())
    this.minis[0].scoring = known
    assert (await this.told()).nodes == ("mini",)
    assert [score.profile for score in this.minis[0].pool.scores] == [PROFILE]


async def test_a_machine_that_has_not_loaded_an_unmeasured_model_is_asked_to(home: Any) -> None:
    this = home("mini")
    this.minis[0].scoring, this.minis[0].state = "", "installed"
    assert (await this.told()).code == "measuring"
    assert this.warmed == ["mini"]


async def test_a_peers_prompt_does_not_wait_for_a_model_to_be_measured(ledger: Ledger) -> None:
    mini = Mini("mini", ledger)
    mini.pool.trouble = [ScorerNotReady("This model has not been measured for scoring yet.")]
    with pytest.raises(ScorerNotReady):
        await ask(mini, score())
    assert mini.pool.to_measure == [SMOL]


async def test_a_card_that_is_out_of_date_costs_nobody_an_answer(home: Any) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = [ScorerNotReady("This model has not been measured for scoring yet.")]
    assert (await this.told()).code == "scorer_not_ready"
    # Nor is it held against the machine.
    assert (await this.told(text=f"Another log.\n\n{haystack()}")).used


async def test_who_is_not_done_in_time_is_left_out_for_a_while(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = home("mini", "air")
    for mini in this.minis:
        mini.pool.trouble = [asyncio.Event()]
    monkeypatch.setattr(limits, "SMART_LATE", 0.0)
    monkeypatch.setattr(limits, "SMART_GRACE_S", WITHIN_S)
    # An hour passes once one of them is asked.
    this.clock = lambda: time.monotonic() + 3600.0 * any(mini.pool.scores for mini in this.minis)
    assert (await this.told()).code == "timeout"
    (slow,) = [mini for mini in this.minis if mini.pipes]
    (other,) = [mini for mini in this.minis if not mini.pipes]
    other.pool.trouble = []
    told = await this.told(text=f"Another log.\n\n{haystack()}")
    assert told.nodes == (other.name,)
    assert len(slow.pipes) == 1


async def test_who_did_its_part_does_not_pay_for_another_that_is_lost(home: Any) -> None:
    """Its segment goes to the one that is left; and no row is settled twice."""
    this = home("mini", "air")
    # One finds the heads and has scored its part; the other goes away.
    second, first = this.minis
    second.pool.trouble = [PeerLost("It went away.")]
    told = await this.told()
    assert told.used
    assert NEEDLE in this.sent
    assert [score.segment[0] for score in first.pool.scores] == [0, second.pool.scores[0].segment[0]]
    assert this.nodes() == {first.name: "settled", second.name: "refunded"}
    select = "SELECT COUNT(*) FROM usage WHERE request_id LIKE 'r1.score_'"
    assert this.store.call(lambda db: db.execute(select).fetchone()) == (2,)


@pytest.mark.parametrize(
    ("own", "nodes"),
    [
        ({"machine": MachineFacts(tier="large", cores=2)}, {"mini"}),
        ({"machine": MachineFacts(tier="tiny", cores=2)}, {"this", "mini"}),
        ({"machine": MachineFacts(tier="tiny", cores=2), "running": 20}, {"mini"}),
    ],
)
async def test_this_machine_is_taken_for_what_its_card_says(
    home: Any, own: dict[str, Any], nodes: set[str]
) -> None:
    """Small machines score first, and what computes something else counts for less."""
    this = home("mini", own=Card("me", 1, 1, models=[ModelCard(SMOL, digest=DIGEST)], **own))
    this.speeds.seed(SMOL, MeasuredSpeed(2200.0, 100.0), now_s=0.0)
    assert set((await this.told()).nodes) == nodes


async def test_one_that_failed_is_left_out_for_a_while(home: Any) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = [EngineDied("The engine died.")]
    assert (await this.told()).code == "engine_died"
    assert (await this.told()).code == "no_compressor"
    assert len(this.minis[0].pipes) == 1


async def test_who_leaves_ends_the_work_there(home: Any) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = [asyncio.Event()]
    events = this.runner.run(Job("m", chat(), "socket", "chat", smart=ASKED))
    while not this.minis[0].pipes:
        await anext(events)
    await events.aclose()
    assert this.minis[0].pipes[0].cancelled


def test_segments_tile_the_text_at_the_ends_of_lines() -> None:
    text = haystack()
    scorer = Scorer("", "this", PrefillSpeed(1.0))
    parts = [Segments(scorer, 0.0, 0.2), Segments(scorer, 0.2, 0.4), Segments(scorer, 0.4, 1.0, passes=3)]
    question = ScoringQuestion("r1", text, [])
    found = [segment for part in parts if (segment := cut(question, part))]
    assert found[0][0] == 0
    assert found[-1][1] == len(text)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(text[start - 1] == "\n" for start, _ in found[1:])
    assert cut(question, Segments(scorer, 0.0, 1.0)) == (0, 0)
    assert cut(ScoringQuestion("r1", "x" * 50, []), Segments(scorer, 0.75, 1.0)) == (38, 50)


@given(
    st.lists(st.tuples(st.sampled_from("ab \n"), st.integers(1, 300), st.booleans()), max_size=12),
    st.integers(1, 8),
)
def test_no_segment_is_all_question(pieces: list[tuple[str, int, bool]], machines: int) -> None:
    text, questions, own = "", [], 0
    for letter, many, asks in pieces:
        if asks:
            questions.append((len(text), len(text) + many))
        elif letter.strip():
            own += many
        text += letter * many
    question, scorer = ScoringQuestion("r1", text, questions), Scorer("", "this", PrefillSpeed(1.0))
    parts = [Segments(scorer, n / machines, (n + 1) / machines) for n in range(machines)]
    found = [segment for part in parts if (segment := cut(question, part))]
    if found == [(0, 0)]:
        return
    kept = ["".join(text[a:b] for a, b in question.own(*segment)) for segment in found]
    assert all(piece.strip() for piece in kept)
    # Nothing that is to be scored is lost, or scored twice.
    assert sum(len("".join(piece.split())) for piece in kept) == own
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))


async def test_a_long_question_at_the_end_is_nobodys_segment(home: Any) -> None:
    """A last user turn of a fifth of the text is all question: it is cut by what is to be scored."""
    this = home("mini", "air")
    for mini in this.minis:
        mini.context_tokens = 1200
    question = " ".join([QUESTION, *["Mind the weather and the harbour, please."] * 70])
    sent = [{"role": "user", "content": haystack()}, {"role": "user", "content": question}]
    job = Job("m", replace(chat(), prompt=ChatPrompt(sent)), "socket", "chat", smart=ASKED)
    async with asyncio.timeout(WITHIN_S):
        events = [event async for event in this.runner.run(job)]
    told = [event.smart for event in events if isinstance(event, Planned)][-1]
    assert told is not None
    assert told.used, told
    asked = [score for mini in this.minis for score in mini.pool.scores]
    assert max(end for _, end in (score.segment for score in asked)) > len(haystack())
    assert all(scored(score).tokens > 100 for score in asked)


# ---- The machine that is asked ---------------------------------------------------------------------------


def score(**fields: Any) -> Score:
    return replace(Score("r1.score0", haystack(), [(0, 10)]), **fields)


async def ask(mini: Mini, asked: Score, digest: str = DIGEST, model: str = SMOL) -> list[Any]:
    pipe = mini.open(messages.encode(messages.ScoreQuestion(model, digest, asked)))
    found = []
    async with asyncio.timeout(WITHIN_S):
        while (body := await pipe.receive()) is not None:
            if body != ALIVE:
                found.append(messages.decode_event(body))
    return found


async def test_a_machine_did_not_compute_for_longer_than_it_was_waited_for(home: Any) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = ["slow"]
    assert (await this.told()).used
    (trace,) = this.traces
    steps = {step.name: step.seconds for step in trace.steps if step.machine == "mini"}
    assert 0 < steps["computed"] <= steps["scored"] < WITHIN_S


async def test_who_leaves_while_the_ledger_writes_has_no_row_left_open(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, written = Mini("mini", ledger), asyncio.Event()
    reserve = ledger.reserve

    async def reserve_for_long(row: Any) -> None:
        await reserve(row)
        written.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ledger, "reserve", reserve_for_long)
    pipe = mini.open(messages.encode(messages.ScoreQuestion(SMOL, DIGEST, score())))
    await written.wait()
    pipe.cancel()
    await asyncio.wait({pipe._task})
    assert store.call(lambda db: db.execute("SELECT state, reason FROM usage").fetchall()) == [
        ("refunded", "cancelled")
    ]


async def test_an_honest_question_is_answered_and_billed_here_too(ledger: Ledger, store: Store) -> None:
    mini = Mini("mini", ledger)
    asked = score()
    *_, answer = await ask(mini, asked)
    assert answer.scores == scored(asked).scores
    (served,) = mini.pool.scores
    assert served.id != asked.id
    assert replace(served, id=asked.id) == asked
    rows = store.call(lambda db: db.execute("SELECT route, state, prompt_tokens > 0 FROM usage").fetchall())
    assert rows == [("score", "settled", 1)]


@pytest.mark.parametrize(
    ("changes", "digest", "model", "error"),
    [
        ({}, "e" * 64, SMOL, ModelNotFound),
        ({}, "short", SMOL, ProtocolError),
        ({}, DIGEST, "/etc/passwd", ProtocolError),
        ({"questions": [(5, 4)]}, DIGEST, SMOL, ProtocolError),
        ({"questions": [(0, 10**9)]}, DIGEST, SMOL, ProtocolError),
        ({"questions": [(0, 1)] * (limits.MESSAGES + 1)}, DIGEST, SMOL, ProtocolError),
        ({"segment": (0, 10**9)}, DIGEST, SMOL, ProtocolError),
        ({"id": ""}, DIGEST, SMOL, ProtocolError),
    ],
)
async def test_attack_a_peer_asks_for_what_makes_no_sense(
    ledger: Ledger, changes: dict[str, Any], digest: str, model: str, error: type[FleetError]
) -> None:
    mini = Mini("mini", ledger)
    with pytest.raises(error):
        await ask(mini, score(**changes), digest, model)
    assert not mini.pool.scores


async def test_attack_garbage_instead_of_a_question(ledger: Ledger) -> None:
    for body in (b"", b"\xc1", b"\x80", b"\x93" * 100_000, struct.pack(">I", 5)):
        with pytest.raises(ProtocolError):
            await Mini("mini", ledger).server("peer", body, RequestPipe(lambda pipe: asyncio.sleep(0)))


async def test_attack_scores_without_end() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        messages.decode_event(b"x" * (limits.SMART_SCORES_BYTES + 1))
    with pytest.raises(ProtocolError):
        messages.decode_event(b"\xc1")


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 2**62},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": -1.0},
        {"seconds": 1e300},
    ],
)
def test_attack_figures_that_cannot_be(change: dict[str, Any]) -> None:
    """They would go to the ledger, to traces and to prices."""
    with pytest.raises(ProtocolError):
        messages.decode_event(messages.encode(replace(scored(score()), **change)))


async def test_a_stopping_machine_takes_no_new_work(ledger: Ledger) -> None:
    with pytest.raises(Draining):
        await ask(Mini("mini", ledger, draining=True), score())


async def test_attack_one_peer_cannot_have_many_prompts_scored_at_once(ledger: Ledger) -> None:
    mini = Mini("mini", ledger)
    server, gate = mini.server, asyncio.Event()
    mini.pool.trouble = [gate] * limits.SMART_SERVED
    body = messages.encode(messages.ScoreQuestion(SMOL, DIGEST, score()))
    running = [RequestPipe(lambda pipe: server("peer", body, pipe)) for _ in range(limits.SMART_SERVED)]
    for pipe in running:
        await pipe.receive()
    with pytest.raises(Overloaded):
        await server("peer", body, running[0])
    gate.set()


def test_progress_crosses_the_wire() -> None:
    for event in (Loading("reading", 1, 2), Prefill("r1", 3, 4), scored(score())):
        assert messages.decode_event(messages.encode(event)) == event


async def test_a_machine_that_answers_elsewhere_is_priced_by_its_own_account(
    ledger: Ledger, store: Store
) -> None:
    mini = Mini("mini", ledger)
    pool, others = ScoringPool(), Neighbours([mini])
    scorers = Scorers(pool, models("m"), ModelSpeeds(), Members(others.machines))
    speed = scorers.speed_at("mini", SMOL)
    assert speed is not None
    assert speed.total(1.0, range(2000), 256) == pytest.approx(1.0, rel=0.01)
    assert scorers.speed_at("mini", "other") is None
    assert scorers.speed_at("air", SMOL) is None
    assert scorers.speed_at("", "m") is None


async def test_what_scoring_took_corrects_scoring_by_that_model_there_and_not_its_prefill(
    ledger: Ledger, store: Store
) -> None:
    mini = Mini("mini", ledger)
    members = Members(Neighbours([mini]).machines)
    scorers = Scorers(ScoringPool(), models("m"), ModelSpeeds(), members)
    (model,) = mini.machine.card.models
    known = scorers.speed_at("mini", SMOL)
    assert known is not None
    scorer = Scorer("mini", "mini", known)
    work = ScoringJob(ScoringQuestion("r1", "text", []), CompressorModel(SMOL, model.digest))
    work.ran["mini"] = ScorerRun(scorer, tokens=4000, passes=1, computed_s=3 * scorer.seconds(4000, around=0))
    scorers.learn(work, late=False)
    assert members.correction("mini", model.digest, known, "score") == pytest.approx(2.0, rel=0.01)
    assert members.correction("mini", model.digest, known) == 1
    # The next prompt is priced by it.
    _, (found,) = await scorers.find(SmartPrefillPolicy(), 1 << 40, False)
    assert found.correction == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("accelerator", "code"), [("cuda", ""), ("metal", "slower")])
async def test_a_first_score_that_compiled_kernels_does_not_make_the_next_one_seem_slower(
    ledger: Ledger, accelerator: str, code: str
) -> None:
    shown = Mini("mini", ledger).machine
    facts = replace(shown.card, machine=replace(shown.card.machine, accelerator=accelerator))
    members = Members(lambda: [replace(shown, card=facts)])
    scorers = Scorers(ScoringPool(), models("m"), ModelSpeeds(), members)
    _, (scorer,) = await scorers.find(SmartPrefillPolicy(), 1 << 40, False)
    (model,) = shown.card.models
    # All of the prompt takes twice as long as scoring it.
    seconds = scorer.seconds(4000)
    asked = SmartPrefillQuestion(4000, 0.0, scorer.speed, dense_s=2 * seconds)
    assert plan(asked, [scorer]).worth_it
    work = ScoringJob(ScoringQuestion("r1", "text", []), CompressorModel(SMOL, model.digest))
    work.ran["mini"] = ScorerRun(scorer, tokens=4000, passes=1, computed_s=50 + seconds)
    scorers.learn(work, late=False)
    _, (scorer,) = await scorers.find(SmartPrefillPolicy(), 1 << 40, False)
    assert plan(asked, [scorer]).code == code
