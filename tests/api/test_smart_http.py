"""``smart_prefill`` means the same on every route, streaming or not, on the socket or not; and is echoed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from api_fakes import frames, serve, serve_unix, services, speak
from msgspec import structs

from fleetd import limits
from fleetd.api.generation import smart_prefill_reports
from fleetd.api.openai.objects import SmartReport
from fleetd.api.openai.reports import smart_report
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.smart_prefill_result import ParkedLoads, SmartPrefillResult
from fleetd.engine import protocol as p
from fleetd.engine.protocol import Event, Loading
from fleetd.requests.job import LOCAL, Job, Planned

USED = SmartPrefillResult("text", "smollm2-135m", ("mini",), 1000, 200, 1100, 1.5)
SPARSE = structs.replace(USED, form="sparse")
SKIPPED = SmartPrefillResult(
    original_tokens=40, code="short", reason="The prompt has about 40 tokens… too few."
)
ROUTES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}
OPTIONS: list[Any] = [
    True,
    {},
    {"enabled": True},
    {"compressor_model": "qwen3-0.6b"},
    {"target_ratio": 0.3},
    {"min_keep_tokens": 100},
    {"max_keep_tokens": 900},
    {"min_prompt_tokens": 500},
    {"preserve_boundaries": False},
    {"mode": "text"},
    {"mode": "sparse"},
]


class SmartRunner:
    """Says what came of smart prefill, then answers. ``late``: once the client has read the headers."""

    def __init__(self, *told: SmartPrefillResult, late: bool = False) -> None:
        self.told = told
        self.late = late
        self.headers_read = asyncio.Event()
        self.jobs: list[Job] = []

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        self.jobs.append(job)
        if self.late:
            await self.headers_read.wait()
        for told in self.told:
            yield structs.replace(LOCAL, smart=told, exactness="lossy" if told.used else "exact")
        for event in speak(job):
            yield event  # type: ignore[misc]


async def asked(
    runner: SmartRunner,
    route: str = "chat",
    socket: Path | None = None,
    defaults: SmartPrefillPolicy | None = None,
    **body: Any,
) -> tuple[int, Any, str]:
    path, fields = ROUTES[route]
    made = services(runner, smart_defaults=defaults or SmartPrefillPolicy())
    site_of = serve(made) if socket is None else serve_unix(made, socket)
    async with site_of as site, site.client() as session:
        async with session.post(path, json={**fields, **body}) as response:
            runner.headers_read.set()
            return response.status, response.headers, (await response.read()).decode()


def last_object(text: str, *, stream: bool) -> dict[str, Any]:
    """The body, or a stream's last chunk."""
    found: dict[str, Any] = json.loads(frames(text)[-2] if stream else text)
    return found


# ---- What is asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("on_socket", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_every_option_means_the_same_everywhere(
    route: str, on_socket: bool, stream: bool, tmp_path: Path
) -> None:
    for option in OPTIONS:
        runner = SmartRunner(USED)
        socket = tmp_path / "s" if on_socket else None
        await asked(runner, route, socket, smart_prefill=option, stream=stream)
        given = option if isinstance(option, dict) else {}
        assert runner.jobs[0].smart == structs.replace(SmartPrefillPolicy(enabled=True), **given)
        assert b"smart" not in p.encode(runner.jobs[0].request)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("option", [None, False, {"enabled": False}])
async def test_off_is_off(route: str, option: Any) -> None:
    runner = SmartRunner()
    _, headers, text = await asked(runner, route, smart_prefill=option)
    assert runner.jobs[0].smart is None
    assert not [name for name in headers if name.startswith("X-SmartPrefill")]
    assert "smart_prefill" not in json.loads(text)
    assert "score_ms" not in json.loads(text)["timings"]


async def test_settings_turn_it_on_for_requests_that_do_not_ask() -> None:
    runner = SmartRunner(USED)
    defaults = SmartPrefillPolicy(enabled=True, target_ratio=0.4)
    await asked(runner, defaults=defaults)
    assert runner.jobs[0].smart == defaults
    await asked(runner, defaults=defaults, smart_prefill=False)
    assert runner.jobs[1].smart is None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "option",
    [
        {"target_ration": 0.3},
        {"target_ratio": 0},
        {"target_ratio": "0.3"},
        {"mode": "best"},
        {"min_keep_tokens": -1},
        {"min_keep_tokens": 10, "max_keep_tokens": 5},
        "yes",
        1,
    ],
)
async def test_what_makes_no_sense_is_refused(route: str, option: Any) -> None:
    status, _, text = await asked(SmartRunner(), route, smart_prefill=option)
    assert status == 400
    assert json.loads(text)["error"]["param"].startswith("smart_prefill")


# ---- Reports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_headers_and_body_say_what_was_left_out(route: str, stream: bool) -> None:
    body = {"smart_prefill": {"target_ratio": 0.2}, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    _, headers, text = await asked(SmartRunner(USED), route, **body)
    assert headers["X-SmartPrefill-Compressor"] == "smollm2-135m"
    assert headers["X-SmartPrefill-Original-Tokens"] == "1000"
    assert headers["X-SmartPrefill-Compressed-Tokens"] == "200"
    assert headers["X-SmartPrefill-Mode"] == "text"
    assert headers["X-Fleet-Exactness"] == "lossy"
    assert "X-SmartPrefill-Skipped" not in headers
    last = last_object(text, stream=stream)
    report = last["smart_prefill"]
    assert (report["mode"], report["compressed_tokens"], report["nodes"]) == ("text", 200, ["mini"])
    assert report["settings"]["target_ratio"] == 0.2
    assert last["timings"]["score_ms"] == 1500.0
    # The client's prompt had what was left out, too.
    assert last["usage"]["prompt_tokens"] > 800


async def test_tokens_that_were_not_computed_make_no_speed() -> None:
    plain = json.loads((await asked(SmartRunner()))[2])
    sparse = json.loads((await asked(SmartRunner(SPARSE), smart_prefill=True))[2])
    assert sparse["usage"] == plain["usage"]  # a sparse prompt reaches the engine whole
    assert sparse["timings"]["prompt_n"] == 0


async def test_each_choice_computes_its_own_prompt() -> None:
    plain = json.loads((await asked(SmartRunner(), n=2))[2])
    few = structs.replace(SPARSE, original_tokens=2, compressed_tokens=1)
    sparse = json.loads((await asked(SmartRunner(few), n=2, smart_prefill=True))[2])
    assert sparse["timings"]["prompt_n"] == plain["timings"]["prompt_n"] - 2 > 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_why_nothing_was_left_out_is_told(route: str, stream: bool) -> None:
    _, headers, text = await asked(SmartRunner(SKIPPED), route, smart_prefill=True, stream=stream)
    assert headers["X-SmartPrefill-Skipped"].startswith("short: The prompt has about 40 tokens")
    assert headers["X-SmartPrefill-Skipped"].isascii()
    assert headers["X-Fleet-Exactness"] == "exact"
    assert "X-SmartPrefill-Mode" not in headers
    report = last_object(text, stream=stream)["smart_prefill"]
    assert (report["mode"], report["skipped"]) == ("full", SKIPPED.skipped)
    assert report["compressed_tokens"] == report["original_tokens"] == 40


@pytest.mark.parametrize(
    ("said", "header"),
    [
        ("It keeps 25 % of it, or 25%.", "It keeps 25 % of it, or 25%."),
        ("größer als 25 %", "gr%C3%B6%C3%9Fer als 25 %"),
        ("a name with %41 in it", "a name with %2541 in it"),
    ],
)
def test_a_header_escapes_a_percent_sign_only_where_it_would_mislead(said: str, header: str) -> None:
    assert smart_prefill_reports.line(said) == header
    assert unquote(header) == said


async def test_headers_that_cannot_wait_promise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_PLAN_S", 0.0)
    _, headers, text = await asked(SmartRunner(USED, late=True), smart_prefill=True, stream=True)
    assert headers["X-Fleet-Exactness"] == "lossy"
    assert "X-SmartPrefill-Mode" not in headers
    assert ": smart prefill text; compressor=smollm2-135m; nodes=mini; tokens=200/1000\n" in text
    assert last_object(text, stream=True)["smart_prefill"]["mode"] == "text"


async def test_what_changes_after_the_headers_is_a_comment() -> None:
    class Late(SmartRunner):
        async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
            yield structs.replace(LOCAL, smart=SPARSE, exactness="lossy")
            yield p.Accepted(job.request.id, 3)
            yield structs.replace(LOCAL, smart=structs.replace(SPARSE, form="", code="no_form", reason="No."))
            for event in speak(job):
                yield event  # type: ignore[misc]

    _, headers, text = await asked(Late(), smart_prefill=True, stream=True)
    assert headers["X-SmartPrefill-Mode"] == "sparse"
    assert ": smart prefill skipped: no_form: No.\n" in text
    assert last_object(text, stream=True)["smart_prefill"]["mode"] == "full"


async def test_prompts_of_one_request_add_up_and_choices_do_not() -> None:
    _, headers, text = await asked(
        SmartRunner(USED), "completions", prompt=["one", "two"], n=2, smart_prefill=True, max_tokens=2
    )
    report = json.loads(text)["smart_prefill"]
    assert (report["original_tokens"], report["compressed_tokens"]) == (2000, 400)
    assert headers["X-SmartPrefill-Original-Tokens"] == "2000"


def test_every_machine_that_scored_a_prompt_is_named() -> None:
    """Each has seen the text, used or not."""
    other = structs.replace(USED, nodes=("mini", "air"))
    unused = structs.replace(SKIPPED, code="declined", nodes=("attic",))
    assert smart_prefill_reports.headers([USED, other, unused])["X-SmartPrefill-Nodes"] == "mini,air,attic"
    assert smart_prefill_reports.headers([unused])["X-SmartPrefill-Nodes"] == "attic"
    reports = smart_prefill_reports.SmartPrefillReports(SmartPrefillPolicy(), 1)
    for index, result in enumerate([USED, other, unused]):
        reports.add(index, result)
    report = smart_report(reports)
    assert isinstance(report, SmartReport)
    assert report.nodes == ["mini", "air", "attic"]


@pytest.mark.parametrize("result", [USED, SKIPPED], ids=["used", "skipped"])
def test_loads_of_models_that_took_turns_are_told(result: SmartPrefillResult) -> None:
    parked = structs.replace(result, parked=ParkedLoads(1.239, 3.1))
    told = "scorer=1.24; model=3.10"
    assert smart_prefill_reports.headers([parked])["X-SmartPrefill-Parked"] == told
    assert smart_prefill_reports.sentence(parked).endswith(f"; parked: {told}")
    assert "X-SmartPrefill-Parked" not in smart_prefill_reports.headers([result])
