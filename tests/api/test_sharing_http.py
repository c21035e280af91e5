"""/fleet/v1/plan and /fleet/v1/traces on the Unix socket, and how a shared answer shows in headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from api_fakes import MODEL, FakeFolder, serve, serve_unix, services, speak
from msgspec.structs import replace

from fleetd import limits
from fleetd.api.disabled_fleet import DisabledFleet
from fleetd.control.prefill_plan import DraftsView, OptionView, PlanQuestion, PlanView, StepView
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.engine.protocol import Accepted, Event, Loading
from fleetd.requests.job import Job, Planned

CHOSEN = OptionView("layers", ["studio", "this"], 1.5, [StepView("computed", 1.0)], True, cuts=[0, 20, 30])
LOSER = OptionView("local", ["this"], 3.0, code="slower", reason="3.00 s: 100 % slower.")
TRACE = Trace("r1-0", 1.0, MODEL, 1000, 0, CHOSEN, [LOSER], [], "shared", "exact", 1.4, 1.6)


class FakePlanner:
    def __init__(self) -> None:
        self.asked: list[PlanQuestion] = []
        self.wanted: list[tuple[int, str]] = []

    def plan(self, question: PlanQuestion, folder: FakeFolder) -> PlanView:
        self.asked.append(question)
        return PlanView(folder.name, question.tokens or 0, question.cached, [CHOSEN, LOSER])

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
        ({"tokens": 1, "model": "nope"}, 404),
    ],
    ids=str,
)
async def test_questions_that_make_no_sense(tmp_path: Path, body: dict[str, Any], status: int) -> None:
    planner = FakePlanner()
    assert (await call(tmp_path, planner, "POST", "plan", body))[0] == status
    assert planner.asked == []


async def test_a_plan_says_who_would_draft(tmp_path: Path) -> None:
    async def drafts(view: PlanView, folder: FakeFolder) -> PlanView:
        return replace(view, drafts=DraftsView(f"exact: {folder.name}", ["lookup"], 16))

    made = services(plan=FakePlanner().plan, draft_plan=drafts)
    async with serve_unix(made, tmp_path / "s") as site, site.client(headers={}) as session:
        async with session.post("/fleet/v1/plan", json={"tokens": 9}) as response:
            found = await response.json()
    assert found["drafts"] == {"verdict": f"exact: {MODEL}", "sources": ["lookup"], "width": 16}


async def test_a_daemon_that_keeps_to_itself_has_no_plans(tmp_path: Path) -> None:
    planner = FakePlanner()
    planner.plan = DisabledFleet().plan  # type: ignore[method-assign]
    status, found = await call(tmp_path, planner, "POST", "plan", {"tokens": 1000})
    assert (status, found["error"]["code"]) == (403, "not_paired")


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
        yield Planned("layers", ("stüdio 1", "this"), "plan")
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
        assert told == ("layers; nodes=st%C3%BCdio 1,this", "plan")
        assert ": plan local; nodes=this: stüdio 1: it went away.\n" in text
    else:
        assert told == ("local; nodes=this", "exact")
