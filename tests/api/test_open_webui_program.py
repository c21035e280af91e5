"""The real Open WebUI, through its own API and in a browser, against the daemon's HTTP API.

It is large and nothing here fetches it: ``open-webui`` is looked for on PATH, or where OPEN_WEBUI says. In an
environment of its own: ``pip install open-webui`` (Python 3.11 or 3.12).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, Step, scripts, serve_in_thread, services
from browser import NEEDED, Visit
from live_daemon import until

from fleetd import errors
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

PROGRAM = os.environ.get("OPEN_WEBUI") or shutil.which("open-webui")
START_S = 180.0
ANSWER_MS = 60_000

pytestmark = [
    pytest.mark.long,
    pytest.mark.one_loop,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="open-webui is not installed: Open WebUI was NOT tried"),
]

#: The same model, by the other connection.
BY_OLLAMA = f"by-ollama.{MODEL}"
TASK = {"title": "A fine title", "tags": ["one"], "follow_ups": ["And then?"]}


def plays(job: Job) -> Iterable[Step]:
    """What the user says last decides; Open WebUI's own questions are recognised by how they begin."""
    r = job.request
    assert isinstance(r.prompt, p.ChatPrompt)
    begin: list[Step] = [p.Accepted(r.id, 3), p.Prefill(r.id, 3, 3)]
    end = p.Finished(r.id, "stop", p.Usage(3, 0, 3))
    asked = str([message["content"] for message in r.prompt.messages if message["role"] == "user"][-1:])
    if "### Task" in asked:
        return [*begin, p.Delta(r.id, json.dumps(TASK)), end]
    if "plain" in asked and r.prompt.tools:
        return [errors.UnsupportedParameter("This model has no format for tool calls.", param="tools")]
    if "go on" in asked:
        return [*begin, p.Delta(r.id, "It has begun. "), asyncio.Event()]
    if "what time" in asked:
        if r.prompt.messages[-1]["role"] == "tool":
            return [*begin, p.Delta(r.id, "The clock was read."), end]
        call = p.ToolCall(r.id, 0, "call_0", "get_current_timestamp", "{}")
        return [*begin, call, p.Finished(r.id, "tool_calls", p.Usage(3, 0, 3))]
    if "plain" in asked:
        return [*begin, p.Delta(r.id, "No tool was offered."), end]
    return scripts(job)


class OpenWebUI:
    """A running one: its address, a session of its only user, and the engine behind it."""

    def __init__(self, url: str, runner: FakeRunner) -> None:
        self.url, self.runner = url, runner
        self.http = httpx.Client(base_url=url, timeout=60)

    def sign_in(self) -> None:
        found = self.http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
        self.http.headers["Authorization"] = f"Bearer {found['token']}"

    def chat(self, model: str, text: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/api/chat/completions", json=body)


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWebUI]:
    """With a connection of either kind to the same daemon; what comes by Ollama's has a prefix."""
    assert PROGRAM is not None
    folder = tmp_path_factory.mktemp("open-webui")
    runner = FakeRunner(plays)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve_in_thread(lambda: services(runner)) as site, (folder / "log").open("wb") as log:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DATA_DIR": str(folder / "data"),
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "of this test alone",
            "OFFLINE_MODE": "True",
            "HF_HUB_OFFLINE": "1",
            "ANONYMIZED_TELEMETRY": "False",
            "RAG_EMBEDDING_ENGINE": "openai",  # the other one loads a model of its own
            "OPENAI_API_BASE_URL": f"{site.url}/v1",
            "OPENAI_API_KEY": TOKEN,
            "OLLAMA_BASE_URL": site.url,
            "OLLAMA_API_CONFIGS": json.dumps({"0": {"enable": True, "key": TOKEN, "prefix_id": "by-ollama"}}),
        }
        command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        made = OpenWebUI(f"http://127.0.0.1:{port}", runner)
        try:
            until(lambda: _healthy(made, process, folder / "log"), START_S)
            made.sign_in()
            yield made
        finally:
            made.http.close()
            process.terminate()
            process.wait(60)


def _healthy(webui: OpenWebUI, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    try:
        return webui.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def page(webui: OpenWebUI, chromium: Any) -> Iterator[Any]:
    """A new chat in a browser."""
    visit = Visit(chromium)
    visit.context.set_default_timeout(ANSWER_MS)
    opened = visit.open(webui.url)
    news = opened.get_by_role("dialog")
    opened.add_locator_handler(news, lambda: opened.keyboard.press("Escape"))
    opened.wait_for_selector("#chat-input")
    yield opened
    visit.close()


def say(page: Any, text: str) -> None:
    page.click("#chat-input")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def prompts(webui: OpenWebUI, text: str) -> list[p.ChatPrompt]:
    """Of the requests of chats in which the user said ``text``."""
    found = [job.request.prompt for job in webui.runner.jobs]
    chats = [each for each in found if isinstance(each, p.ChatPrompt)]
    return [each for each in chats if each.messages[0]["content"] == text]


def test_it_lists_the_models_of_either_connection(webui: OpenWebUI) -> None:
    listed = webui.http.get("/api/models").json()["data"]
    assert {MODEL, BY_OLLAMA} <= {model["id"] for model in listed}


@pytest.mark.parametrize("model", [MODEL, BY_OLLAMA])
def test_its_api_streams_a_chat_with_reasoning(webui: OpenWebUI, model: str) -> None:
    lines = webui.chat(model, "think about it", stream=True).text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for each in told for choice in each.get("choices", [])]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"


@pytest.mark.parametrize("model", [MODEL, BY_OLLAMA])
def test_a_prompt_that_is_too_long_is_told_by_its_api(webui: OpenWebUI, model: str) -> None:
    answer = webui.chat(model, "this is too long", stream=True)
    assert answer.status_code == 400
    assert "9000 tokens do not fit 8192" in answer.text


@NEEDED
def test_a_chat_in_the_browser_gets_its_answer_and_a_title(webui: OpenWebUI, page: Any) -> None:
    say(page, "think about this")
    page.get_by_text("yes", exact=True).wait_for()
    page.get_by_text("Thought for").wait_for()
    page.get_by_text(TASK["follow_ups"][0]).first.wait_for()
    page.wait_for_function("title => document.title.startsWith(title)", arg=TASK["title"])


@NEEDED
def test_stopping_in_the_browser_cancels_the_request(webui: OpenWebUI, page: Any) -> None:
    before = len(webui.runner.cancelled)
    say(page, "go on and on")
    page.get_by_text("It has begun.").wait_for()
    page.get_by_role("button", name="Stop").click()
    until(lambda: len(webui.runner.cancelled) > before)


@NEEDED
def test_a_tool_of_its_own_is_called_and_its_result_goes_back(webui: OpenWebUI, page: Any) -> None:
    say(page, "what time is it")
    page.get_by_text("The clock was read.").wait_for()
    first, second = prompts(webui, "what time is it")
    assert second.messages[0] == first.messages[0]
    assert second.tools == first.tools
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool"]


@NEEDED
def test_errors_are_shown_in_the_browser(webui: OpenWebUI, page: Any) -> None:
    say(page, "far too long")
    page.get_by_text("9000 tokens do not fit 8192").first.wait_for()


@NEEDED
def test_a_model_without_tools_answers_once_function_calling_is_legacy(webui: OpenWebUI, page: Any) -> None:
    say(page, "something plain")
    page.get_by_text("This model has no format for tool calls").first.wait_for()
    before = webui.http.get("/api/v1/configs/models").json()
    legacy = {**before, "DEFAULT_MODEL_PARAMS": {"function_calling": "legacy"}}
    webui.http.post("/api/v1/configs/models", json=legacy).raise_for_status()
    try:
        page.goto(webui.url)
        page.wait_for_selector("#chat-input")
        say(page, "quite plain")
        page.get_by_text("No tool was offered.").wait_for()
    finally:
        webui.http.post("/api/v1/configs/models", json=before).raise_for_status()
