"""Anthropic's library against a live daemon with a real model: the scripted suite again, and what only a real
engine shows."""

from __future__ import annotations

import inspect
import re
from typing import Any

import anthropic
import pytest
import test_anthropic_sdk
from api_fakes import Target
from live_daemon import LiveDaemon, until
from test_anthropic_sdk import WEATHER, in_order, messages_client

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

__all__ = ["messages_client"]

for _name, _test in list(vars(test_anthropic_sdk).items()):
    if _name.startswith("test_") and "messages_client" in inspect.signature(_test).parameters:
        globals()[_name] = _test


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_suite_of_the_scripted_daemon_runs_here() -> None:
    names = {"test_the_same_request_in_openais_dialect_gives_the_same_tokens", "test_errors_are_the_librarys"}
    assert names <= set(globals())


def test_tools_and_thinking_of_a_real_engine(messages_client: anthropic.Anthropic, target: Target) -> None:
    fields: Any = {"model": "chain", "max_tokens": 50, "extra_body": {"temperature": 0}}
    called = messages_client.messages.create(
        messages=said("<weather>"), tools=[{**WEATHER, "name": "get_weather"}], **fields
    )
    assert [block.type for block in called.content] == ["text", "tool_use"]
    assert called.content[1].type == "tool_use"
    assert (called.content[1].name, called.content[1].input) == ("get_weather", {"city": "Paris"})
    assert called.stop_reason == "tool_use"
    pondered = in_order(target, model="chain", messages=said("<ponder>"), max_tokens=50, temperature=0)
    assert [block["type"] for block in pondered.blocks] == ["thinking", "text"]
    assert pondered.blocks[0]["thinking"].strip() == "First, I wonder."
    cut = messages_client.messages.create(messages=said("<cutoff>"), stop_sequences=["STOP"], **fields)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "STOP")
    short = messages_client.messages.create(messages=said("<count>"), **{**fields, "max_tokens": 3})
    assert short.stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_said_so_that_clients_compact(
    messages_client: anthropic.Anthropic, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages_client.messages.create(
            model="chain", messages=said("x" * 5000 + "<hello>"), max_tokens=5, stream=stream
        )
    assert re.search(r"prompt is too long: 50\d\d tokens > 4096 maximum", str(caught.value))


def test_what_varies_between_requests_costs_no_prefill(
    messages_client: anthropic.Anthropic, target: Target
) -> None:
    text = "The harbour lay still, and the gulls had gone inland before the storm. " * 20

    def ask(number: str, cached: bool) -> Any:
        mark: Any = {"cache_control": {"type": "ephemeral"}} if cached else {}
        question: Any = {"type": "text", "text": f"Date {number}. Why?", **mark}
        return messages_client.messages.create(
            model=target.model,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"},
                {"type": "text", "text": text, **mark},
            ],
            messages=[{"role": "user", "content": [question]}],
            max_tokens=1,
        ).usage

    first = ask("1", cached=False)
    again = ask("2", cached=True)
    tokens = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert again.cache_read_input_tokens >= tokens - 12  # what follows the date
    assert again.cache_read_input_tokens + again.cache_creation_input_tokens == tokens
    assert again.input_tokens == 0


def test_leaving_in_the_middle_cancels(messages_client: anthropic.Anthropic, live: LiveDaemon) -> None:
    before = live.cancelled_so_far()
    with messages_client.messages.stream(
        model="chain", messages=said("<count>"), max_tokens=4000, extra_body={"temperature": 0}
    ) as stream:
        next(iter(stream.text_stream))
    until(lambda: live.cancelled == before + 1 and live.running == 0)
