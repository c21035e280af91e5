"""One meaning for every field that says how a model reasons, in all four dialects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetd.api.anthropic import translate as anthropic
from fleetd.api.anthropic.bodies import MessagesBody
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import parse
from fleetd.api.ollama import translate as ollama
from fleetd.api.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from fleetd.api.openai import bodies
from fleetd.api.openai import translate as openai
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.api.responses.translate import translate as responses
from fleetd.engine.protocol import ChatPrompt, Prompt
from fleetd.errors import BadRequest, UnsupportedParameter

HELLO = [{"role": "user", "content": "hi"}]
ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}
DIALECTS = ("chat", "responses", "messages", "ollama chat", "ollama generate")


def prompt(dialect: str, fields: dict[str, Any]) -> Prompt:
    def sent(**own: Any) -> bytes:
        return json.dumps({**own, **fields}).encode()

    match dialect:
        case "chat":
            return openai.chat(decode(sent(messages=HELLO), bodies.ChatBody), "x")[0].prompt
        case "responses":
            return responses(decode(sent(input="hi"), ResponsesBody), "x").generate.prompt
        case "messages":
            return anthropic.prompt(parse(sent(messages=HELLO), MessagesBody))
        case "ollama chat":
            return ollama.chat(parse(sent(model="m", messages=HELLO), OllamaChatBody), "x").prompt
        case _:
            return ollama.generate(parse(sent(model="m", prompt="hi"), OllamaGenerateBody), "x").prompt


def kwargs(dialect: str, fields: dict[str, Any]) -> dict[str, Any]:
    made = prompt(dialect, fields)
    assert isinstance(made, ChatPrompt)
    return made.template_kwargs


SWITCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: value}, ON if value else OFF)
      for name in ("think", "thinking", "reasoning", "enable_thinking") for value in (True, False)),
    *(({"chat_template_kwargs": {name: value}}, ON if value else OFF)
      for name in ("thinking", "enable_thinking") for value in (True, False)),
    ({"reasoning": {"enabled": True}}, ON),
    ({"reasoning": {"enabled": False}}, OFF),
    ({"reasoning": {"effort": "none"}}, OFF),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ON),
    ({"thinking": {"type": "adaptive"}}, ON),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"reasoning_effort": "none"}, OFF),
    ({"think": "none"}, OFF),
]  # fmt: skip
LEVELS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (fields, {**ON, "reasoning_effort": level})
    for word, level in {
        "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
    }.items()
    for fields in (
        {"reasoning_effort": word}, {"think": word}, {"reasoning": word}, {"reasoning": {"effort": word}},
    )
]  # fmt: skip
AGREEING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"think": True, "reasoning_effort": "max", "reasoning": "high"}, {**ON, "reasoning_effort": "high"}),
    ({"reasoning_format": "auto", "enable_thinking": False, "reasoning_effort": "none"}, OFF),
    # The template's own words reach it as they are.
    ({"chat_template_kwargs": {"reasoning_effort": "xhigh"}}, {**ON, "reasoning_effort": "xhigh"}),
]  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_field_means_the_same_in_every_dialect(dialect: str) -> None:
    for fields, expected in [*SWITCHES, *LEVELS, *AGREEING]:
        own = expected
        if "chat_template_kwargs" in fields:
            own = {**expected, **fields["chat_template_kwargs"]}
        assert kwargs(dialect, fields) == own, fields


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_a_field_the_template_decides_and_anthropics_models_answer_at_once(dialect: str) -> None:
    assert kwargs(dialect, {}) == (OFF if dialect == "messages" else {})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"think": False, "reasoning_effort": "high"}, ("reasoning_effort", "think")),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, ("thinking.type", "enable_thinking")),
        ({"reasoning": {"effort": "low"}, "think": "high"}, ("reasoning.effort", "think")),
        ({"reasoning": {"effort": "low", "enabled": False}}, ("reasoning.effort", "reasoning.enabled")),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            ("reasoning_effort", "chat_template_kwargs.enable_thinking"),
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
            ("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking"),
        ),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_both_named(
    dialect: str, fields: dict[str, Any], named: tuple[str, str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        prompt(dialect, fields)
    message = str(caught.value)
    assert f"{named[0]} and {named[1]} contradict each other" in message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "fields", [{"reasoning_format": "none"}, {"reasoning_format": "hidden"}, {"reasoning": {"exclude": True}}]
)
def test_reasoning_in_another_form_is_refused_not_ignored(dialect: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        prompt(dialect, fields)
    assert (caught.value.param or "").startswith(next(iter(fields)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_template_kwargs_replace_no_part_of_the_conversation(dialect: str) -> None:
    with pytest.raises(BadRequest, match="may not set 'messages'"):
        prompt(dialect, {"chat_template_kwargs": {"messages": []}})
