"""Fields that OpenAI's document requires, and those whose type it gives without null: code that was generated
from it fails on the first object that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_fakes import Site

REQUIRED = {
    "/v1/chat/completions": {
        "": "id object created model choices",
        "choices": "index message finish_reason logprobs",
        "choices.message": "role content refusal",
        "choices.logprobs": "content refusal",
        "usage": "prompt_tokens completion_tokens total_tokens",
    },
    "/v1/completions": {
        "": "id object created model choices",
        "choices": "index text finish_reason logprobs",
    },
    "/v1/responses": {
        "": "id object created_at error incomplete_details instructions metadata model output"
        " parallel_tool_calls temperature tool_choice tools top_p",
        "output": "id type role content status",
        "output.content": "type text annotations logprobs",
        "usage": "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens",
    },
}
# Where they are not known they are left out.
NEVER_NULL = {
    "/v1/chat/completions": "usage system_fingerprint service_tier",
    "/v1/completions": "usage system_fingerprint",
    "/v1/responses": "user text prompt service_tier status usage prompt_cache_options",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}


def at(found: Any, place: str) -> Iterator[dict[str, Any]]:
    """The objects at a place, each of a list."""
    if isinstance(found, list):
        for each in found:
            yield from at(each, place)
    elif place:
        name, _, rest = place.partition(".")
        yield from at(found[name], rest)
    else:
        yield found


async def answered(site: Site, path: str, **more: Any) -> str:
    async with site.client() as session, session.post(path, json={**BODIES[path], **more}) as answer:
        assert answer.status == 200
        return await answer.text()


@pytest.mark.parametrize("path", REQUIRED)
async def test_a_whole_answer_has_what_the_document_requires(site: Site, path: str) -> None:
    found = json.loads(await answered(site, path))
    for place, names in REQUIRED[path].items():
        objects = list(at(found, place))
        assert objects
        for each in objects:
            assert [name for name in names.split() if name not in each] == []
    assert [name for name in NEVER_NULL[path].split() if found.get(name, "") is None] == []


@pytest.mark.parametrize("path", REQUIRED)
async def test_no_event_of_a_stream_has_a_null_that_the_document_does_not_know(site: Site, path: str) -> None:
    text = await answered(site, path, stream=True)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    assert lines
    for event in map(json.loads, lines):
        found = event.get("response", event)
        assert [name for name in NEVER_NULL[path].split() if found.get(name, "") is None] == []
        if path == "/v1/chat/completions":
            for choice in found["choices"]:
                assert (choice.get("logprobs") or {"refusal": None})["refusal"] is None
