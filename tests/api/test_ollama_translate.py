"""Ollama's bodies become the conversation that every dialect makes, or are refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from fleetd import errors
from fleetd.api.generation.fields import decode
from fleetd.api.ollama import translate
from fleetd.api.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from fleetd.api.openai import bodies as openai_bodies
from fleetd.api.openai import translate as openai_translate
from fleetd.engine import protocol as p
from fleetd.models.model_names import ModelNames, untagged

ASK = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> p.Generate:
    body = msgspec.convert({"model": "m", "messages": ASK, **fields}, OllamaChatBody)
    return translate.chat(body, "r")


def generate(**fields: Any) -> p.Generate:
    return translate.generate(
        msgspec.convert({"model": "m", "prompt": "hi", **fields}, OllamaGenerateBody), "r"
    )


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "I look.",
        "tool_calls": [
            {"function": {"name": "sky", "arguments": {"city": "Oslo"}}},
            {"function": {"name": "sea", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "content": "calm", "tool_name": "sea"},
    {"role": "tool", "content": "dry", "tool_name": "sky"},
]
TOOL = {
    "type": "function",
    "function": {"name": "sky", "description": "The sky.", "parameters": {"type": "object"}},
}


def test_a_conversation_is_the_one_that_openais_dialect_makes() -> None:
    theirs: list[dict[str, Any]] = [
        TALK[0],
        TALK[1],
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "call_0", "function": {"name": "sky", "arguments": '{"city": "Oslo"}'}},
                {"id": "call_1", "function": {"name": "sea", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "calm", "tool_call_id": "call_1", "name": "sea"},
        {"role": "tool", "content": "dry", "tool_call_id": "call_0", "name": "sky"},
    ]  # fmt: skip
    body = decode(msgspec.json.encode({"messages": theirs, "tools": [TOOL]}), openai_bodies.ChatBody)
    assert chat(messages=TALK, tools=[TOOL]).prompt == openai_translate.chat(body, "r")[0].prompt


def test_a_result_without_a_name_belongs_to_the_oldest_call() -> None:
    talk = [*TALK[:3], {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    prompt = chat(messages=talk).prompt
    assert isinstance(prompt, p.ChatPrompt)
    assert [message["tool_call_id"] for message in prompt.messages[3:]] == ["call_0", "call_1"]


def test_options_are_sampling() -> None:
    made = chat(
        options={
            "num_ctx": 4096, "num_predict": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
            "seed": 3, "stop": ["END"], "repeat_penalty": 1.1, "presence_penalty": 0.2,
            "frequency_penalty": 0.3, "num_gpu": 1, "mirostat": 0,
        }
    )  # fmt: skip
    assert made.sampling == p.Sampling(0.5, 0.9, 40, 0.1, 3, 1.1, 0.2, 0.3)
    assert (made.max_tokens, made.stop) == (7, ["END"])
    with pytest.raises(msgspec.ValidationError):  # no worker could read it
        chat(options={"num_predict": 10**30})
    free = chat(options={"num_predict": -1, "seed": -1, "stop": "x"})
    assert (free.max_tokens, free.sampling.seed, free.stop) == (None, None, ["x"])


def test_a_prompt_is_a_chat_of_one_message_or_raw() -> None:
    prompt = generate(system="Be brief.").prompt
    assert isinstance(prompt, p.ChatPrompt)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert generate(raw=True).prompt == p.TextPrompt("hi")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("logprobs", {"logprobs": True}),
        ("options.mirostat", {"options": {"mirostat": 2}}),
        ("messages", {"messages": [*ASK, {"role": "assistant", "content": "so"}]}),
        ("messages[0].images", {"messages": [{"role": "tool", "content": "x", "images": ["aGk="]}, *ASK]}),
    ],
)
def test_what_would_change_a_chat_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(errors.UnsupportedParameter) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["suffix", "template", "context"])
def test_what_would_change_a_text_is_refused_by_name(name: str) -> None:
    with pytest.raises(errors.UnsupportedParameter) as caught:
        generate(**{name: [1] if name == "context" else "x"})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None), ("", None), (0, 0), ("0", 0), (300, 300), ("300", 300), ("5m", 300), ("1h30m", 5400),
        ("1.5s", 1.5), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("250ms", 0.25),
    ],
)  # fmt: skip
def test_keep_alive_is_seconds_or_a_duration(given: Any, seconds: float | None) -> None:
    assert translate.keep_alive_s(given) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("given", ["soon", "5 m", "m", "--1", "5mm", "1h-3m", "٣"])
def test_another_keep_alive_is_refused(given: str) -> None:
    with pytest.raises(errors.InvalidValue):
        translate.keep_alive_s(given)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("qwen3:4b", "qwen3-4b"), ("qwen3-4b:latest", "qwen3-4b"), ("qwen3-4b", "qwen3-4b"),
        ("hf.co/org/name", "org/name"), ("/a:b/c", "/a:b/c"), (":x", ":x"), ("x:", "x:"),
    ],
)  # fmt: skip
def test_tags_become_names(written: str, name: str) -> None:
    assert untagged(written) == name
    assert ModelNames("d").here(written) == name
