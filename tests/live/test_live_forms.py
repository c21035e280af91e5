"""Answers with a form, by OpenAI's library, from a live daemon: the default model and one of random words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import test_recorded_requests
from api_fakes import Target
from jsonschema import Draft202012Validator
from live_daemon import WAIT_S, LiveDaemon

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

ADA: list[Any] = [{"role": "user", "content": "Invent a person called Ada, who is 36."}]
PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=130)
    mood: Literal["good", "bad"]


@pytest.fixture
def client(target: Target) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=target.base_url, api_key=target.api_key, max_retries=0) as made:
        yield made


@pytest.fixture(params=[0.0, 1.0], ids=["greedy", "drawn"])
def fields(request: pytest.FixtureRequest, target: Target) -> dict[str, Any]:
    # It would think random words, and would not end.
    quietly = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"model": target.model, "temperature": request.param, "seed": 3, "extra_body": quietly}


def test_a_class_is_answered_by_one_of_its_objects(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    """And the drafts, forced ones among them, change nothing."""
    asked: Any = {"messages": ADA, "response_format": Person, "max_tokens": 200, **fields}
    answers = [
        client.chat.completions.parse(**asked | {"extra_body": {**fields["extra_body"], "speculate": drafts}})
        for drafts in (True, False, {"sources": ["grammar"]})
    ]
    choices = [each.choices[0] for each in answers]
    assert {type(each.message.parsed) for each in choices} == {Person}
    assert {each.finish_reason for each in choices} == {"stop"}
    assert len({each.message.content for each in choices}) == 1


def test_responses_are_held_too(client: openai.OpenAI, target: Target) -> None:
    quietly: Any = {"reasoning": {"effort": "none"}, "max_output_tokens": 200}
    found = client.responses.parse(model=target.model, input=ADA, text_format=Person, **quietly)
    assert isinstance(found.output_parsed, Person)


def test_a_call_that_must_be_made_is_made(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        asked: Any = {"messages": PARIS, "tools": WEATHER, "tool_choice": choice, "max_tokens": 200, **fields}
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert not whole.message.content
        call, *more = whole.message.tool_calls or ()
        assert choice == "required" or not more
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments["city"] in ("Paris", "Rome")) == ("get_weather", True)
        assert arguments["days"] <= 9
        told = ""
        for chunk in client.chat.completions.create(stream=True, **asked):
            for piece in chunk.choices[0].delta.tool_calls or ():
                told += (piece.function.arguments or "") if piece.function and not piece.index else ""
        assert told == call.function.arguments


def test_what_is_cut_off_says_so(client: openai.OpenAI, target: Target) -> None:
    asked: Any = {"model": target.model, "max_tokens": 6}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=ADA, response_format=Person, **asked)
    cut = client.chat.completions.create(messages=PARIS, tools=WEATHER, tool_choice="required", **asked)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)
    assert not cut.choices[0].message.content


@pytest.mark.parametrize(
    ("guided", "form"),
    [
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"guided_choice": ["yes", "no, never"]}, "yes|no, never"),
        ({"guided_grammar": 'start: ("a" | "b" "c"?)~3'}, "(a|bc?){3}"),
        ({"guided_grammar": 'root ::= "x" [0-9] root | "."'}, r"(x[0-9])*\."),
        ({"structured_outputs": {"json": {"type": "integer", "minimum": 10, "maximum": 99}}}, "[1-9][0-9]"),
    ],
)
def test_what_clients_of_vllm_send(
    client: openai.OpenAI, fields: dict[str, Any], guided: dict[str, Any], form: str
) -> None:
    asked: Any = {**fields, "extra_body": guided}
    said = client.completions.create(prompt="Here it is:", max_tokens=300, **asked)
    assert said.choices[0].finish_reason == "stop"
    assert re.fullmatch(form, said.choices[0].text)


@pytest.mark.parametrize(
    ("guided", "says"),
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_grammar": "start: other"}, "guided_grammar"),
    ],
)
def test_what_cannot_be_held_is_refused(
    client: openai.OpenAI, target: Target, guided: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.completions.create(model=target.model, prompt="x", extra_body=guided)
    assert caught.value.param == says


def test_the_default_model_fills_a_class_and_calls_a_tool(live: LiveDaemon, loaded_smol: str) -> None:
    asked: Any = {"model": loaded_smol, "temperature": 0, "max_tokens": 80}
    with openai.OpenAI(base_url=live.base_url, api_key=live.key, max_retries=0) as client:
        person = client.chat.completions.parse(messages=ADA, response_format=Person, **asked)
        called = client.chat.completions.with_raw_response.create(
            messages=PARIS, tools=WEATHER, tool_choice="required", **asked
        )
    assert person.choices[0].message.parsed == Person(name="Ada", age=36, mood="good")
    (call,) = called.parse().choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] == "Paris"


@pytest.mark.parametrize(
    ("recorded", "choice"), [("claude-code-first", {"type": "any"}), ("codex-first", "required")]
)
def test_an_agents_request_must_be_answered_by_a_call(
    live: LiveDaemon, loaded_smol: str, recorded: str, choice: Any
) -> None:
    """What Claude Code and Codex send, with their tools strict, and one of them to be called."""
    sent = json.loads(
        (Path(test_recorded_requests.__file__).parent / f"fixtures/{recorded}.json").read_bytes()
    )
    body = sent["body"] | {"model": loaded_smol, "stream": False, "temperature": 0, "tool_choice": choice}
    body |= {"max_tokens": 120} if choice != "required" else {"max_output_tokens": 120}
    tools = {tool["name"]: tool for tool in body["tools"] if tool.get("type") in (None, "function")}
    body["tools"] = [tool | {"strict": True} for tool in tools.values()]
    headers = {"Authorization": f"Bearer {live.key}"}
    root = live.base_url.removesuffix("/v1")
    said = (
        httpx.post(root + sent["path"], json=body, headers=headers, timeout=WAIT_S).raise_for_status().json()
    )
    parts = said.get("content") or said["output"]
    (call,) = [part for part in parts if part["type"] in ("tool_use", "function_call")]
    assert [part["type"] for part in parts if part is not call] == []
    arguments = call["input"] if "input" in call else json.loads(call["arguments"])
    tool = tools[call["name"]]
    Draft202012Validator(tool.get("input_schema") or tool["parameters"]).validate(arguments)
