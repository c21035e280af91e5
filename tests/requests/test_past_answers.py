"""Past answers between machines: who is told, what is said, what is believed; nobody waits for any of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

import fleet_nodes
import requests_driver
from requests_driver import request_of
from sharing_fakes import DIGEST, FACTS, WITHIN_S, FakeFolder, FakeModels, own_card

from fleetd import limits
from fleetd.engine.protocol import Delta, Event, Finished, Generate, Ready, Remember, Speculate, TextPrompt
from fleetd.engine.speculation.suffix import past_key
from fleetd.errors import FleetError, ModelNotFound, PeerUnreachable, ProtocolError
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.node import Node
from fleetd.plan.route import USABLE
from fleetd.requests.drafting import messages
from fleetd.requests.drafting.pasts import Allowance, Pasts
from fleetd.requests.job import Job, Planned
from fleetd.requests.pipeline import Pipeline
from fleetd.requests.placement import Member

FOLDER = FakeFolder("m")
IDS = [n % 90 for n in range(40)]
KEY = "the team's own key"


@dataclass
class Engine:
    facts: Ready | None = FACTS
    told: list[Remember] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def remember(self, told: Remember) -> None:
        self.told.append(told)
        self.heard.set()


@dataclass
class Pool:
    fake: Engine | None = field(default_factory=Engine)

    def engine(self, folder: Any) -> Engine | None:
        assert folder.name == "m"
        return self.fake


class Silent:
    """A stream that nobody answers."""

    cancelled = False

    def end(self) -> None:
        pass

    async def receive(self) -> bytes | None:
        await asyncio.Event().wait()
        return None

    def cancel(self, error: FleetError | None = None) -> None:
        self.cancelled = True


@dataclass
class Others:
    """``pasts.Partners`` that writes down what is sent."""

    found: list[Member]
    error: FleetError | None = None
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)
    streams: list[Silent] = field(default_factory=list)

    def machines(self) -> list[Member]:
        return self.found

    def request(self, node_id: str, method: str, body: bytes) -> Any:
        self.sent.append((node_id, method, body))
        if self.error is not None:
            raise self.error
        self.streams.append(Silent())
        return self.streams[-1]


def card(name: str = "peer", **fields: Any) -> Card:
    model = {key: fields.pop(key) for key in ("digest", "state") if key in fields}
    return replace(own_card(name, **model), **{"remembers": True, **fields})


def machine(name: str = "peer", *, sees: bool = True, reach: str = USABLE, **fields: Any) -> Member:
    return Member(card(name, **fields), name, reach, sees, 0.001)


def pasts(others: Others, pool: Pool | None = None, **options: Any) -> Pasts:
    return Pasts(others, pool or Pool(), FakeModels(), lambda: own_card("home"), **options)


def job(**fields: Any) -> Job:
    request = Generate("r1", TextPrompt("the prompt"), speculate=fields.pop("speculate", Speculate(key=KEY)))
    return Job("m", request, **{"origin": "socket", "route": "chat", **fields})


async def answered(this: Pasts, asked: Job, reason: Any = "stop", ids: list[int] = IDS) -> list[Any]:
    async def events(generate: Generate) -> AsyncGenerator[Event, None]:
        yield Delta("r1", "a text")
        yield Finished("r1", reason, ids=ids if generate.ids else [])

    told = requests_driver.answered(Pipeline([this]), request_of(asked, FOLDER), events)
    return [event async for event in told if not isinstance(event, Planned)]


def asking(this: Pasts, asked: Job) -> bool:
    """Whether the engine is asked for the answer's tokens."""
    request = request_of(asked, FOLDER)
    this.prepare(request)
    return request.generate.ids


# ---- who is told -----------------------------------------------------------------------------------------


async def test_those_who_remember_are_told_the_tokens_and_nothing_else() -> None:
    others = Others([machine("one"), machine("two")])
    this = pasts(others)
    async with asyncio.timeout(WITHIN_S):
        events = await answered(this, job())
        # Whoever asked gets the answer as ever, and waits for none of them.
        assert events == [Delta("r1", "a text"), Finished("r1", "stop")]
        await asyncio.sleep(0)
        assert [(node, method) for node, method, _ in others.sent] == [
            ("one", "draft.remember"),
            ("two", "draft.remember"),
        ]
        await this.close()
    assert all(stream.cancelled for stream in others.streams)
    body = others.sent[0][2]
    assert messages.decode(body, messages.Past) == messages.Past(DIGEST, past_key(KEY), IDS)
    for secret in (b"the prompt", b"a text", KEY.encode()):
        assert secret not in body


@pytest.mark.parametrize(
    "fields",
    [
        {"remembers": False},
        {"draining": True},
        {"sees": False},
        {"reach": "It is gone."},
        {"digest": "e" * 64},
        {"digest": ""},
        {"state": "installed"},
    ],
    ids=str,
)
async def test_who_has_no_use_for_it_or_may_not_see_it_is_not_told(fields: dict[str, Any]) -> None:
    this = pasts(Others([machine(**fields)]))
    assert not asking(this, job())


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"local_only": True}, {}),
        ({"local_only": True, "origin": "http"}, {}),
        ({}, {"local_only": True}),
        ({"origin": "peer"}, {"local_only": True}),
        ({"speculate": Speculate(enabled=False)}, {}),
    ],
    ids=str,
)
async def test_the_answer_to_a_prompt_that_stays_stays_too(asked: dict[str, Any], options: Any) -> None:
    others = Others([machine()])
    this = pasts(others, **options)
    assert not asking(this, job(**asked))
    await answered(this, job(**asked))
    await this.close()
    assert others.sent == []


async def test_a_prompt_that_came_from_a_peer_was_allowed_to_leave_it() -> None:
    this = pasts(Others([machine()]))
    assert asking(this, job(local_only=True, origin="peer"))


async def test_a_wish_for_tokens_from_elsewhere_counts_for_nothing() -> None:
    asked = job(local_only=True)
    asked = dataclasses.replace(asked, request=replace(asked.request, ids=True))
    assert not asking(pasts(Others([machine()])), asked)


@pytest.mark.parametrize(("reason", "ids"), [("cancelled", IDS), ("stop", IDS[:3]), ("stop", [])], ids=str)
async def test_half_an_answer_is_not_worth_telling(reason: Any, ids: list[int]) -> None:
    others = Others([machine()])
    this = pasts(others)
    events = await answered(this, job(), reason, ids)
    await asyncio.sleep(0)
    assert events[-1] == Finished("r1", reason)
    assert others.sent == []


async def test_machines_that_cannot_be_reached_or_take_nothing_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = Others([machine()], PeerUnreachable("It is gone."))
    fates: list[str] = []
    this = Pasts(gone, Pool(), FakeModels(), lambda: own_card("home"), fates.append)
    await answered(this, job())
    while this._sending:  # noqa: ASYNC110  (tasks that end by themselves, at once)
        await asyncio.sleep(0)
    assert len(gone.sent) == 1

    monkeypatch.setattr(limits, "PAST_SENDING", 3)
    silent = Others([machine()])
    this = pasts(silent)
    for _ in range(10):
        await answered(this, job())
        await asyncio.sleep(0)
    assert len(silent.sent) == 3
    await this.close()
    assert fates == []


async def test_a_machine_that_answers_a_lot_does_not_tell_all_of_it() -> None:
    others, now = Others([machine()], PeerUnreachable("x")), [100.0]
    this = pasts(others, monotonic=lambda: now[0])

    async def burst() -> int:
        before = len(others.sent)
        for _ in range(limits.PAST_BURST + 9):
            await answered(this, job())
            await asyncio.sleep(0)
        return len(others.sent) - before

    assert await burst() == limits.PAST_BURST
    now[0] += 2.0
    assert await burst() == 2 * limits.PAST_PER_S


def test_an_allowance_comes_back_with_time_and_no_further() -> None:
    allowance = Allowance(burst=2, per_s=1.0)
    assert [allowance.take(0.0) for _ in range(3)] == [True, True, False]
    assert [allowance.take(now) for now in (0.5, 1.0, 1.1)] == [False, True, False]
    assert [allowance.take(100.0) for _ in range(3)] == [True, True, False]


# ---- what is believed ------------------------------------------------------------------------------------


def told(**changes: Any) -> bytes:
    return messages.encode(
        messages.Past(**{"digest": DIGEST, "key": past_key(KEY), "tokens": IDS, **changes})
    )


async def take(body: bytes, pool: Pool, own: Card | None = None, models: Any = None) -> list[str]:
    fates: list[str] = []
    this = Pasts(Others([]), pool, models or FakeModels(), lambda: own or own_card("here"), fates.append)
    await this("peer", body, Silent())  # type: ignore[arg-type]
    return fates


async def test_an_answer_reaches_the_worker_that_has_the_model() -> None:
    pool = Pool()
    assert await take(told(), pool) == ["taken"]
    assert pool.fake is not None
    assert pool.fake.told == [Remember(past_key(KEY), IDS)]


class Removed:
    def resolve(self, ref: str) -> Any:
        raise ModelNotFound(f"no {ref}")


@pytest.mark.parametrize(
    ("body", "pool", "own", "models"),
    [
        (told(digest="e" * 64), Pool(), None, None),
        (told(), Pool(None), None, None),
        (told(), Pool(Engine(None)), None, None),
        (told(), Pool(), own_card("here", state="installed"), None),
        (told(), Pool(), own_card("here", digest=""), None),
        (told(), Pool(), None, Removed()),
        (told(tokens=[*IDS, FACTS.vocab_size]), Pool(), None, None),
    ],
    ids=range(7),
)
async def test_what_does_not_fit_is_dropped_without_a_word(
    body: bytes, pool: Pool, own: Any, models: Any
) -> None:
    assert await take(body, pool, own, models) == ["dropped"]
    assert pool.fake is None or pool.fake.told == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000,
        told(digest="D" * 64),
        told(digest="d" * 63),
        told(key="a key"),
        told(key=""),
        told(tokens=[]),
        told(tokens=[-1]),
        told(tokens=[2**31]),
        told(tokens=[1] * (limits.PAST_TOKENS + 1)),
        told() + bytes(limits.SHARE_MESSAGE_BYTES),
    ],
    ids=range(12),
)
async def test_what_no_honest_peer_tells_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        await take(body, Pool())


async def test_a_flood_is_dropped_and_others_are_still_heard() -> None:
    pool, now = Pool(), 5.0
    this = Pasts(Others([]), pool, FakeModels(), lambda: own_card("here"), monotonic=lambda: now)
    assert pool.fake is not None
    for _ in range(3 * limits.PAST_BURST):
        await this("flooder", told(), Silent())  # type: ignore[arg-type]
    assert len(pool.fake.told) == limits.PAST_BURST
    await this("another", told(), Silent())  # type: ignore[arg-type]
    assert len(pool.fake.told) == limits.PAST_BURST + 1


# ---- between two machines --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Node, Node]]:
    home, peer = (Node(fleet_nodes.settings(folder, name)) for name in ("home", "peer"))
    async with fleet_nodes.running(home, peer):
        await fleet_nodes.introduce(home, peer)
        await fleet_nodes.together([home, peer])
        yield home, peer


async def test_an_answer_crosses_the_session(tmp_path: Path) -> None:
    async with two(tmp_path) as (home, peer):
        pool, sent = Pool(), list[str]()
        peer.handle(messages.REMEMBER, Pasts(Others([]), pool, FakeModels(), lambda: own_card("peer")))

        class Members(Others):
            def request(self, node_id: str, method: str, body: bytes) -> Any:
                return home.request(peer.identity.node_id, method, body)

        this = Pasts(Members([machine()]), Pool(), FakeModels(), lambda: own_card("home"), sent.append)
        assert pool.fake is not None
        async with asyncio.timeout(WITHIN_S):
            await answered(this, job())
            await pool.fake.heard.wait()
            while this._sending:  # noqa: ASYNC110  (it has arrived; nothing announces the rest)
                await asyncio.sleep(0.001)
        assert pool.fake.told == [Remember(past_key(KEY), IDS)]
        assert sent == ["sent"]
        await this.close()
