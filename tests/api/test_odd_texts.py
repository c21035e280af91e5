"""Texts in bodies that are no whole characters, or none at all: each dialect answers them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_fakes import FakeRunner, Site

from fleetd.api.http.body import parse
from fleetd.engine import protocol as p

HALF = "a\ud83d b\udc00\ud83d\ude00"
READ = "a\N{REPLACEMENT CHARACTER} b\N{REPLACEMENT CHARACTER}\N{GRINNING FACE}"
TOOL = {"name": "look", "description": HALF, "parameters": {"type": "object", "title": HALF, HALF: HALF}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": json.dumps({HALF: HALF})}}


def of_chat() -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": HALF},
            {"role": "user", "content": [{"type": "text", "text": HALF}]},
            {"role": "assistant", "content": HALF, "reasoning_content": HALF, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": HALF},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "stop": [HALF],
        "metadata": {HALF: HALF},
        "user": HALF,
        HALF: HALF,
    }


def of_completion() -> dict[str, Any]:
    return {"prompt": HALF, "stop": HALF, "user": HALF, HALF: [HALF]}


def of_responses() -> dict[str, Any]:
    return {
        "instructions": HALF,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": HALF}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": HALF}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": json.dumps({HALF: HALF})},
            {"type": "function_call_output", "call_id": "c", "output": HALF},
            {"type": "custom_tool_call", "call_id": "d", "name": "write", "input": HALF},
            {"type": "custom_tool_call_output", "call_id": "d", "output": HALF},
        ],
        "tools": [{"type": "function", **TOOL}, {"type": "custom", "name": "write", "description": HALF}],
        "metadata": {HALF: HALF},
        "user": HALF,
    }


def of_messages() -> dict[str, Any]:
    return {
        "system": [{"type": "text", "text": HALF}],
        "messages": [
            {"role": "user", "content": HALF},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": HALF, "signature": HALF},
                    {"type": "tool_use", "id": "c", "name": "look", "input": {HALF: HALF}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": HALF}]},
        ],
        "tools": [{"name": "look", "description": HALF, "input_schema": TOOL["parameters"]}],
        "stop_sequences": [HALF],
        "metadata": {"user_id": HALF},
    }


def of_ollama_chat() -> dict[str, Any]:
    call = {"function": {"name": "look", "arguments": {HALF: HALF}}}
    return {
        "model": "smollm2-135m",
        "messages": [
            {"role": "user", "content": HALF},
            {"role": "assistant", "content": HALF, "thinking": HALF, "tool_calls": [call]},
            {"role": "tool", "tool_name": "look", "content": HALF},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "options": {"stop": [HALF], HALF: HALF},
    }


def of_ollama_generate() -> dict[str, Any]:
    return {"model": "smollm2-135m", "prompt": HALF, "system": HALF, "options": {"stop": HALF}}


BODIES = {
    "/v1/chat/completions": of_chat,
    "/v1/completions": of_completion,
    "/v1/responses": of_responses,
    "/v1/messages": of_messages,
    "/api/chat": of_ollama_chat,
    "/api/generate": of_ollama_generate,
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_half_a_character_anywhere_in_a_body_is_read_as_the_one_for_none(
    site: Site, runner: FakeRunner, path: str, streamed: bool
) -> None:
    body = json.dumps({**BODIES[path](), "stream": streamed}).encode()
    assert rb"\ud83d " in body
    headers = {**site.auth, "Content-Type": "application/json"}
    async with site.client() as session, session.post(path, data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    told = p.encode(runner.jobs[0].request).decode("utf-8", "replace")
    assert READ in told
    # Whatever of the prompt was no half is as it was.
    assert told.count("\N{REPLACEMENT CHARACTER}") >= 2


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/compress"])
async def test_half_a_character_is_read_where_tokens_are_counted_and_prompts_shortened(
    site: Site, path: str
) -> None:
    body = {"input": HALF} if path == "/v1/responses/input_tokens" else of_messages()
    if path == "/v1/compress":
        body = {"prompt": f"{HALF}\nb", "question": HALF}
    async with site.client() as session, session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()


def test_escapes_that_are_whole_stay_as_they_are() -> None:
    said = r'["\\ud83d", "\ud83d\ude00\\", "\"\n\u0041", "\ude00\ud83d", "\uD83D\uDE00"]'
    assert parse(said.encode(), list[str]) == ["\\ud83d", "😀\\", '"\nA', "\ufffd\ufffd", "😀"]


@pytest.mark.parametrize(
    ("path", "field", "empty"),
    [
        ("/v1/chat/completions", "stop", ""),
        ("/v1/chat/completions", "stop", [""]),
        ("/v1/completions", "stop", ["", "END"]),
        ("/v1/messages", "stop_sequences", ["", "END"]),
        ("/api/chat", "options", {"stop": [""]}),
        ("/api/generate", "options", {"stop": ["", "END"]}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_empty_text_to_stop_at_is_none(
    site: Site, runner: FakeRunner, path: str, field: str, empty: Any, streamed: bool
) -> None:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    async with (
        site.client() as session,
        session.post(path, json={**body, field: empty, "stream": streamed}) as answer,
    ):
        assert answer.status == 200, await answer.text()
    assert runner.jobs[0].request.stop == (["END"] if "END" in str(empty) else [])
