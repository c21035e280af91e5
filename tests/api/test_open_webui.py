"""The requests of Open WebUI 0.12.4, replayed; test_open_webui_program.py runs the program.

It is reached as from a container: by a name of its own, which ``http.allowed_hosts`` lists.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, Site, frames, scripts, serve, services

HOST = "host.docker.internal:8114"
HEADERS = {"Host": HOST, "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def container_site() -> AsyncIterator[Site]:
    async with serve(services(FakeRunner(scripts), hosts=frozenset({HOST}))) as site:
        yield site


@pytest.fixture
async def webui(container_site: Site) -> AsyncIterator[aiohttp.ClientSession]:
    async with container_site.client(headers=HEADERS) as session:
        yield session


async def test_its_list_of_models(webui: aiohttp.ClientSession) -> None:
    async with webui.get("/v1/models") as response:
        assert response.status == 200
        models = (await response.json())["data"]
    assert MODEL in [model["id"] for model in models]


async def test_a_chat_is_streamed_with_reasoning_apart_and_usage(
    webui: aiohttp.ClientSession,
) -> None:
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "think"}]},
        ],
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 64,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "reasoning_effort": "medium",
        "seed": 5,
        "stop": ["END"],
        "logit_bias": {"5": 1},
        "response_format": {"type": "text"},
    }
    async with webui.post(CHAT, data=json.dumps(body)) as response:
        assert response.status == 200
        assert "text/event-stream" in response.headers["Content-Type"]
        *objects, end = frames(await response.text())
    assert end == "[DONE]"
    told = [json.loads(each) for each in objects]
    deltas = [choice["delta"] for each in told for choice in each["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
    assert told[-1]["usage"]["completion_tokens"] == 5


async def test_titles_and_tags_are_whole_answers(webui: aiohttp.ClientSession) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name this chat in a few words, as JSON."}],
        "stream": False,
        "max_tokens": 1000,
    }
    async with webui.post(CHAT, json=body) as response:
        assert response.status == 200
        assert (await response.json())["choices"][0]["message"]["content"]


async def test_its_errors_are_shown_to_the_user(webui: aiohttp.ClientSession) -> None:
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "too long"}]}
    async with webui.post(CHAT, json=body) as response:
        assert response.status == 400
        assert response.content_type == "application/json"
        assert (await response.json())["error"]["message"]


async def test_a_name_that_is_not_listed_is_refused_with_the_setting(container_site: Site) -> None:
    other = {**HEADERS, "Host": "fleet.example:8114"}
    async with container_site.client(headers=other) as session, session.get("/v1/models") as response:
        assert response.status == 403
        assert "http.allowed_hosts" in (await response.json())["error"]["message"]
