"""How it was answered is in the headers if known in time, else in a comment: the plan that ran, and whether
tools are by grammar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from enum import Enum, auto
from typing import Any

import pytest
from api_fakes import FakeRunner, serve, services, speak

from fleetd import limits
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.protocol import Accepted, Event, Loading, Tokenized
from fleetd.requests.job import LOCAL, Job, Planned

REMOTE = Planned("remote", ("studio",), "equivalent")


@pytest.fixture(autouse=True)
def headers_wait_for_a_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_PLAN_S", 60.0)
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.0)


class Wait(Enum):
    # Until the client has read the headers.
    HEADERS = auto()
    # Until a wait of no time, begun before, is over.
    TURNS = auto()


class Planner:
    """Says its plans, then answers; in the order of ``steps``."""

    def __init__(self, *steps: Planned | Event | Wait) -> None:
        self.steps = steps
        self.headers_read = asyncio.Event()

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        for step in self.steps:
            if step is Wait.HEADERS:
                await self.headers_read.wait()
            elif step is Wait.TURNS:
                for _ in range(100):
                    await asyncio.sleep(0)
            else:
                yield step
        for event in speak(job):
            yield event  # type: ignore[misc]


async def answer(runner: Planner, **body: Any) -> tuple[Mapping[str, str], str]:
    """The headers and the body."""
    wanted = {"messages": [{"role": "user", "content": "hi"}], **body}
    async with serve(services(runner)) as site, site.client() as session:
        async with session.post("/v1/chat/completions", json=wanted) as response:
            runner.headers_read.set()
            return response.headers, (await response.read()).decode()


async def asked(runner: Planner, **body: Any) -> tuple[str, str, str]:
    """Plan and exactness of the headers, and the body."""
    headers, text = await answer(runner, **body)
    return headers["X-Fleet-Plan"], headers.get("X-Fleet-Exactness", ""), text


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_from_elsewhere_says_so(stream: bool) -> None:
    plan, exactness, _ = await asked(Planner(REMOTE), stream=stream)
    assert (plan, exactness) == ("remote; nodes=studio", "equivalent")


async def test_a_plan_that_takes_longer_than_the_headers_grace_is_waited_for() -> None:
    plan, exactness, _ = await asked(Planner(Wait.TURNS, REMOTE), stream=True)
    assert (plan, exactness) == ("remote; nodes=studio", "equivalent")


async def test_headers_that_cannot_wait_name_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_PLAN_S", 0.0)
    plan, exactness, text = await asked(Planner(Wait.HEADERS, REMOTE), stream=True)
    assert (plan, exactness) == ("undecided; nodes=", "")
    assert ": plan remote; nodes=studio\n" in text
    assert ": exactness equivalent\n" in text


async def test_a_move_to_another_machine_is_said_in_the_stream() -> None:
    moved = Planned("remote", ("mini",), "equivalent", "studio went away.")
    _, _, text = await asked(Planner(REMOTE, Wait.HEADERS, moved), stream=True)
    assert ": plan remote; nodes=mini: studio went away.\n" in text
    plan, _, _ = await asked(Planner(REMOTE, moved), stream=False)
    assert plan == "remote; nodes=mini"


async def test_exactness_is_said_in_the_stream_if_it_changes() -> None:
    moved = Planned("remote", ("mini",), "equivalent", "studio went away.")
    _, _, text = await asked(Planner(REMOTE, Wait.HEADERS, moved), stream=True)
    assert ": exactness" not in text
    _, exactness, text = await asked(Planner(LOCAL, Wait.HEADERS, moved), stream=True)
    assert exactness == "exact"
    assert text.count(": exactness equivalent\n") == 1


async def test_bits_are_said_in_headers_or_in_the_stream_if_they_change() -> None:
    narrow = Planned("tokens", ("studio", "this"), "equivalent", kv_bits=4, wire_bits=8)
    for stream in (True, False):
        headers, text = await answer(Planner(narrow), stream=stream)
        assert (headers["X-Fleet-KV-Bits"], headers["X-Fleet-Wire-Bits"]) == ("4", "8")
        assert " bits " not in text
    headers, text = await answer(Planner(LOCAL, Wait.HEADERS, narrow, narrow, LOCAL), stream=True)
    assert "X-Fleet-Wire-Bits" not in headers
    said = [line for line in text.splitlines() if " bits " in line]
    assert said == [": kv bits 4", ": wire bits 8", ": kv bits 0", ": wire bits 0"]


async def test_helpers_that_join_later_are_said_in_the_stream() -> None:
    """The machine that answers plans its help when it has the prompt, which may be after the headers."""
    helped = Planned("remote", ("studio", "mini"), "equivalent")
    _, _, text = await asked(Planner(REMOTE, Wait.HEADERS, helped, helped), stream=True)
    assert text.count(": plan ") == 1
    assert ": plan remote; nodes=studio,mini\n" in text


async def test_an_answer_from_here_is_exact() -> None:
    plan, exactness, text = await asked(Planner(LOCAL), stream=True)
    assert (plan, exactness) == ("local; nodes=this", "exact")
    assert ": plan" not in text


GRAMMAR = Tokenized("r", 3, tools_by_grammar=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "told", [GRAMMAR, Accepted("r", 3, tools_by_grammar=True)], ids=["early", "accepted"]
)
async def test_tools_by_grammar_are_said_in_a_header(
    monkeypatch: pytest.MonkeyPatch, told: Event, stream: bool
) -> None:
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 60.0)
    headers, text = await answer(Planner(LOCAL, told), stream=stream)
    assert headers["X-Fleet-Tools"] == "grammar"
    assert ": tools" not in text
    headers, text = await answer(Planner(LOCAL, Tokenized("r", 3)), stream=stream)
    assert "X-Fleet-Tools" not in headers
    assert ": tools" not in text


async def test_tools_by_grammar_are_said_once_in_a_stream_whose_headers_are_out() -> None:
    headers, text = await answer(Planner(LOCAL, Wait.HEADERS, GRAMMAR, GRAMMAR), stream=True)
    assert "X-Fleet-Tools" not in headers
    assert text.count(": tools grammar\n") == 1


# ---- Which exactness is asked for -----------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"model": "m", "prompt": "hi"},
}


@pytest.mark.parametrize("setting", ["exact", "equivalent"])
@pytest.mark.parametrize("wish", ["exact", "equivalent", None])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_says_whether_others_may_round_otherwise_and_the_settings_do_if_it_does_not(
    path: str, wish: Any, setting: Any
) -> None:
    runner = FakeRunner()
    body = BODIES[path] | ({} if wish is None else {"exactness": wish})
    defaults = SmartPrefillPolicy(enabled=True)
    made = services(runner, exactness=setting, smart_defaults=defaults)
    async with serve(made) as site, site.client() as session, session.post(path, json=body) as response:
        assert response.status == 200
    (job,) = runner.jobs
    # By default prompts are shortened here, but for one whose answer is to be exact.
    assert (job.smart is None) is (wish == "exact")
    assert job.request.exact is (wish == "exact")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_shortened_prompt_has_no_exact_answer(path: str) -> None:
    runner = FakeRunner()
    body = BODIES[path] | {"exactness": "exact", "smart_prefill": True}
    async with serve(services(runner)) as site, site.client() as session:
        async with session.post(path, json=body) as response:
            assert response.status == 400
            assert "not exact" in await response.text()
    assert not runner.jobs


@pytest.mark.parametrize("setting", ["exact", "equivalent"])
async def test_the_settings_decide_for_a_request_that_says_nothing(setting: Any) -> None:
    runner = FakeRunner()
    async with serve(services(runner, exactness=setting)) as site, site.client() as session:
        async with session.post("/v1/completions", json={"prompt": "hi"}) as response:
            assert response.status == 200
    assert runner.jobs[0].request.exact is (setting == "exact")
