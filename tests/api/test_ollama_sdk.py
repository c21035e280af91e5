"""The real ollama client against the application, as its users call it.

``target`` says where: a scripted daemon here, a live one in tests/live. What needs a script asks for
``script_client``; the rest holds for any model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest
from api_fakes import FakeRunner, Site, Step, Target, serve, serve_in_thread, services
from fakes import FakePullStep
from ollama_order import OllamaOrder, read_lines

from fleetd import errors, limits
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FEW = {"num_predict": 5, "temperature": 0, "seed": 5}


@contextmanager
def connect(target: Target) -> Iterator[ollama.Client]:
    with ollama.Client(
        host=target.base_url.removesuffix("/v1"),
        headers={"Authorization": f"Bearer {target.api_key}"},
        timeout=60,
    ) as made:
        yield made


def connect_site(site: Site) -> AbstractContextManager[ollama.Client]:
    return connect(Target(f"{site.url}/v1", site.token, "", tools=False))


@pytest.fixture
def ollama_client(target: Target) -> Iterator[ollama.Client]:
    with connect(target) as made:
        yield made


@pytest.fixture
def script_client(scripted: Target) -> Iterator[ollama.Client]:
    with connect(scripted) as made:
        yield made


def in_order(target: Target, path: str = "/api/chat", **body: Any) -> OllamaOrder:
    """A stream as it is on the wire."""
    address = target.base_url.removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {target.api_key}"}
    given = {"model": target.model, "messages": ASK, "options": FEW, **body}
    with (
        httpx.Client(timeout=60) as http,
        http.stream("POST", address, json=given, headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return read_lines(answer.iter_bytes())


def test_a_stream_says_what_the_whole_answer_says(ollama_client: ollama.Client, target: Target) -> None:
    whole = ollama_client.chat(target.model, ASK, options=FEW)
    assert whole.message.content
    assert (whole.model, whole.message.role, whole.done) == (target.model, "assistant", True)
    assert whole.done_reason in ("stop", "length")
    assert whole.eval_count is not None
    assert 0 < whole.eval_count <= 5
    assert whole.prompt_eval_count
    assert whole.total_duration is not None
    assert whole.total_duration > 0
    pieces = list(ollama_client.chat(target.model, ASK, options=FEW, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == whole.eval_count
    order = in_order(target)
    assert (order.state, order.text) == ("ended", whole.message.content)


def test_generate_is_a_chat_of_one_message(ollama_client: ollama.Client, target: Target) -> None:
    said = ollama_client.chat(target.model, ASK, options=FEW).message.content
    text: str = ASK[0]["content"]
    assert ollama_client.generate(target.model, text, options=FEW).response == said
    streamed = ollama_client.generate(target.model, text, options=FEW, stream=True)
    assert "".join(piece.response for piece in streamed) == said
    assert in_order(target, "/api/generate", prompt=text).text == said
    assert ollama_client.generate(target.model, text, raw=True, options=FEW).done


def test_the_same_request_in_every_dialect_gives_the_same_tokens(
    ollama_client: ollama.Client, target: Target
) -> None:
    headers = {"Authorization": f"Bearer {target.api_key}"}
    common: Any = {"model": target.model, "temperature": 0, "seed": 3}
    system: Any = {"role": "system", "content": "Be brief."}

    def ask(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{target.base_url}{path}", json={**common, **body}, headers=headers, timeout=60)
        return answer.json()

    chat = ask("/chat/completions", messages=[system, *ASK], max_tokens=6)
    message = ask("/messages", messages=ASK, system="Be brief.", max_tokens=6)
    response = ask("/responses", input=ASK, instructions="Be brief.", max_output_tokens=6)
    options = {"num_predict": 6, "temperature": 0, "seed": 3}
    ours = ollama_client.chat(target.model, [system, *ASK], options=options)
    texts = {
        ours.message.content,
        chat["choices"][0]["message"]["content"],
        message["content"][0]["text"],
        "".join(part["text"] for item in response["output"] for part in item["content"]),
    }  # fmt: skip
    assert len(texts) == 1
    read = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    prompts = [
        ours.prompt_eval_count,
        chat["usage"]["prompt_tokens"],
        read,
        response["usage"]["input_tokens"],
    ]
    assert len(set(prompts)) == 1


def test_an_empty_prompt_loads_and_unloads(ollama_client: ollama.Client, target: Target) -> None:
    assert ollama_client.generate(target.model, "").done_reason == "load"
    assert ollama_client.chat(target.model, [], keep_alive="10m").done_reason == "load"
    assert ollama_client.chat(target.model, [], keep_alive=0).done_reason == "unload"


def test_the_models_of_the_fleet(ollama_client: ollama.Client, target: Target) -> None:
    listed = {model.model: model for model in ollama_client.list().models}
    assert listed[target.model].details is not None
    assert listed[target.model].details.format == "safetensors"
    for name in (target.model, f"{target.model}:latest", target.model.replace("-", ":", 1)):
        shown = ollama_client.show(name)
        assert shown.modelinfo is not None
        architecture = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{architecture}.context_length"] == 8192
        assert shown.capabilities is not None
        assert "completion" in shown.capabilities
        assert ollama_client.chat(name, ASK, options=FEW).model == name
    assert ollama_client.ps() is not None


def test_what_copilot_asks_in_its_order(target: Target) -> None:
    """Version, tags, show of each model, and then OpenAI's chat at the same address."""
    address = target.base_url.removesuffix("/v1")
    with httpx.Client(
        base_url=address, headers={"Authorization": f"Bearer {target.api_key}"}, timeout=60
    ) as http:
        version = tuple(map(int, http.get("/api/version").json()["version"].split(".")))
        assert version >= (0, 6, 4)
        for tag in http.get("/api/tags").json()["models"]:
            shown = http.post("/api/show", json={"model": tag["name"]}).json()
            info = shown["model_info"]
            assert isinstance(info[f"{info['general.architecture']}.context_length"], int)
            assert "completion" in shown["capabilities"]
        body = {"model": target.model, "messages": ASK, "max_tokens": 2, "stream": True}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")


def test_errors_are_the_librarys(ollama_client: ollama.Client, target: Target) -> None:
    def refused(call: Any, **given: Any) -> ollama.ResponseError:
        with pytest.raises(ollama.ResponseError) as caught:
            call(**given)
        return caught.value

    missing = refused(ollama_client.chat, model="no-such-model-here", messages=ASK)
    assert missing.status_code == 404
    wrong = refused(ollama_client.chat, model=target.model, messages=ASK, logprobs=True)
    assert (wrong.status_code, wrong.error[:8]) == (400, "logprobs")
    for stream in (False, True):
        late = refused(
            lambda stream=stream: list(ollama_client.chat("no-such-model-here", ASK, stream=stream))
        )
        assert late.status_code == 404
    for call in (
        lambda: ollama_client.create("mine", from_=target.model),
        lambda: ollama_client.push("mine"),
        lambda: ollama_client.copy("a", "b"),
    ):
        assert refused(call).status_code == 501
    with connect(replace(target, api_key="wrong-wrong-wrong")) as stranger:
        assert refused(stranger.list).status_code == 401


# ---- With a script ---------------------------------------------------------------------------------------


def test_tools_whole_and_streamed(script_client: ollama.Client, scripted: Target) -> None:
    tools = [WEATHER, WEATHER]
    whole = script_client.chat(scripted.model, ASK, tools=tools)
    assert whole.done_reason == "stop"
    assert whole.message.tool_calls is not None
    assert [call.function.arguments for call in whole.message.tool_calls] == [{"city": "Oslo"}] * 2
    pieces = list(script_client.chat(scripted.model, ASK, tools=tools, stream=True))
    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert calls == whole.message.tool_calls
    results: Any = [
        *ASK,
        whole.message,
        {"role": "tool", "content": "dry", "tool_name": "weather"},
    ]
    assert script_client.chat(scripted.model, results).message.content


def test_thinking_is_a_field_of_its_own(script_client: ollama.Client, scripted: Target) -> None:
    ask: Any = [{"role": "user", "content": "think"}]
    whole = script_client.chat(scripted.model, ask, think=True)
    assert (whole.message.thinking, whole.message.content) == ("hm", "yes")
    pieces = list(script_client.chat(scripted.model, ask, think="low", stream=True))
    assert "".join(piece.message.thinking or "" for piece in pieces) == "hm"
    text = script_client.generate(scripted.model, "think", think=True)
    assert (text.thinking, text.response) == ("hm", "yes")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_and_a_full_queue(
    script_client: ollama.Client, scripted: Target, stream: bool
) -> None:
    def ask(text: str) -> ollama.ResponseError:
        with pytest.raises(ollama.ResponseError) as caught:
            list(script_client.chat(scripted.model, [{"role": "user", "content": text}], stream=stream))
        return caught.value

    assert ask("too long").status_code == 400
    assert ask("busy").status_code == 429


def test_an_engine_that_dies_in_the_middle(script_client: ollama.Client, scripted: Target) -> None:
    ask: Any = [{"role": "user", "content": "die"}]
    pieces = script_client.chat(scripted.model, ask, stream=True)
    got: list[str] = []
    with pytest.raises(ollama.ResponseError, match="The engine died"):
        got.extend(piece.message.content or "" for piece in pieces)
    assert "".join(got) == "half"


# ---- Models that come and go -----------------------------------------------------------------------------


@pytest.fixture
def own_site() -> Iterator[Site]:
    made = services(FakeRunner())
    made.models.pull_steps = [  # type: ignore[attr-defined]
        FakePullStep("model.safetensors", 5, 10),
        FakePullStep("model.safetensors", 10, 10),
        FakePullStep("model.safetensors", 0, 0, "verifying"),
    ]
    with serve_in_thread(lambda: made) as site:
        yield site


def test_pull_shows_its_progress(own_site: Site) -> None:
    with connect_site(own_site) as client:
        lines = list(client.pull("qwen3:0.6b", stream=True))
        assert client.pull("qwen3:1.7b").status == "success"
        listed = {model.model for model in client.list().models}
    assert [line.status for line in lines] == [
        "pulling manifest",
        "pulling model.safetensors",
        "pulling model.safetensors",
        "verifying",
        "success",
    ]
    assert [(line.completed, line.total) for line in lines[1:3]] == [(5, 10), (10, 10)]
    assert {"qwen3-0.6b", "qwen3-1.7b"} <= listed


def test_a_download_that_fails_is_an_error_of_the_stream() -> None:
    made = services(FakeRunner())
    made.models.pull_steps = [  # type: ignore[attr-defined]
        FakePullStep("model.safetensors", 5, 10),
        errors.DownloadFailed("The server went away.", hint="Try again."),
    ]
    with serve_in_thread(lambda: made) as site, connect_site(site) as client:
        with pytest.raises(ollama.ResponseError, match="The server went away"):
            list(client.pull("qwen3:0.6b", stream=True))
        with pytest.raises(ollama.ResponseError) as whole:
            client.pull("qwen3:0.6b")
        assert whole.value.status_code == 502


def test_delete_removes_a_model(own_site: Site) -> None:
    with connect_site(own_site) as client:
        assert client.delete("smollm2-135m").status == "success"


# ---- Silence ---------------------------------------------------------------------------------------------


async def test_empty_pieces_fill_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format has no comments."""
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.02)
    monkeypatch.setattr(limits, "STREAM_PROGRESS_S", 0.0)
    enough = asyncio.Event()

    def slow(job: Job) -> Iterable[Step]:
        name = job.request.id
        return [p.Accepted(name, 9), enough, p.Delta(name, "ok"), p.Finished(name, "stop", p.Usage(9, 0, 1))]

    order, lines = OllamaOrder(), 0
    async with serve(services(FakeRunner(slow))) as site, site.client() as session:
        async with session.post("/api/chat", json={"model": "smollm2-135m", "messages": ASK}) as answer:
            async for line in answer.content:
                order.take(json.loads(line))
                lines += 1
                if lines == 5:
                    assert order.text == ""
                    enough.set()
    assert (order.state, order.text) == ("ended", "ok")
