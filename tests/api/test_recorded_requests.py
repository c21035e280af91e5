"""Requests in the likeness of those that real clients were recorded with: what each becomes for the model.

A file has the request, and what is expected: the messages and tools as templates read them, the texts before
each mark of the cache, the warnings, or the refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_fakes import FakeRunner, Site

from fleetd.engine.protocol import ChatPrompt

FOLDER = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


async def ask(site: Site, request: dict[str, Any]) -> tuple[aiohttp.ClientResponse, str]:
    body = None if request["body"] is None else json.dumps(request["body"]).encode()
    headers = {**request["headers"], **site.auth}
    async with aiohttp.ClientSession(site.url) as session:
        async with session.request(request["method"], request["path"], data=body, headers=headers) as answer:
            return answer, await answer.text()


def warnings_in(text: str) -> list[str]:
    """Of a Responses stream: those of its last event."""
    last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
    found: list[str] = json.loads(last.removeprefix("data: ")).get("response", {}).get("warnings", [])
    return found


@pytest.mark.one_loop
@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_request_means_what_its_client_means(
    name: str, site: Site, runner: FakeRunner
) -> None:
    request = json.loads((FOLDER / f"{name}.json").read_text())
    expected = request["expected"]
    answer, text = await ask(site, request)
    assert answer.status == expected["status"], text
    assert expected.get("error", "") in text
    if "models" in expected:
        listed = json.loads(text)
        models = listed.get("data", listed.get("models"))
        assert [model.get("id") or model["name"] for model in models] == expected["models"]
    if "messages" not in expected:
        assert runner.jobs == []
        return
    (job,) = runner.jobs
    prompt = job.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == expected["messages"]
    assert [tool["function"]["name"] for tool in prompt.tools or ()] == expected.get("tools", [])
    marked = [prompt.messages[index]["content"][:chars] for index, chars in prompt.cache_marks]
    assert marked == expected.get("marks", [])
    streams = answer.content_type in ("text/event-stream", "application/x-ndjson")
    assert streams == expected.get("stream", False)
    if "warnings" in expected:
        assert warnings_in(text) == expected["warnings"]


def test_every_client_that_was_recorded_is_here() -> None:
    programs = {json.loads((FOLDER / f"{name}.json").read_text())["headers"]["user-agent"] for name in NAMES}
    assert {program.split("/")[0] for program in programs} == {
        "Anthropic",
        "Bun",
        "claude-cli",
        "codex_exec",
        "ollama-python",
    }
