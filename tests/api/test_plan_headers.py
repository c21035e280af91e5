"""The plan that a client reads is the one that ran: in the headers if known in time, else in a comment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from api_fakes import serve, services, speak

from fleetd import limits
from fleetd.engine.protocol import Event, Loading
from fleetd.requests.job import LOCAL, Job, Planned

REMOTE = Planned("remote", ("studio",), "plan")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.03)


class Planner:
    """Says its plans, each after a wait, then answers."""

    def __init__(self, *plans: tuple[float, Planned]) -> None:
        self.plans = plans

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        for wait_s, plan in self.plans:
            await asyncio.sleep(wait_s)  # the wait is what is tested
            yield plan
        for event in speak(job):
            yield event  # type: ignore[misc]


async def asked(runner: Planner, **body: Any) -> tuple[str, str, str]:
    """Plan and exactness of the headers, and the body."""
    wanted = {"messages": [{"role": "user", "content": "hi"}], **body}
    async with serve(services(runner)) as site, site.client() as session:
        async with session.post("/v1/chat/completions", json=wanted) as response:
            headers = response.headers
            text = (await response.read()).decode()
            return headers["X-Fleet-Plan"], headers.get("X-Fleet-Exactness", ""), text


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_from_elsewhere_says_so(stream: bool) -> None:
    plan, exactness, _ = await asked(Planner((0, REMOTE)), stream=stream)
    assert (plan, exactness) == ("remote; nodes=studio", "plan")


async def test_a_plan_that_takes_longer_than_the_headers_grace_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HEADERS_PLAN_S", 20.0)
    plan, exactness, _ = await asked(Planner((0.09, REMOTE)), stream=True)
    assert (plan, exactness) == ("remote; nodes=studio", "plan")


async def test_headers_that_cannot_wait_name_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_PLAN_S", 0.01)
    plan, exactness, text = await asked(Planner((0.2, REMOTE)), stream=True)
    assert (plan, exactness) == ("undecided; nodes=", "")
    assert ": plan remote; nodes=studio\n" in text


async def test_a_move_to_another_machine_is_said_in_the_stream() -> None:
    moved = Planned("remote", ("mini",), "plan", "studio went away.")
    _, _, text = await asked(Planner((0, REMOTE), (0.1, moved)), stream=True)
    assert ": plan remote; nodes=mini: studio went away.\n" in text
    plan, _, _ = await asked(Planner((0, REMOTE), (0, moved)), stream=False)
    assert plan == "remote; nodes=mini"


async def test_helpers_that_join_later_are_said_in_the_stream() -> None:
    """The machine that answers plans its help when it has the prompt, which may be after the headers."""
    helped = Planned("remote", ("studio", "mini"), "plan")
    _, _, text = await asked(Planner((0, REMOTE), (0.1, helped), (0, helped)), stream=True)
    assert text.count(": plan ") == 1
    assert ": plan remote; nodes=studio,mini\n" in text


async def test_an_answer_from_here_is_exact() -> None:
    plan, exactness, text = await asked(Planner((0, LOCAL)), stream=True)
    assert (plan, exactness) == ("local; nodes=this", "exact")
    assert ": plan" not in text
