"""Generation over HTTP: every option through both endpoints, streamed and whole; progress, errors, order."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from api_fakes import MODEL, FakeRunner, Site, Step, frames, post_bytes, read_until, serve, services, speak

from fleetd import errors, limits
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "hello there"}]}
        if path == CHAT
        else {"prompt": "hello there"}
    )
    return {"model": MODEL, **prompt, **fields}


def said(path: str, reply: str, streamed: bool) -> dict[int, str]:
    """The text per choice, whatever the form."""
    if not streamed:
        choices = json.loads(reply)["choices"]
        return {c["index"]: c["message"]["content"] if path == CHAT else c["text"] for c in choices}
    assert frames(reply)[-1] == "[DONE]"
    texts: dict[int, str] = {}
    for frame in frames(reply)[:-1]:
        for choice in json.loads(frame)["choices"]:
            piece = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return texts


BOTH = [
    {},
    {"temperature": 0},
    {"top_p": 0.5, "top_k": 3, "min_p": 0.1},
    {"seed": 7},
    {"seed": 7, "n": 3},
    {"max_tokens": 2, "seed": 1},
    {"stop": "fox", "seed": 3},
    {"stop": ["fox", "dog"], "seed": 3},
    {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2},
    {"logit_bias": {"5": 10}},
    {"user": "me"},
    {"stream_options": {"include_usage": True}},
    {"something_new": True},
    {"model": None},
]
ONLY_CHAT = [
    {"max_completion_tokens": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"response_format": {"type": "text"}},
    {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
    {"verbosity": "low"},
    {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": None},
]
ONLY_TEXT = [
    {"echo": True},
    {"logprobs": 0},
    {"logprobs": 2, "echo": True},
    {"best_of": 1},
    {"prompt": ["a", "b"], "n": 2},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1], [2, 3]]},
    {"max_tokens": 0, "echo": True},
    {"suffix": None},
]
OPTIONS = [
    *((path, fields) for path in (CHAT, TEXT) for fields in BOTH),
    *((CHAT, fields) for fields in ONLY_CHAT),
    *((TEXT, fields) for fields in ONLY_TEXT),
]


@pytest.mark.parametrize(("path", "fields"), OPTIONS, ids=lambda value: json.dumps(value)[:60])
async def test_every_option_streamed_and_whole_say_the_same(
    client: aiohttp.ClientSession, path: str, fields: dict[str, Any]
) -> None:
    texts = []
    for streamed in (False, True):
        # A toy engine without a seed draws differently every time.
        given = {"seed": 11, **fields}
        async with client.post(path, json=body(path, **given, stream=streamed)) as response:
            reply = await response.text()
            assert response.status == 200, reply
            kind = "text/event-stream" if streamed else "application/json"
            assert response.headers["Content-Type"].startswith(kind)
            texts.append(said(path, reply, streamed))
    whole = {index: text or "" for index, text in texts[0].items()}
    assert whole == texts[1]


async def test_streams_name_their_answer_in_every_chunk(client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT, json=body(CHAT, stream=True)) as response:
        reply = await response.text()
        chunks = [json.loads(frame) for frame in frames(reply)[:-1]]
        assert {(c["id"], c["created"], c["model"]) for c in chunks} == {
            (response.headers["X-Fleet-Request"], chunks[0]["created"], MODEL)
        }
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["X-Fleet-Plan"] == "local; nodes=this"
        assert response.headers["X-Fleet-Exactness"] == "exact"


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1", True), ("x" * 129, False), ("a b", False), (None, False)]
)
async def test_request_ids_are_echoed_if_sane(
    client: aiohttp.ClientSession, given: str | None, echoed: bool
) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    async with client.post(CHAT, json=body(CHAT), headers=headers) as response:
        assert (response.headers["X-Request-Id"] == given) is echoed
        assert len(response.headers["X-Request-Id"]) > 3


async def test_a_job_says_where_it_came_from(client: aiohttp.ClientSession, runner: FakeRunner) -> None:
    for path in (CHAT, TEXT):
        async with client.post(path, json=body(path)) as response:
            assert response.status == 200
    assert [(job.origin, job.route, job.model) for job in runner.jobs] == [
        ("http", "chat", MODEL),
        ("http", "completions", MODEL),
    ]


@pytest.mark.parametrize("named", [{}, {"model": ""}, {"model": "default"}])
async def test_no_model_means_the_default_which_is_named(
    client: aiohttp.ClientSession, runner: FakeRunner, named: dict[str, str]
) -> None:
    async with client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **named}) as response:
        assert (await response.json())["model"] == (named.get("model") or MODEL)
    assert runner.jobs[0].model == named.get("model", "")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["default", MODEL, f"{MODEL}:latest", "claude-opus-4-5"])
@pytest.mark.parametrize(
    "path",
    [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"],
)
async def test_an_answer_carries_the_name_that_was_asked_for(
    client: aiohttp.ClientSession, path: str, name: str, streamed: bool
) -> None:
    body = {"model": name, "stream": streamed, "max_tokens": 2}
    if path == "/v1/responses":
        body = {"model": name, "stream": streamed, "input": "x"}
    more = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    async with client.post(path, json={**body, **({} if "input" in body else more)}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    assert set(re.findall(r'"model": ?"([^"]*)"', text)) == {name}


# ---- Errors ----------------------------------------------------------------------------------------------

EARLY = [
    (errors.ModelNotFound("No such model.", hint="Try another.", param="model"), 404, "model_not_found"),
    (errors.ContextLengthExceeded("Too long.", param="messages"), 400, "context_length_exceeded"),
    (errors.Overloaded("Full.", retry_after_s=2.5), 429, "overloaded"),
    (errors.OutOfMemory("Too big."), 503, "out_of_memory"),
    (errors.Draining("Stopping.", retry_after_s=1), 503, "draining"),
    (errors.EngineDied("It died."), 502, "engine_died"),
    (errors.EngineStalled("It hangs."), 504, "engine_stalled"),
    (errors.DiskFull("Full."), 507, "disk_full"),
    (errors.ModelCorrupt("Truncated: a.safetensors"), 500, "model_corrupt"),
]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("error", "status", "code"), EARLY, ids=[code for *_, code in EARLY])
async def test_an_early_refusal_keeps_its_status_even_when_streaming(
    client: aiohttp.ClientSession,
    runner: FakeRunner,
    error: errors.FleetError,
    status: int,
    code: str,
    streamed: bool,
) -> None:
    runner.script = lambda job: [error]
    async with client.post(CHAT, json=body(CHAT, stream=streamed)) as response:
        assert response.status == status
        assert response.headers["Content-Type"].startswith("application/json")
        given = (await response.json())["error"]
        assert given["code"] == code
        assert (given["message"], given["hint"], given["param"]) == (str(error), error.hint, error.param)
        retry = error.retry_after_s
        assert response.headers.get("Retry-After") == (
            None if retry is None else "3" if retry == 2.5 else "1"
        )


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_error_in_mid_stream_ends_it_without_pretending(
    client: aiohttp.ClientSession, runner: FakeRunner, path: str
) -> None:
    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 3)
        yield p.Delta(job.request.id, "half an ans")
        yield errors.EngineDied("The engine died.", hint="Ask again.")

    runner.script = script
    async with client.post(path, json=body(path, stream=True)) as response:
        assert response.status == 200
        reply = await response.text()
    assert json.loads(frames(reply)[-1])["error"]["code"] == "engine_died"
    assert "[DONE]" not in reply
    assert '"finish_reason":"' not in reply


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_bug_gives_a_request_id_and_logs_no_prompt(
    client: aiohttp.ClientSession, runner: FakeRunner, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 3)
        yield p.Delta(job.request.id, "x")
        yield RuntimeError("canary-prompt-text")

    runner.script = script
    request = body(CHAT, stream=streamed, messages=[{"role": "user", "content": "canary-prompt-text"}])
    async with client.post(CHAT, json=request, headers={"X-Request-Id": "find-me"}) as response:
        reply = await response.text()
        assert response.status == (200 if streamed else 500)
    assert "find-me" in reply
    assert "canary-prompt-text" not in reply
    assert "find-me" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "canary-prompt-text" not in caplog.text


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_broken_connection_of_ours_is_not_taken_for_the_clients(
    client: aiohttp.ClientSession, runner: FakeRunner, streamed: bool
) -> None:
    runner.script = lambda job: [p.Accepted(job.request.id, 3), ConnectionResetError("the engine's socket")]
    async with client.post(CHAT, json=body(CHAT, stream=streamed)) as response:
        assert response.status == (200 if streamed else 500)
        assert "internal_error" in await response.text()


async def test_an_answer_cut_short_at_once_is_an_error_in_the_stream(
    client: aiohttp.ClientSession, runner: FakeRunner
) -> None:
    runner.script = lambda job: [p.Finished(job.request.id, "cancelled")]
    async with client.post(CHAT, json=body(CHAT, stream=True)) as response:
        (frame,) = frames(await response.text())
    assert json.loads(frame)["error"]["code"] == "engine_error"


async def test_one_failing_choice_fails_the_request_and_cancels_the_others(
    client: aiohttp.ClientSession, runner: FakeRunner
) -> None:
    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 3)
        yield errors.EngineDied("It died.") if job.request.id.endswith("-1") else asyncio.Event()

    runner.script = script
    async with client.post(CHAT, json=body(CHAT, n=3)) as response:
        assert response.status == 502
    await runner.wait_for(lambda: runner.running == 0)
    assert len(runner.cancelled) == 2


# ---- Progress and order ----------------------------------------------------------------------------------


async def test_headers_and_a_comment_come_at_once_and_comments_keep_coming(
    site: Site, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.05)
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.03)
    queued, prefilling = asyncio.Event(), asyncio.Event()

    def script(job: Job) -> Iterable[Step]:
        yield queued
        yield p.Loading("reading", 1, 9)
        yield p.Accepted(job.request.id, 100)
        yield p.Prefill(job.request.id, 40, 100)
        yield prefilling
        yield p.Delta(job.request.id, "ok")
        yield p.Finished(job.request.id, "stop")

    runner.script = script
    reader, writer = await site.raw()
    request = json.dumps(body(CHAT, stream=True)).encode()
    writer.write(post_bytes(site, CHAT, request, Connection="close"))
    first = await read_until(reader, b": keepalive 0/0\n\n")
    assert first.startswith(b"HTTP/1.1 200")
    more = await read_until(reader, b"0/0\n\n\r\n")
    assert b"data:" not in more
    queued.set()
    later = await read_until(reader, b"keepalive 40/100")
    later += await read_until(reader, b"keepalive 40/100")
    assert later.count(b"keepalive 40/100") >= 1
    prefilling.set()
    rest = await read_until(reader, b"[DONE]")
    assert b'"content":"ok"' in rest
    writer.close()
    await writer.wait_closed()


async def test_loading_is_told_with_its_stage(
    client: aiohttp.ClientSession, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SSE_PROGRESS_S", 0.0)
    runner.script = lambda job: [p.Loading("downloading", 3, 9), p.Loading("warming up", 9, 9), *speak(job)]
    async with client.post(CHAT, json=body(CHAT, stream=True)) as response:
        reply = await response.text()
    assert reply.startswith(": loading downloading 3/9\n\n: loading warming up 9/9\n\n: keepalive 0/6\n\n")
    async with client.post(CHAT, json=body(CHAT)) as response:
        assert response.status == 200


async def test_silence_is_never_longer_than_the_keepalive(
    client: aiohttp.ClientSession, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that make no output must not push the next comment away."""
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.1)
    more = asyncio.Event()

    async def tick(times: list[float]) -> None:
        async with client.post(CHAT, json=body(CHAT, stream=True)) as response:
            async for _ in response.content.iter_any():
                times.append(time.monotonic())
                if len(times) > 6:
                    more.set()

    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 3)
        yield p.Delta(job.request.id, "a")
        yield p.Delta(job.request.id, "", tokens=1)
        yield more
        yield p.Finished(job.request.id, "stop")

    runner.script = script
    times: list[float] = []
    await tick(times)
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < 30.0  # patience: without the comments nothing would come at all
    assert len(times) > 6


async def test_choices_run_side_by_side_and_interleave(
    client: aiohttp.ClientSession, runner: FakeRunner
) -> None:
    turns = [asyncio.Event() for _ in range(3)]

    def script(job: Job) -> Iterable[Step]:
        mine = int(job.request.id.rpartition("-")[2])
        yield p.Accepted(job.request.id, 3)
        yield p.Delta(job.request.id, f"first{mine}")
        turns[mine].set()
        # Choice 0 goes on only when choice 2 has spoken: that needs all of them to run at once.
        yield turns[2 - mine]
        yield p.Delta(job.request.id, f"second{mine}")
        yield p.Finished(job.request.id, "stop")

    runner.script = script
    async with client.post(CHAT, json=body(CHAT, stream=True, n=3)) as response:
        reply = await response.text()
    assert said(CHAT, reply, True) == {i: f"first{i}second{i}" for i in range(3)}
    order = [json.loads(frame)["choices"][0]["index"] for frame in frames(reply)[:-1]]
    assert order != sorted(order)


async def test_a_batch_of_prompts_takes_no_more_slots_than_choices_may(
    client: aiohttp.ClientSession, runner: FakeRunner
) -> None:
    most = 0

    def script(job: Job) -> Iterable[Step]:
        nonlocal most
        most = max(most, runner.running)
        return speak(job)

    runner.script = script
    prompts = [f"p{i}" for i in range(limits.COMPLETIONS_PER_REQUEST)]
    async with client.post(TEXT, json=body(TEXT, prompt=prompts, max_tokens=1)) as response:
        assert len((await response.json())["choices"]) == len(prompts)
    assert 1 < most <= limits.CHOICES_AT_ONCE


async def test_many_choices_run_a_few_at_a_time_and_one_more_is_refused(
    client: aiohttp.ClientSession, runner: FakeRunner
) -> None:
    most = 0

    def script(job: Job) -> Iterable[Step]:
        nonlocal most
        most = max(most, runner.running)
        return speak(job)

    runner.script = script
    async with client.post(CHAT, json=body(CHAT, n=limits.CHOICES)) as response:
        choices = (await response.json())["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))
    assert 1 < most <= limits.CHOICES_AT_ONCE
    async with client.post(CHAT, json=body(CHAT, n=limits.CHOICES + 1)) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "n"


@pytest.mark.parametrize("bound", [None, 100])
async def test_an_answer_without_max_tokens_has_the_bound_of_the_settings(bound: int | None) -> None:
    """In every dialect but /v1/completions, whose default is its own."""
    question = {"messages": [{"role": "user", "content": "x"}], "stream": False}
    asked: list[tuple[str, dict[str, Any], int | None]] = [
        (CHAT, question, bound),
        ("/v1/messages", question, bound),
        ("/v1/responses", {"input": "x"}, bound),
        ("/api/chat", question | {"model": MODEL}, bound),
        (CHAT, question | {"max_tokens": 7}, 7),
        (CHAT, question | {"min_tokens": 200}, bound and 200),
        (TEXT, {"prompt": "x"}, 16),
    ]
    runner = FakeRunner()
    async with serve(services(runner, answer_tokens=bound)) as site, site.client() as session:
        for path, fields, most in asked:
            async with session.post(path, json=fields) as response:
                assert response.status == 200, await response.text()
            assert runner.jobs[-1].request.max_tokens == most


async def test_an_anthropic_answer_that_meets_the_bound_says_max_tokens() -> None:
    def script(job: Job) -> Iterable[Step]:
        yield p.Delta(job.request.id, "a", tokens=5)
        yield p.Finished(job.request.id, "length", p.Usage(3, 0, 5), p.Timings())

    question = {"messages": [{"role": "user", "content": "x"}]}
    for bound, reason in ((5, "max_tokens"), (6, "model_context_window_exceeded")):
        made = services(FakeRunner(script), answer_tokens=bound)
        async with (
            serve(made) as site,
            site.client() as session,
            session.post("/v1/messages", json=question) as response,
        ):
            assert (await response.json())["stop_reason"] == reason


# ---- Bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"{", 400, "bad_request"),
        (b'{"messages": []}', 400, "invalid_value"),
        (b'{"messages": [{"role":"user","content":"x"}], "max_token": 1}', 400, "invalid_value"),
        (b'{"messages": [{"role":"user","content":"x"}], "suffix": "x"}', 400, "unsupported_parameter"),
    ],
)
async def test_bad_bodies_never_reach_the_engine(
    client: aiohttp.ClientSession, runner: FakeRunner, data: bytes, status: int, code: str
) -> None:
    headers = {"Content-Type": "application/json"}
    async with client.post(CHAT, data=data, headers=headers) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert runner.jobs == []


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("PUT", TEXT, 405), ("GET", "/v2", 404)]
)
async def test_wrong_methods_and_addresses_answer_in_json(
    client: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with client.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]
        assert ("Allow" in response.headers) is (status == 405)
