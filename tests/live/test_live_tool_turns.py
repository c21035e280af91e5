"""A turn with a tool and the turn with its result, in three dialects, by a worker whose tokens are scripted.

Coding agents do the same at length in ``test_live_agents.py``.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from live_daemon import LiveDaemon
from scripted_answers import DONE
from scripted_daemon import ScriptedDaemon, anew
from scripted_model import NAME

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

CALL: tuple[str, dict[str, Any]] = ("look", {"city": "Paris", "days": [1, 2]})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
THOUGHT = "What is next?"
RESULT = "It rains in Paris, day after day. " * 40
INSTRUCTIONS = "You look before you answer, whatever was said before. " * 60
QUESTION = "Does it rain?"


def openai_client(daemon: LiveDaemon) -> openai.OpenAI:
    return openai.OpenAI(base_url=daemon.base_url, api_key=daemon.key, max_retries=0)


def by_messages(daemon: LiveDaemon) -> tuple[str, dict[str, Any], str]:
    """The call, its arguments and the answer to its result."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {
        "model": NAME,
        "max_tokens": 200,
        "system": INSTRUCTIONS,
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        "messages": messages,
    }
    with anthropic.Anthropic(
        base_url=daemon.base_url.removesuffix("/v1"), api_key=daemon.key, max_retries=0
    ) as client:
        with client.messages.stream(**fields) as stream:
            called = stream.get_final_message()
        assert [block.type for block in called.content] == ["thinking", "text", "tool_use"]
        assert called.stop_reason == "tool_use"
        use: Any = called.content[-1]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in called.content]},
            {"role": "user", "content": [result]},
        ]
        answer: Any = client.messages.create(**fields).content[0]
    return use.name, use.input, answer.text


def by_chat(daemon: LiveDaemon) -> tuple[str, dict[str, Any], str]:
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": QUESTION},
    ]
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
    fields: Any = {"model": NAME, "tools": [tool], "messages": messages}
    with openai_client(daemon) as client:
        said: Any = client.chat.completions.create(**fields).choices[0]
        assert (said.finish_reason, said.message.reasoning_content.strip()) == ("tool_calls", THOUGHT)
        (call,) = said.message.tool_calls
        messages += [said.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        pieces: Any = client.chat.completions.create(**fields, stream=True)
        answer = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    return call.function.name, json.loads(call.function.arguments), answer


def by_responses(daemon: LiveDaemon) -> tuple[str, dict[str, Any], str]:
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {
        "model": NAME,
        "instructions": INSTRUCTIONS,
        "tools": [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}],
        "input": talk,
    }
    with openai_client(daemon) as client:
        with client.responses.stream(**fields) as stream:
            stream.until_done()
            called: Any = stream.get_final_response()
        assert [item.type for item in called.output] == ["reasoning", "message", "function_call"]
        call = called.output[-1]
        talk += [item.to_dict() for item in called.output]
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        answer = client.responses.create(**fields).output_text
    return call.name, json.loads(call.arguments), answer


@pytest.mark.parametrize("ask", [by_messages, by_chat, by_responses], ids=["messages", "chat", "responses"])
def test_a_turn_with_a_tool_and_only_what_is_new_is_read_for_the_next(
    scripted: ScriptedDaemon, ask: Any
) -> None:
    scripted.play([CALL], thought=THOUGHT)
    assert ask(scripted.daemon) == (*CALL, DONE)
    turns = scripted.traces(2)
    assert len(turns) == 2
    assert turns[1].prompt_tokens > turns[0].prompt_tokens + 200
    assert anew(turns) == [0]
