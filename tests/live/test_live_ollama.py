"""Ollama's library against a live daemon with a real model: the scripted suite again, what only a real engine
shows, and the address without a token."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import ollama
import pytest
import test_ollama_sdk
from api_fakes import Target
from live_daemon import LiveDaemon, until
from live_fleet import free_port
from test_ollama_sdk import WEATHER, in_order, ollama_client

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

__all__ = ["ollama_client"]

for _name, _test in list(vars(test_ollama_sdk).items()):
    if _name.startswith("test_") and {"ollama_client", "target"} <= set(inspect.signature(_test).parameters):
        globals()[_name] = _test

test_what_copilot_asks_in_its_order = test_ollama_sdk.test_what_copilot_asks_in_its_order


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_suite_of_the_scripted_daemon_runs_here() -> None:
    names = {"test_the_same_request_in_every_dialect_gives_the_same_tokens", "test_errors_are_the_librarys"}
    assert names <= set(globals())


def test_tools_and_thinking_of_a_real_engine(ollama_client: ollama.Client, target: Target) -> None:
    few = {"num_predict": 50, "temperature": 0}
    tool = {**WEATHER, "function": {**WEATHER["function"], "name": "get_weather"}}
    called = ollama_client.chat("chain", said("<weather>"), tools=[tool], options=few).message
    assert called.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in called.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    pondered = in_order(target, model="chain", messages=said("<ponder>"), options=few)
    assert pondered.thinking.strip() == "First, I wonder."
    assert pondered.text
    short = ollama_client.chat("chain", said("<count>"), options={**few, "num_predict": 3})
    assert (short.done_reason, short.eval_count) == ("length", 3)
    assert short.prompt_eval_duration
    assert short.eval_duration
    shown = ollama_client.show("chain").capabilities
    assert shown == ["completion", "tools", "thinking"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_400(ollama_client: ollama.Client, stream: bool) -> None:
    with pytest.raises(ollama.ResponseError, match="prompt is too long") as caught:
        list(ollama_client.chat("chain", said("x" * 5000 + "<hello>"), stream=stream))
    assert caught.value.status_code == 400


def test_leaving_in_the_middle_cancels(ollama_client: ollama.Client, live: LiveDaemon) -> None:
    before = live.cancelled_so_far()
    pieces = ollama_client.chat("chain", said("<count>"), options={"num_predict": 4000}, stream=True)
    next(piece for piece in pieces if piece.message.content)
    pieces.close()  # type: ignore[attr-defined]  # a generator
    until(lambda: live.cancelled == before + 1 and live.running == 0)


def test_an_address_without_a_token_and_how_long_a_model_stays(
    make_daemon: Callable[..., LiveDaemon],
) -> None:
    port = free_port()
    daemon = make_daemon(FLEETD_HTTP_OLLAMA_LISTEN=f"127.0.0.1:{port}")
    address = f"http://127.0.0.1:{port}"
    assert daemon.control("GET", "/fleet/v1/env")["ollama_url"] == address
    with ollama.Client(host=address, timeout=60) as client:
        assert client.generate("chain", "", keep_alive=-1).done_reason == "load"
        (running,) = client.ps().models
        assert running.model == "chain"
        assert running.expires_at is not None
        assert running.expires_at.year > 2100
        assert client.chat("chain", said("<hello>"), keep_alive=0).message.content
        until(lambda: client.ps().models == [])
        with pytest.raises(ollama.ResponseError) as caught:
            client.delete("chain")
        assert caught.value.status_code == 401
    body = {"model": "chain", "messages": said("<hello>"), "max_tokens": 2}
    with httpx.Client(base_url=address, timeout=60) as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert http.get("/fleet/v1/status").status_code == 404
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert http.get("/api/tags", headers=headers).status_code == 403
        form = {"Content-Type": "text/plain"}
        assert http.post("/api/chat", content=json.dumps(body), headers=form).status_code == 415
    with httpx.Client(base_url=daemon.base_url.removesuffix("/v1"), timeout=60) as http:
        assert http.get("/api/tags").status_code == 401


def test_a_port_that_is_taken_is_said_and_does_not_stop_the_daemon(
    make_daemon: Callable[..., LiveDaemon],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        daemon = make_daemon(FLEETD_HTTP_OLLAMA_LISTEN=f"127.0.0.1:{port}")
        assert daemon.status()["ready"]
        assert daemon.status()["ollama"] is None
    why = f"another program listens at 127.0.0.1:{port}"
    assert daemon.status()["ollama_missing"] == why
    assert "http.ollama_not_served" in daemon.log.read_text()
    assert why in daemon.log.read_text()
