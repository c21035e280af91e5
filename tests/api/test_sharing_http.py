"""/fleet/v1/plan and /fleet/v1/traces on the Unix socket, and how a shared answer shows in headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from api_fakes import MODEL, serve, serve_unix, services, speak

from fleetd import limits
from fleetd.control.prefill_plan import OptionView, PlanQuestion, PlanView, StepView
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.engine.protocol import Accepted, Event, Loading
from fleetd.errors import FleetError, ModelNotFound
from fleetd.requests.job import Job, Planned

CHOSEN = OptionView("layers", ["studio", "this"], 1.5, [StepView("computed", 1.0)], True, cuts=[0, 20, 30])
LOSER = OptionView("local", ["this"], 3.0, code="slower", reason="3.00 s: 100 % slower.")
TRACE = Trace(
    "r1-0", 1.0, MODEL, 1000, 0, CHOSEN, [LOSER], [], "shared", "exact", planned_ttft_s=1.4, ttft_s=1.6
)


class FakePlanner:
    def __init__(self, error: FleetError | None = None) -> None:
        self.error = error
        self.asked: list[PlanQuestion] = []
        self.wanted: list[tuple[int, str]] = []

    async def plan(self, question: PlanQuestion) -> PlanView:
        self.asked.append(question)
        if self.error is not None:
            raise self.error
        return PlanView(MODEL, question.tokens or 0, question.cached, [CHOSEN, LOSER])

    def traces(self, last: int, request_id: str) -> TracesView:
        self.wanted.append((last, request_id))
        return TracesView([TRACE])


async def call(
    folder: Path, planner: FakePlanner, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    made = services(plan=planner.plan, traces=planner.traces)
    async with serve_unix(made, folder / "s") as site, site.client(headers={}) as session:
        async with session.request(method, f"/fleet/v1/{path}", json=body) as response:
            return response.status, await response.json()


@pytest.mark.parametrize("name", ["", "default", MODEL])
async def test_a_plan_for_a_number_of_tokens(tmp_path: Path, name: str) -> None:
    planner = FakePlanner()
    body = {"model": name, "tokens": 1000, "cached": 10}
    status, found = await call(tmp_path, planner, "POST", "plan", body)
    assert status == 200
    assert (found["model"], found["prompt_tokens"], found["cached_tokens"]) == (MODEL, 1000, 10)
    assert [option["chosen"] for option in found["options"]] == [True, False]
    assert found["options"][0]["steps"] == [{"name": "computed", "seconds": 1.0}]
    assert planner.asked[0].text is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"tokens": 1, "text": "x"}, 400),
        ({"tokens": 0}, 400),
        ({"tokens": 2**31}, 400),
        ({"tokens": 1, "cached": -1}, 400),
        ({"tokens": 1, "prompt": "x"}, 400),
    ],
    ids=str,
)
async def test_questions_that_make_no_sense(tmp_path: Path, body: dict[str, Any], status: int) -> None:
    planner = FakePlanner()
    assert (await call(tmp_path, planner, "POST", "plan", body))[0] == status
    assert planner.asked == []


async def test_a_prompt_that_no_machine_can_answer_is_refused_with_each_reason(tmp_path: Path) -> None:
    planner = FakePlanner(ModelNotFound("The model nope is not on this machine. air does not have nope."))
    status, found = await call(tmp_path, planner, "POST", "plan", {"tokens": 1000, "model": "nope"})
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    assert "air does not have nope." in found["error"]["message"]


@pytest.mark.parametrize(
    ("query", "wanted"), [("", (20, "")), ("?last=3", (3, "")), ("?id=r1-0&last=1", (1, "r1-0"))]
)
async def test_traces_are_passed_on_as_they_are(tmp_path: Path, query: str, wanted: tuple[int, str]) -> None:
    planner = FakePlanner()
    status, found = await call(tmp_path, planner, "GET", f"traces{query}")
    assert status == 200
    assert planner.wanted == [wanted]
    (trace,) = found["traces"]
    assert (trace["outcome"], trace["ttft_s"], trace["losers"][0]["code"]) == ("shared", 1.6, "slower")


@pytest.mark.parametrize(
    "query", ["?last=0", f"?last={limits.TRACES + 1}", "?last=x", "?last=-1", "?id=" + "x" * 301], ids=str
)
async def test_bounds_of_the_list(tmp_path: Path, query: str) -> None:
    planner = FakePlanner()
    assert (await call(tmp_path, planner, "GET", f"traces{query}"))[0] == 400
    assert planner.wanted == []


@pytest.mark.parametrize(("method", "path"), [("POST", "plan"), ("GET", "traces")])
async def test_neither_is_there_over_tcp(method: str, path: str) -> None:
    async with serve(services()) as site, site.client() as session:
        async with session.request(method, f"/fleet/v1/{path}", json={"tokens": 1000}) as response:
            assert response.status == 404


class SharedRunner:
    """The plan of a shared answer is known late, but before anything of it; then its helper fails."""

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        yield Planned("layers", ("stüdio 1", "this"), "equivalent")
        for event in speak(job):
            yield event  # type: ignore[misc]
            if isinstance(event, Accepted):
                yield Planned("local", ("this",), "exact", "stüdio 1: it went away.")


@pytest.mark.parametrize("stream", [True, False])
async def test_who_helped_is_in_the_headers(stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with serve(services(SharedRunner())) as site, site.client() as session:
        async with session.post("/v1/chat/completions", json=body) as response:
            told = (response.headers["X-Fleet-Plan"], response.headers["X-Fleet-Exactness"])
            text = (await response.read()).decode()
    if stream:
        assert told == ("layers; nodes=st%C3%BCdio 1,this", "equivalent")
        assert ": plan local; nodes=this: stüdio 1: it went away.\n" in text
    else:
        assert told == ("local; nodes=this", "exact")
