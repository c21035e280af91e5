"""The clients that people use, against a live daemon with real workers.

Most of it is the suite of tests/api/test_openai_sdk.py, which asserts shape and agreement and so holds for
any model: every test there that asks for a ``target`` runs here again, with the live daemon as the target.
"""

from __future__ import annotations

import inspect
import json
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import test_openai_sdk
from api_fakes import Target
from live_daemon import LiveDaemon, until
from test_openai_sdk import async_client, client, connect

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

__all__ = ["async_client", "client"]

# A model of random words calls what it likes; tool calls of a real engine are tested below.
NOT_HERE = {"test_tool_calls_whole_and_streamed"}
for _name, _test in list(vars(test_openai_sdk).items()):
    if not _name.startswith("test_") or _name in NOT_HERE:
        continue
    if "script_client" not in inspect.signature(_test).parameters:
        globals()[_name] = _test

CURL = shutil.which("curl")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_suite_of_the_scripted_daemon_runs_here() -> None:
    assert {"test_chat", "test_async", "test_logprobs"} <= set(globals())


def test_a_real_answer(client: openai.OpenAI, loaded_smol: str) -> None:
    reply = client.chat.completions.create(
        model=loaded_smol, messages=said("What is 2+2?"), temperature=0, max_tokens=20
    )
    assert reply.choices[0].message.content == "The answer to this classic math problem is 4."
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.usefixtures("loaded_smol")
def test_the_default_model_needs_no_name(client: openai.OpenAI) -> None:
    fields: Any = {"messages": said("What is 2+2?"), "temperature": 0, "max_tokens": 20}
    for model in ("default", ""):
        reply = client.chat.completions.create(model=model, **fields)
        assert reply.choices[0].message.content == "The answer to this classic math problem is 4."


def test_tool_calls_of_a_real_engine(client: openai.OpenAI) -> None:
    fields: Any = {"model": "chain", "messages": said("<weather>"), "tools": [WEATHER], "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me look."
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls or []
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_reasoning_code_points_and_stop_strings_of_a_real_engine(client: openai.OpenAI) -> None:
    def ask(marker: str, **more: Any) -> Any:
        return client.chat.completions.create(
            model="chain", messages=said(marker), temperature=0, **more
        ).choices[0]

    pondered = ask("<ponder>").message
    assert pondered.content.strip() == "So: 42."
    assert pondered.model_extra["reasoning_content"] == "First, I wonder."
    assert ask("<utf8>").message.content == "aé€😀z"
    cut = ask("<cutoff>", stop=["STOP"])
    assert (cut.message.content, cut.finish_reason) == ("good part ", "stop")
    counted = ask("<count>", max_tokens=3)
    assert (counted.message.content, counted.finish_reason) == ("1 2 3", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_400_in_the_words_that_litellm_looks_for(
    client: openai.OpenAI, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chain", messages=said("x" * 5000 + "<hello>"), stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 4096 tokens" in str(caught.value)


def test_leaving_in_the_middle_cancels(client: openai.OpenAI, live: LiveDaemon) -> None:
    before = live.cancelled_so_far()
    fields: Any = {"model": "chain", "messages": said("<count>"), "max_tokens": 4000, "temperature": 0}
    with client.chat.completions.create(stream=True, **fields) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
    until(lambda: live.cancelled == before + 1 and live.running == 0)


@pytest.mark.long
def test_eight_at_once_say_what_each_says_alone(live: LiveDaemon, target: Any) -> None:
    assert live.control("POST", "/fleet/v1/models/load", {"model": target.model}) == {"ok": True}
    (engine,) = [found for found in live.status()["engines"] if found["model"] == target.model]
    if engine["device"] != "cpu":
        pytest.skip("bit-equal arithmetic is promised on the CPU")
    questions = [
        ("What is the capital of Italy?", 0.0),
        ("Name a colour.", 0.0),
        ("Write one sentence about the sea, and nothing else but that sentence, please.", 0.0),
        ("Count to three.", 0.0),
        ("Tell me about a fox.", 0.9),
        ("Tell me about a fox.", 0.9),
        ("Repeat after me: " + "one two three four five six seven eight nine ten " * 8, 0.0),
        ("Why?", 0.7),
    ]

    def ask(number: int) -> tuple[str | None, list[float]]:
        text, temperature = questions[number]
        with connect(target) as own:
            choice = own.chat.completions.create(
                model="smollm2-135m",
                messages=said(text),
                temperature=temperature,
                seed=number,
                max_tokens=6,
                logprobs=True,
            ).choices[0]
        assert choice.logprobs is not None
        return choice.message.content, [token.logprob for token in choice.logprobs.content or ()]

    with ThreadPoolExecutor(len(questions)) as threads:
        together = list(threads.map(ask, range(len(questions))))
    alone = [ask(number) for number in range(len(questions))]
    assert together == alone
    assert alone[4] != alone[5]  # the same words, another seed


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
def test_curl(live: LiveDaemon) -> None:
    assert CURL is not None
    body = {"model": "chain", "messages": said("<hello>"), "stream": True, "temperature": 0}
    done = subprocess.run(
        [CURL, "-sSNi", f"{live.base_url}/chat/completions", "--json", json.dumps(body), "-K", "-"],
        input=f'header = "Authorization: Bearer {live.key}"',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    head, _, events = done.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "text/event-stream" in head
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    text = "".join(c["delta"].get("content") or "" for piece in pieces for c in piece["choices"])
    assert text == "Hello there, world!"
    assert events.rstrip().endswith("data: [DONE]")


def test_a_raw_socket_sees_well_formed_chunks(live: LiveDaemon) -> None:
    body = json.dumps({"model": "chain", "messages": said("<hello>"), "stream": True}).encode()
    host, port = live.address
    with socket.create_connection((host, port), timeout=60) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
            % (port, live.key.encode(), len(body), body)
        )
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    head, _, rest = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Transfer-Encoding: chunked" in head
    payload = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            break
        piece, end, rest = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert end == b"\r\n"
        payload += piece
    assert rest == b"\r\n"
    assert payload.endswith(b"data: [DONE]\n\n")


def test_the_choices_of_one_request_read_its_prompt_once(
    client: openai.OpenAI, live: LiveDaemon, target: Target
) -> None:
    text = "The ferry was late again, and nobody on the pier knew why. " * 30
    reply = client.chat.completions.create(
        model=target.model, messages=said(f"{text} Why?"), n=3, max_tokens=3, temperature=0
    )
    assert len({choice.message.content for choice in reply.choices}) == 1
    assert reply.usage is not None
    found = live.control("GET", "/fleet/v1/traces?last=3")["traces"]
    tokens = found[0]["prompt_tokens"]
    assert [trace["prompt_tokens"] for trace in found] == [tokens] * 3
    assert sorted(tokens - trace["cached_tokens"] for trace in found)[:2] == [1, 1]
