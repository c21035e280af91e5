"""``responses`` of OpenAI's library against a live daemon with a real model: the scripted suite again, and
what only a real engine shows."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import pytest
import test_responses_sdk
from api_fakes import Target
from live_daemon import LiveDaemon, until
from test_responses_sdk import WEATHER, client, in_order

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

__all__ = ["client"]

for _name, _test in list(vars(test_responses_sdk).items()):
    wanted = inspect.signature(_test).parameters if _name.startswith("test_") else {}
    if {"client", "target"} <= set(wanted):
        globals()[_name] = _test


def test_the_suite_of_the_scripted_daemon_runs_here() -> None:
    names = {"test_the_same_request_as_a_chat_gives_the_same_tokens", "test_errors_are_the_librarys"}
    assert names <= set(globals())


def test_tools_and_reasoning_of_a_real_engine(client: openai.OpenAI, target: Target) -> None:
    fields: Any = {"model": "chain", "max_output_tokens": 50, "temperature": 0}
    tools: Any = [{**WEATHER, "name": "get_weather"}]
    called = client.responses.create(input="<weather>", tools=tools, **fields)
    assert [item.type for item in called.output] == ["message", "function_call"]
    assert called.output[1].type == "function_call"
    assert (called.output[1].name, called.output[1].arguments) == ("get_weather", '{"city": "Paris"}')
    pondered = in_order(target, input="<ponder>", **fields)
    assert [item["type"] for item in pondered.items] == ["reasoning", "message"]
    assert pondered.items[0]["content"][0]["text"].strip() == "First, I wonder."
    assert pondered.response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    short = in_order(target, input="<count>", **{**fields, "max_output_tokens": 3})
    assert (short.state, short.items[-1]["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_400(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="chain", input="x" * 5000 + "<hello>", stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_the_next_turn_finds_the_first_in_the_cache(client: openai.OpenAI, target: Target) -> None:
    talk: Any = [{"role": "user", "content": "The harbour lay still before the storm. Why? " * 20}]
    first = client.responses.create(model=target.model, input=talk, max_output_tokens=4, temperature=0)
    talk += [*(item.to_dict() for item in first.output), {"role": "user", "content": "And then?"}]
    again = client.responses.create(model=target.model, input=talk, max_output_tokens=1, temperature=0)
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 4


def test_leaving_in_the_middle_cancels(client: openai.OpenAI, live: LiveDaemon) -> None:
    before = live.cancelled_so_far()
    with client.responses.create(
        model="chain", input="<count>", max_output_tokens=4000, temperature=0, stream=True
    ) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
    until(lambda: live.cancelled == before + 1 and live.running == 0)
