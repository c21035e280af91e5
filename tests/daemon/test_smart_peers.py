"""Prompts scored on other machines: what is asked of them, what they may ask, what happens when they fail."""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from smart_fakes import NEEDLE, PROFILE, ScoringPool, SmartModels, chat, haystack, scored

from fleetd import limits
from fleetd.engine.protocol import Finished, Loading, Prefill, Score
from fleetd.errors import Draining, EngineDied, FleetError, ModelNotFound, Overloaded, PeerLost, ProtocolError
from fleetd.jobs.job import Job, Planned
from fleetd.jobs.messages import ALIVE
from fleetd.jobs.placing import Machine
from fleetd.jobs.runner import Runner
from fleetd.jobs.served import Host
from fleetd.jobs.smart import wire
from fleetd.jobs.smart.compressing import Compressing
from fleetd.jobs.smart.requests import Smart
from fleetd.jobs.smart.scoring import Scoring, cut
from fleetd.jobs.smart.serving import ScoreServer
from fleetd.jobs.smart.views import Smartened
from fleetd.ledger import Ledger
from fleetd.metrics import Metrics
from fleetd.p2p.cards import Card, MachineFacts, ModelCard
from fleetd.plan.costs import Speed
from fleetd.plan.route import USABLE
from fleetd.plan.smart import Scorer, Segments
from fleetd.plan.speeds import SpeedBook
from fleetd.smart.policy import Policy
from fleetd.store import Store

WITHIN_S = 20.0
DIGEST = "d" * 64
SMOL = "smollm2-135m"
ASKED = Policy(enabled=True, target_ratio=0.2, min_prompt_tokens=500)


class Pipe:
    """Both ends of one request: what the server sends is what the client receives."""

    def __init__(self, serve: Callable[[Any], Any]) -> None:
        self._sent: asyncio.Queue[bytes | FleetError | None] = asyncio.Queue()
        self.cancelled = False
        self._task = asyncio.create_task(self._run(serve))

    async def _run(self, serve: Callable[[Any], Any]) -> None:
        try:
            await serve(self)
            self._sent.put_nowait(None)
        except FleetError as error:
            self._sent.put_nowait(error)

    async def receive(self) -> bytes | None:
        found = await self._sent.get()
        if isinstance(found, FleetError):
            raise found
        return found

    def send(self, body: bytes) -> None:
        self._sent.put_nowait(body)

    async def drained(self) -> None: ...

    def end(self) -> None: ...

    def cancel(self, error: FleetError | None = None) -> None:
        self.cancelled = True
        self._task.cancel()


def card(node_id: str, tier: str = "tiny", **fields: Any) -> Card:
    model = ModelCard(
        SMOL,
        digest=DIGEST,
        roles=["chat", "compressor"],
        weights_bytes=1000,
        context_tokens=100_000,
        state="loaded",
        prefill_tok_s=2000.0,
    )
    machine = MachineFacts(tier=tier, cores=2, accelerator="cpu")
    return Card(node_id, 1, 1, models=[replace(model, **fields)], machine=machine)


@dataclass
class Mini:
    """A small machine. ``trouble``: what happens instead of scores, or "silent", "garbage"."""

    name: str
    ledger: Ledger
    pool: ScoringPool = field(default_factory=ScoringPool)
    sees_prompts: bool = True
    reach: str = USABLE
    silent: bool = False
    draining: bool = False
    pipes: list[Pipe] = field(default_factory=list)

    @property
    def machine(self) -> Machine:
        return Machine(card(self.name), self.name, self.reach, self.sees_prompts, 0.001, 1e9)

    @property
    def server(self) -> ScoreServer:
        models = SmartModels([SMOL])
        host = Host(models, lambda: card(self.name), draining=lambda: self.draining)
        return ScoreServer(self.pool, host, self.ledger)

    def open(self, body: bytes) -> Pipe:
        async def serve(pipe: Pipe) -> None:
            if self.silent:
                await asyncio.Event().wait()
            await self.server("me", body, pipe)

        self.pipes.append(Pipe(serve))
        return self.pipes[-1]


@dataclass
class Neighbours:
    minis: list[Mini]

    def machines(self) -> Iterable[Machine]:
        return [mini.machine for mini in self.minis]

    def request(self, node_id: str, method: str, body: bytes) -> Pipe:
        assert method == wire.SCORE
        return next(mini for mini in self.minis if mini.name == node_id).open(body)


@dataclass
class Home:
    runner: Runner
    pool: ScoringPool
    minis: list[Mini]
    store: Store

    async def told(self, policy: Policy = ASKED, **fields: Any) -> Smartened:
        job = Job("m", chat(), **{"origin": "socket", "route": "chat", "smart": policy, **fields})
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
    def make(*names: str, compressor_here: bool = False) -> Home:
        minis = [Mini(name, ledger) for name in names]
        pool, speeds = ScoringPool(), SpeedBook()
        speeds.seed("m", 100.0, 100.0)
        speeds.seed(SMOL, 500.0, 100.0)
        models = SmartModels(["m", SMOL] if compressor_here else ["m"])
        others = Neighbours(minis)
        own = [ModelCard(SMOL, digest=DIGEST)] if compressor_here else []
        compressing = Compressing(
            Scoring(pool, others, monotonic=time.monotonic),
            pool,
            models,
            ledger,
            speeds,
            fleet=others,
            own_models=lambda: own,
        )
        smart = Smart(compressing, pool, metrics, lambda trace: None)
        runner = Runner(
            pool=pool,
            models=models,
            ledger=ledger,
            metrics=metrics,
            default_model="m",
            embedded=lambda ref: None,
            smart=smart,
            speeds=speeds,
        )
        return Home(runner, pool, minis, store)

    return make


# ---- The machine that asks -------------------------------------------------------------------------------


async def test_a_small_machine_scores_what_a_large_one_reads(home: Any) -> None:
    this = home("mini")
    told = await this.told()
    assert (told.form, told.nodes) == ("text", ("mini",))
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


async def test_scores_that_do_not_fit_are_a_failure_like_any_other(home: Any) -> None:
    this = home("mini")
    this.minis[0].pool.trouble = ["garbage"]
    assert (await this.told()).code == "protocol_error"
    assert this.pool.asked == [chat()]


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
    await anext(events)
    await events.aclose()
    assert this.minis[0].pipes[0].cancelled


def test_segments_tile_the_text_at_the_ends_of_lines() -> None:
    text = haystack()
    scorer = Scorer("", "this", Speed(1.0))
    parts = [Segments(scorer, 0.0, 0.4, 2), Segments(scorer, 0.4, 1.0, 3)]
    found = [segment for part in parts for segment in cut(text, part)]
    assert found[0][0] == 0
    assert found[-1][1] == len(text)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(text[start - 1] == "\n" for start, _ in found[1:])
    assert cut(text, Segments(scorer, 0.0, 1.0)) == [(0, 0)]
    assert cut("x" * 50, Segments(scorer, 0.0, 1.0, 4))[-1][1] == 50


# ---- The machine that is asked ---------------------------------------------------------------------------


def score(**fields: Any) -> Score:
    return replace(Score("r1.score0", haystack(), [(0, 10)]), **fields)


async def ask(mini: Mini, asked: Score, digest: str = DIGEST, model: str = SMOL) -> list[Any]:
    pipe = mini.open(wire.encode(wire.Ask(model, digest, asked)))
    found = []
    async with asyncio.timeout(WITHIN_S):
        while (body := await pipe.receive()) is not None:
            if body != ALIVE:
                found.append(wire.decode_event(body))
    return found


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
        ({"look_ahead": limits.SMART_LOOK_AHEAD + 1}, DIGEST, SMOL, ProtocolError),
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
            await Mini("mini", ledger).server("peer", body, Pipe(lambda pipe: asyncio.sleep(0)))


async def test_attack_scores_without_end() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode_event(b"x" * (limits.SMART_SCORES_BYTES + 1))
    with pytest.raises(ProtocolError):
        wire.decode_event(b"\xc1")


async def test_a_stopping_machine_takes_no_new_work(ledger: Ledger) -> None:
    with pytest.raises(Draining):
        await ask(Mini("mini", ledger, draining=True), score())


async def test_attack_one_peer_cannot_have_many_prompts_scored_at_once(ledger: Ledger) -> None:
    mini = Mini("mini", ledger)
    server, gate = mini.server, asyncio.Event()
    mini.pool.trouble = [gate] * limits.SMART_SERVED
    body = wire.encode(wire.Ask(SMOL, DIGEST, score()))
    running = [Pipe(lambda pipe: server("peer", body, pipe)) for _ in range(limits.SMART_SERVED)]
    for pipe in running:
        await pipe.receive()
    with pytest.raises(Overloaded):
        await server("peer", body, running[0])
    gate.set()


def test_progress_crosses_the_wire() -> None:
    for event in (Loading("reading", 1, 2), Prefill("r1", 3, 4), scored(score())):
        assert wire.decode_event(wire.encode(event)) == event


async def test_a_machine_that_answers_elsewhere_is_priced_by_its_own_account(
    ledger: Ledger, store: Store
) -> None:
    mini = Mini("mini", ledger)
    pool, others = ScoringPool(), Neighbours([mini])
    scoring = Scoring(pool, others, monotonic=time.monotonic)
    compressing = Compressing(scoring, pool, SmartModels(["m"]), ledger, SpeedBook(), fleet=others)
    speed = compressing.speed_at("mini", SMOL)
    assert speed is not None
    assert speed.total(1.0, range(2000), 256) == pytest.approx(1.0, rel=0.01)
    assert compressing.speed_at("mini", "other") is None
    assert compressing.speed_at("air", SMOL) is None
    assert compressing.speed_at("", "m") is None
