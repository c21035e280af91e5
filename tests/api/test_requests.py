"""Bodies: what is accepted, what is refused, and that every refusal names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from examples import examples
from openai_bodies import HELLO, chat, completion

from fleetd import limits
from fleetd.api.anthropic.bodies import MessagesBody
from fleetd.api.generation import other_fields
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import parse
from fleetd.api.ollama.bodies import OllamaChatBody
from fleetd.api.openai import bodies
from fleetd.errors import BadRequest, FleetError, InvalidValue, UnsupportedParameter

RANGES = [
    ("temperature", [0, 0.7, 2, 5], [-0.1, 5.1, "1", True]),
    ("top_p", [0.001, 1], [0, 1.1, "x"]),
    ("top_k", [-1, 0, 40], [-2, 1.5]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, "7"]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.1, 10], [0, 10.1]),
    ("n", [1, limits.CHOICES], [0, limits.CHOICES + 1]),
    ("stop", ["x", "", ["x"] * limits.STOP_STRINGS, [], [""]], [["x"] * (limits.STOP_STRINGS + 1), 1]),
    ("stop", ["x" * limits.STOP_STRING_CHARS], ["x" * (limits.STOP_STRING_CHARS + 1)]),
    ("logit_bias", [{"5": -100}, {"0": 100}, {}], [{"5": 101}, {"x": 1}, {"-1": 1}, [1]]),
    ("ignore_eos", [True, False], ["true", 1]),
    ("min_tokens", [0, 5], [-1, 2**31, "5"]),
    ("stream", [True, False], ["true", 1]),
    ("stream_options", [{"include_usage": True}, {}], [True]),
    ("user", ["me"], [1]),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("name", "good", "bad"), RANGES)
def test_common_ranges(make: Any, name: str, good: list[Any], bad: list[Any]) -> None:
    for value in [*good, None]:
        assert getattr(make(**{name: value}), name) == value or isinstance(value, dict)
    for value in bad:
        with pytest.raises(InvalidValue) as caught:
            make(**{name: value})
        assert caught.value.param is not None
        assert caught.value.param.startswith(name)
        assert name in caught.value.message


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31]),
        ("max_completion_tokens", [1], [0]),
        ("top_logprobs", [0, limits.TOP_LOGPROBS], [-1, limits.TOP_LOGPROBS + 1]),
        ("logprobs", [True, False], [1]),
        ("messages", [HELLO * limits.MESSAGES], [[], HELLO * (limits.MESSAGES + 1), "hi", [1]]),
        ("messages", [], [[{"role": "king"}], [{"content": "x"}]]),
        ("tool_choice", ["none", "auto", "required"], ["always", {"type": "function"}, 1]),
        ("tools", [[]], [[{"type": "function"}], [{"type": "web", "function": {"name": "f"}}], "f"]),
        ("tools", [], [[{"type": "function", "function": {"name": ""}}]]),
        ("reasoning_effort", ["none", "low", "high"], ["enormous", 3]),
        ("response_format", [], [{"type": "xml"}, "json"]),
        ("chat_template_kwargs", [{"enable_thinking": False}], ["x"]),
        ("metadata", [{"a": "b"}], ["x"]),
        ("store", [True], ["x"]),
        ("service_tier", ["auto"], [1]),
        ("parallel_tool_calls", [True, False], ["x"]),
    ],
)  # fmt: skip
def test_chat_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(chat(**{name: value}), name) is not None
    for value in bad:
        with pytest.raises(InvalidValue) as caught:
            chat(**{name: value})
        assert (caught.value.param or "").startswith(name)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [0, 1], [-1]),
        ("logprobs", [0, limits.TOP_LOGPROBS], [-1, limits.TOP_LOGPROBS + 1, True]),
        ("echo", [True, False], ["yes"]),
        ("prompt", ["", "x", ["x"], [1, 2], [[1], [2]]], [[], [-1], [1.5], [True], {"a": 1}, None]),
    ],
)
def test_completion_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(completion(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidValue) as caught:
            completion(**{name: value})
        assert (caught.value.param or "").startswith(name)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("top-p", "top_p"),
        ("message", "messages"),
        ("stops", "stop"),
        ("streaming", "stream"),
        ("frequence_penalty", "frequency_penalty"),
        ("repeat_penalty", "repetition_penalty"),
        ("tool", "tools"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_nearest(typo: str, nearest: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        chat(**{typo: 1})
    assert caught.value.param == typo
    assert nearest in caught.value.hint


@pytest.mark.parametrize(
    "name", ["safety_identifier", "models", "cache_prompt", "prediction", "x", "provider"]
)
def test_foreign_fields_are_ignored(name: str) -> None:
    assert chat(**{name: {"anything": [1]}}).messages[0].content == "hello"


@pytest.mark.parametrize("name", sorted(other_fields.REFUSED))
def test_a_known_but_unsupported_field_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    def take(value: Any, **beside: Any) -> None:
        kinds = (bodies.ChatBody, MessagesBody, bodies.CompletionBody)
        kind = next(kind for kind in kinds if name not in kind.__struct_fields__)
        body = {"model": "m", "messages": HELLO, "max_tokens": 5, "prompt": "hello", name: value, **beside}
        decode(msgspec.json.encode(body), kind, spelling=False)

    for nothing in other_fields.REFUSED[name]:
        take(nothing)
    with pytest.raises(UnsupportedParameter) as caught:
        take("something", **dict.fromkeys(other_fields.BESIDE.get(name, ()), 1.5))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "early"),
        (b"{", "early"),
        (b'{"messages": ]}', "byte 13"),
        (b'{"messages": []} x', "trailing characters at byte"),
        (b'{"messages": "\xff"}', "array"),
        (b"nonsense", "byte 4"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "byte 39"),
        (b'{"temperature": NaN}', "byte"),
        (b'{"messages": [{"role": "user", "content": "\\ud8"}]}', "escape"),
        (b'{"messages":[],"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b"[]", "object"),
        (b"null", "object"),
    ],
)
def test_malformed_json_is_refused_with_its_position(data: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(data, bodies.ChatBody)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (bodies.ChatBody, {"verbosity": "none"}, "Use high, low, medium."),
        (bodies.ChatBody, {"tool_choice": "any"}, "Use auto, none, required."),
        (bodies.ChatBody, {"messages": [{"role": "x"}]}, "Use assistant, developer, system, tool, user."),
        (MessagesBody, {"thinking": {"type": "auto"}}, "Use adaptive, disabled, enabled."),
        (OllamaChatBody, {"messages": [{"role": "x"}]}, "Use assistant, system, tool, user."),
    ],
)
def test_a_word_that_is_none_of_a_few_is_told_them(kind: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse(msgspec.json.encode({"model": "m", "messages": HELLO} | fields), kind)
    assert caught.value.hint == says


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidValue) as caught:
        decode(b"{}", bodies.ChatBody)
    assert caught.value.param == "messages"


def test_any_json_is_a_body_or_a_typed_refusal() -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    names = [field.encode_name for field in msgspec.structs.fields(bodies.ChatBody)]
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    )

    @examples(300)
    @given(st.dictionaries(st.sampled_from(names) | st.text(max_size=12), values, max_size=5))
    def check(body: dict[str, Any]) -> None:
        try:
            data = msgspec.json.encode(body)
        except UnicodeEncodeError:  # a lone surrogate has no JSON
            return
        refusal = None
        try:
            decode(data, bodies.ChatBody)
        except FleetError as exc:
            refusal = exc
        assert refusal is None or (400 <= refusal.status < 500 and refusal.message)

    check()
