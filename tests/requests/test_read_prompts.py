"""Requests that belong together: a session goes on where its prompt was read, and people are told why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from fakes import FakeModels, FakePool, answer
from member_cards import OWN, collect, machine, spoken
from msgspec.structs import replace
from peer_streams import FakeOthers
from runners import runner_over

from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Prefill,
    TextPrompt,
    ToolCallPiece,
    Usage,
)
from fleetd.errors import EngineDied, FleetError, PeerLost
from fleetd.models.model_names import ModelNames
from fleetd.plan.affinity import BLOCK_CHARS
from fleetd.plan.beginnings import KeptBeginning
from fleetd.requests.job import CHARS_PER_TOKEN, Job
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement.placement import Placer
from fleetd.storage.store import Store

TEXT = "".join(chr(65 + i % 26) * BLOCK_CHARS for i in range(80))
WHOLE = spoken(*answer())
REPEATED = Generate("r2", TextPrompt(TEXT + "And more."), max_tokens=10)


class ScriptedFleet:
    """A runner among scripted machines, and what it wrote down."""

    def __init__(
        self, store: Store, *found: Any, pool: Any = None, here: bool = False, **scripts: Any
    ) -> None:
        self.others = FakeOthers(*found, **scripts)
        self.traces: asyncio.Queue[Trace] = asyncio.Queue()
        self.members = Members(self.others.machines, lambda: OWN)
        self.runner = runner_over(
            pool or FakePool(answer()),
            FakeModels(names=["big"] if here else []),
            Ledger(store),
            Metrics("0"),
            names=ModelNames("big"),
            placer=Placer(self.members, self.others.request),
            members=self.members,
            record=self.traces.put_nowait,
        )

    async def ask(self, text: str = TEXT, session: str = "") -> list[Any]:
        return await collect(self.runner.run(job(text, session)))

    def known(self, node_id: str, text: str = TEXT) -> int:
        return self.members.known_tokens(node_id, "big", text) * CHARS_PER_TOKEN


Make = Callable[..., ScriptedFleet]


@pytest.fixture
def make(store: Store) -> Make:
    def build(*found: Any, **more: Any) -> ScriptedFleet:
        return ScriptedFleet(store, *found, **more)

    return build


def job(text: str = TEXT, session: str = "") -> Job:
    return Job("big", Generate("r1", TextPrompt(text), max_tokens=10), "http", "chat", session=session)


async def test_a_fork_finds_the_prompt_at_its_first_token_not_at_its_last(make: Make) -> None:
    fleet = make(machine("a"), a=[[*spoken(Accepted("r1", 20), Delta("r1", "Hello")), None]])
    async with aclosing(fleet.runner.run(job())) as events:
        while not isinstance(await anext(events), Delta):
            pass
        assert fleet.known("a") == len(TEXT)


async def test_an_answer_that_begins_within_a_tool_call_has_read_its_prompt_as_well(make: Make) -> None:
    begun = spoken(Accepted("r1", 20), ToolCallPiece("r1", 0, "c", "f", "{"))
    fleet = make(machine("a"), a=[[*begun, None]])
    async with aclosing(fleet.runner.run(job())) as events:
        while not isinstance(await anext(events), ToolCallPiece):
            pass
        assert fleet.known("a") == len(TEXT)


async def test_the_same_prompt_at_the_same_time_goes_to_the_machine_that_reads_it(make: Make) -> None:
    hangs = [*spoken(Accepted("r1", 1000)), None]
    fleet = make(machine("a", faster=1.05), machine("b"), a=[hangs, WHOLE], b=[WHOLE, WHOLE])
    for name in "ab":
        fleet.members.succeeded(name, "answer")
    async with aclosing(fleet.runner.run(job())) as events:
        while not isinstance(await anext(events), Accepted):
            pass
        # The other one is as fast by now, and has less to do.
        fleet.others.found[1] = machine("b", faster=1.1)
        await collect(fleet.runner.run(replace(job(TEXT + "And more."), request=REPEATED)))
        assert fleet.others.order == ["a", "a"]
    # It was given up before anything was read.
    fleet.members.affinity.forget(machine("a").life, "big")
    await fleet.ask()
    assert fleet.others.order == ["a", "a", "b"]


async def test_a_prompt_is_read_again_where_that_is_clearly_sooner_than_waiting_for_it(make: Make) -> None:
    hangs = [*spoken(Accepted("r1", 10_000)), None]
    fleet = make(machine("a", faster=1.05), machine("b"), a=[hangs], b=[WHOLE])
    for name in "ab":
        fleet.members.succeeded(name, "answer")
    async with aclosing(fleet.runner.run(job())) as events:
        while not isinstance(await anext(events), Accepted):
            pass
        fleet.others.found[1] = machine("b", faster=1.5)
        await collect(fleet.runner.run(replace(job(TEXT + "And more."), request=REPEATED)))
    assert fleet.others.order == ["a", "b"]


async def test_a_prompt_that_was_given_up_half_way_is_known_as_far_as_it_was_read(make: Make) -> None:
    """A client whose time is up leaves, and sends the same again: it goes to the same machine."""
    script = [*spoken(Accepted("r1", 1000), Prefill("r1", 500, 1000)), None]
    fleet = make(machine("a"), machine("b", faster=1.05), a=[WHOLE], b=[script, WHOLE])
    async with aclosing(fleet.runner.run(job())) as events:
        while not isinstance(await anext(events), Prefill):
            pass
    assert fleet.others.streams[0].cancelled
    assert (fleet.known("a"), fleet.known("b")) == (0, len(TEXT) // 2)
    # The other is as fast by now, and has to read all of it.
    fleet.others.found[1] = machine("b")
    await fleet.ask()
    assert fleet.others.order == ["b", "b"]


@pytest.mark.parametrize(("error", "known"), [(EngineDied("It died."), 0), (PeerLost("It left."), len(TEXT))])
async def test_an_engine_that_died_has_lost_what_it_read(make: Make, error: FleetError, known: int) -> None:
    fleet = make(machine("a"), a=[WHOLE, [error]])
    await fleet.ask()
    assert fleet.known("a") == len(TEXT)
    with pytest.raises(FleetError):
        await fleet.ask()
    assert fleet.known("a") == known


async def test_a_request_that_only_counts_reads_nothing(make: Make) -> None:
    pool = FakePool([Accepted("r1", 20), Finished("r1", "stop")])
    fleet = make(pool=pool, here=True)
    await fleet.ask()
    assert fleet.known("") == 0


async def test_a_session_stays_between_machines_that_are_about_equal(make: Make) -> None:
    """Its prompts are too short for a difference in price, or change from their beginning on."""
    fleet = make(machine("a", faster=1.02), machine("b"), a=[WHOLE] * 3, b=[WHOLE])
    await fleet.ask("One.", "mine")
    fleet.others.found = [machine("a"), machine("b", faster=1.05)]
    await fleet.ask("Two.", "mine")
    assert fleet.others.order == ["a", "a"]
    await fleet.ask("Three.", "another")
    assert fleet.others.order == ["a", "a", "b"]
    fleet.others.found[1] = machine("b", faster=2.0)
    fleet.others.scripts["b"] = [WHOLE]
    await fleet.ask("Four.", "mine")
    assert fleet.others.order[-1] == "b", "it leaves for a machine that is clearly faster"


async def test_a_session_without_a_name_stays_where_most_of_its_prompt_was_read(make: Make) -> None:
    fleet = make(machine("a", faster=1.05), machine("b"), a=[WHOLE, WHOLE], b=[WHOLE])
    await fleet.ask(TEXT)
    # To read the new half on a takes a little longer than to read all of it on b.
    fleet.others.found = [machine("a"), machine("b", faster=2.1)]
    await fleet.ask(TEXT + "Another text. " * (len(TEXT) // 15))
    assert fleet.others.order == ["a", "a"]
    fleet.others.found[1] = machine("b", faster=4.0)
    await fleet.ask(TEXT + "A third text. " * (len(TEXT) // 15))
    assert fleet.others.order[-1] == "b", "it leaves for a machine that is clearly faster"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"draining": True}, "a is stopping."),
        ({"waiting": limits.QUEUED_REQUESTS}, f"a has {limits.QUEUED_REQUESTS} requests waiting already."),
    ],
)
async def test_a_session_leaves_a_machine_that_is_full_or_stopping_and_the_trace_says_why(
    make: Make, change: dict[str, Any], why: str
) -> None:
    fleet = make(machine("a", faster=1.02), machine("b"), a=[WHOLE], b=[WHOLE])
    await fleet.ask(session="s")
    there = fleet.others.found[0]
    fleet.others.found[0] = replace(there, card=replace(there.card, **change))
    await fleet.ask(session="s")
    assert fleet.others.order == ["a", "b"]
    assert (await fleet.traces.get()).kept_where == ""
    told = (await fleet.traces.get()).kept_where
    assert told == f"a has read about 10240 tokens of the prompt before. {why}"


async def test_a_machine_that_reads_all_of_it_sooner_is_asked_and_the_trace_says_so(make: Make) -> None:
    fleet = make(machine("a"), a=[WHOLE, WHOLE], b=[WHOLE])
    await fleet.ask()
    await fleet.ask()
    fleet.others.found.append(machine("b", faster=500))
    await fleet.ask()
    assert fleet.others.order == ["a", "a", "b"]
    known = "a has read about 10240 tokens of the prompt before."
    told = [(await fleet.traces.get()).kept_where for _ in range(3)]
    assert told[:2] == ["", known]
    assert told[2].startswith(f"{known} The answer would take")


async def test_a_machine_that_unloaded_the_model_has_lost_the_prompt(make: Make) -> None:
    fleet = make(machine("b"), machine("a", reach="It is away."), b=[WHOLE], a=[WHOLE])
    await fleet.ask()
    fleet.others.found = [machine("a"), machine("b", state="installed", load_s=0.001)]
    await fleet.ask()
    assert fleet.others.order == ["b", "a"]


async def test_attack_no_other_machine_learns_what_a_session_is_called(make: Make) -> None:
    fleet = make(machine("a"), a=[WHOLE])
    await fleet.ask(session="secret-session-name")
    assert fleet.others.order == ["a"]
    assert "secret-session-name" not in str(fleet.others.asked)
    kept = (vars(fleet.members.sessions), vars(fleet.members.affinity))
    assert "secret-session-name" not in str(kept)


class Claims:
    """A survey in which one machine says that it has all of every prompt."""

    async def of_job(self, asked: Job, model: str) -> dict[str, KeptBeginning]:
        return {"a": KeptBeginning(memory_tokens=len(TEXT) // CHARS_PER_TOKEN)}


@pytest.mark.parametrize(("cached", "believed"), [(0, False), (len(TEXT) // CHARS_PER_TOKEN, True)])
async def test_a_machine_that_had_less_than_it_said_is_not_asked_for_a_while(
    make: Make, cached: int, believed: bool
) -> None:
    usage = Usage(prompt_tokens=len(TEXT) // CHARS_PER_TOKEN + 1, cached_tokens=cached, completion_tokens=1)
    script = spoken(Accepted("r1", usage.prompt_tokens), Delta("r1", "Hi"), Finished("r1", "stop", usage))
    fleet = make(machine("a"), machine("b", faster=1.5), a=[script])
    fleet.runner._survey = Claims()  # type: ignore[assignment]
    await fleet.ask()
    assert fleet.others.order == ["a"], "what it says makes it the sooner one"
    assert (fleet.members.left_out("a", "fetch") == "") is believed
    assert fleet.members.left_out("a", "answer") == ""
