"""Bodies become exactly the work that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from openai_bodies import chat, completion

from fleetd import limits
from fleetd.api.openai import translate
from fleetd.engine.protocol import ChatPrompt, Generate, Sampling, Speculate, TextPrompt, TokenPrompt
from fleetd.errors import InvalidValue, UnsupportedParameter

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def one(**fields: Any) -> Generate:
    (only,) = translate.chat(chat(**fields), "r")
    return only


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = one(messages=list(given)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Sampling()),
        ({"temperature": 0}, Sampling(temperature=0.0)),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, Sampling(top_p=0.5, top_k=7, min_p=0.1)),
        ({"top_k": -1}, Sampling(top_k=0)),
        ({"seed": 5}, Sampling(seed=5)),
        ({"seed": -1}, Sampling(seed=2**63 - 1)),
        ({"repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
        (
            {"presence_penalty": 1, "frequency_penalty": -1},
            Sampling(presence_penalty=1, frequency_penalty=-1),
        ),
        ({"logit_bias": {"17": -100}}, Sampling(logit_bias={17: -100.0})),
    ],
)
def test_sampling(fields: dict[str, Any], expected: Sampling) -> None:
    assert one(**fields).sampling == expected
    assert translate.completion(completion(**fields), "r")[0].sampling == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (True, Speculate()),
        (False, Speculate(enabled=False)),
        ({}, Speculate()),
        ({"enabled": False}, Speculate(enabled=False)),
        ({"sources": ["lookup"], "width": 4}, Speculate(sources=["lookup"], width=4)),
        ({"sources": []}, Speculate(sources=[])),
        ({"draft_model": "org/small"}, Speculate(draft_model="org/small")),
    ],
    ids=str,
)
def test_how_drafts_are_used(given: Any, expected: Speculate | None) -> None:
    assert one(speculate=given).speculate == expected
    assert translate.completion(completion(speculate=given), "r")[0].speculate == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"widht": 4}, "speculate"),
        ({"width": limits.SPEC_WIDTH + 1}, "speculate.width"),
        ({"width": -1}, "speculate.width"),
        ({"sources": ["n-gram"]}, "speculate.sources[0]"),
        ({"key": "me"}, "speculate"),
        ({"draft_model": "/etc/model"}, "speculate.draft_model"),
        ({"draft_model": "~/model"}, "speculate.draft_model"),
        ("yes", "speculate"),
    ],
    ids=str,
)
def test_impossible_drafting_options_are_refused(given: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        chat(speculate=given)
    assert refused.value.param == param


def test_each_choice_has_its_own_id_and_the_next_seed() -> None:
    work = translate.chat(chat(n=3, seed=2**63 - 2), "r")
    assert [generate.id for generate in work] == ["r-0", "r-1", "r-2"]
    assert [generate.sampling.seed for generate in work] == [2**63 - 2, 2**63 - 1, 0]
    assert len({id(generate.prompt) for generate in work}) == 1


def test_without_a_seed_the_engine_draws() -> None:
    assert [generate.sampling.seed for generate in translate.chat(chat(n=2), "r")] == [None, None]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
    ],
)
def test_max_tokens(fields: dict[str, Any], expected: int | None) -> None:
    assert one(**fields).max_tokens == expected


def test_completions_default_to_sixteen_tokens() -> None:
    assert translate.completion(completion(), "r")[0].max_tokens == 16
    assert translate.completion(completion(max_tokens=0), "r")[0].max_tokens == 0


@pytest.mark.parametrize(("given", "expected"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"])])
def test_stop(given: Any, expected: list[str]) -> None:
    assert one(stop=given).stop == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert one(**fields).top_logprobs == expected


def test_top_logprobs_alone_is_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        one(top_logprobs=2)
    assert caught.value.param == "top_logprobs"


def test_no_top_logprobs_need_no_logprobs() -> None:
    assert one(top_logprobs=0).top_logprobs is None


def test_messages_are_what_templates_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert messages(
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "ann",
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
        {"role": "assistant", "content": "ok", "reasoning": "so"},
        {"role": "assistant", "content": "ok", "reasoning": "so", "reasoning_content": "hm"},
        {"role": "assistant", "content": "ok", "reasoning": {"summary": "so"}},
        {"role": "assistant", "refusal": "no"},
        {"role": "assistant"},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
        {"role": "assistant", "content": "ok", "reasoning_content": "so"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
        {"role": "assistant", "content": "ok"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(('{"a": 1}', {"a": 1}), ("", {}), ("null", {}), ({"a": 1}, {"a": 1})),
        *(
            ("not json", {"arguments": "not json"}),
            ("[1]", {"arguments": "[1]"}),
            ('"x"', {"arguments": '"x"'}),
        ),
        *(('{"a": "b",}', {"a": "b"}), ('{"a": "\\ud83d"}', {"a": "\ufffd"}), ('{"a": NaN}', {"a": "NaN"})),
        *(('{"a": "b', {"arguments": '{"a": "b'}), ({"a": 2**70}, {"a": str(2**70)})),
        *((f'{{"a": {2**70}}}', {"a": str(2**70)}), ('{"a": "b\n\x01"}', {"a": "b\n\x01"})),
    ],
    ids=str,
)
def test_arguments_that_a_model_wrote_are_taken_back_as_an_object(given: Any, expected: Any) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    (made,) = messages({"role": "assistant", "tool_calls": [call]})
    assert made["tool_calls"][0]["function"]["arguments"] == expected


def test_a_tool_that_returned_nothing_or_an_image_keeps_the_session_going() -> None:
    call = {"id": None, "function": {"name": "f", "arguments": None}}
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    made, nothing, seen = messages(
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": None},
        {"role": "tool", "tool_call_id": "a", "content": image},
    )
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert nothing["content"] == ""
    assert seen["content"] == "see\n[An image was left out here: what tools return is read as text only.]"


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_content_is_needed(role: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        messages({"role": role})
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("kind", ["input_audio", "file", "x" * 1000])
def test_parts_other_than_texts_and_images_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        messages({"role": "user", "content": [{"type": kind, kind[:20]: {}}]})
    assert caught.value.param == "messages[0].content"
    assert len(caught.value.message) < 200


def test_a_text_part_needs_text() -> None:
    with pytest.raises(InvalidValue):
        messages({"role": "user", "content": [{"type": "text"}]})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (NAMED, {"name": "weather"}),
    ],
)
def test_tools_and_tool_choice(choice: Any, expected: Any) -> None:
    prompt = one(tools=[TOOL], tool_choice=choice).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == [TOOL]
    assert prompt.tool_choice == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ],
)
def test_a_tool_choice_that_nothing_satisfies_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        one(**fields)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"chat_template_kwargs": {"custom": "x"}}, {"custom": "x"}),
    ],
)
def test_template_kwargs(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    prompt = one(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == expected


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_template_kwargs_cannot_replace_the_template_or_its_input(name: str) -> None:
    with pytest.raises(InvalidValue):
        one(chat_template_kwargs={name: "x"})


@pytest.mark.parametrize(
    ("kinds", "taken"),
    [
        ("array", False),
        ("integer", False),
        (["string", "null"], False),
        ("object", True),
        (["object", "null"], True),
        ("dict", True),
        ([], True),
        ({"a": 1}, True),
    ],
)
def test_a_tool_whose_arguments_could_be_no_object_is_refused(kinds: Any, taken: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kinds}}}]
    if taken:
        assert one(tools=tools)
        return
    with pytest.raises(InvalidValue, match="an object") as caught:
        one(tools=tools)
    assert caught.value.param == "tools[0]"


def test_numbers_no_worker_could_read_are_refused() -> None:
    with pytest.raises(InvalidValue):
        one(chat_template_kwargs={"a": 2**70})
    with pytest.raises(InvalidValue):
        one(tools=[{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        ([[1], [2, 3]], [TokenPrompt([1]), TokenPrompt([2, 3])]),
    ],
)
def test_prompt_shapes(prompt: Any, expected: list[Any]) -> None:
    work = translate.completion(completion(prompt=prompt, n=2, seed=1), "r")
    assert [generate.prompt for generate in work] == [p for p in expected for _ in range(2)]
    assert [generate.sampling.seed for generate in work] == [1, 2] * len(expected)
    assert [generate.id for generate in work] == [f"r-{i}" for i in range(2 * len(expected))]


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]], [[]], [[1], []]])
def test_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        translate.completion(completion(prompt=prompt), "r")
    assert caught.value.param == "prompt"


def test_too_many_answers_are_refused() -> None:
    limit = limits.COMPLETIONS_PER_REQUEST
    assert len(translate.completion(completion(prompt=["a"] * limit), "r")) == limit
    with pytest.raises(InvalidValue):
        translate.completion(completion(prompt=["a"] * (limit + 1)), "r")
    with pytest.raises(InvalidValue):
        translate.completion(completion(prompt=["a"] * limit, n=2), "r")


@pytest.mark.parametrize(("make", "translated"), [(chat, translate.chat), (completion, translate.completion)])
def test_benchmarks_choose_how_long_answers_get(make: Any, translated: Any) -> None:
    (made,) = translated(make(ignore_eos=True, min_tokens=30, max_tokens=30), "r")
    assert (made.ignore_eos, made.min_tokens, made.max_tokens) == (True, 30, 30)
    (made,) = translated(make(), "r")
    assert (made.ignore_eos, made.min_tokens) == (False, 0)
    with pytest.raises(InvalidValue) as caught:
        translated(make(min_tokens=31, max_tokens=30), "r")
    assert caught.value.param == "min_tokens"


def test_a_completion_without_max_tokens_has_room_for_its_min_tokens() -> None:
    (made,) = translate.completion(completion(min_tokens=50), "r")
    assert made.max_tokens == 50


def test_best_of_is_refused_unless_it_is_n() -> None:
    assert len(translate.completion(completion(n=2, best_of=2), "r")) == 2
    with pytest.raises(UnsupportedParameter):
        translate.completion(completion(n=1, best_of=2), "r")


def test_echo_and_logprobs_of_completions() -> None:
    (made,) = translate.completion(completion(echo=True, logprobs=0), "r")
    assert made.echo
    assert made.top_logprobs == 0


def nested(deep: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(deep - 1):
        value = [value]
    return {"a": value}


def test_free_form_json_may_nest_so_deep_and_no_deeper() -> None:
    fits, deep = nested(limits.JSON_DEPTH - 1), nested(limits.JSON_DEPTH)
    assert one(chat_template_kwargs=fits)
    for fields in ({"chat_template_kwargs": deep}, {"chat_template_kwargs": nested(900)}):
        with pytest.raises(InvalidValue, match="nested more than 64 deep"):
            one(**fields)
    tool = {"type": "function", "function": {"name": "weather", "parameters": deep}}
    with pytest.raises(InvalidValue, match=r"tools\[0\] is nested"):
        one(tools=[tool])


def test_only_the_tools_that_are_allowed_are_offered() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]

    def chosen(*names: str, **fields: Any) -> Any:
        picked = [{"type": "function", "function": {"name": name}} for name in names]
        allowed = {"type": "allowed_tools", "allowed_tools": {"tools": picked} | fields}
        return one(tools=tools, tool_choice=allowed).prompt

    found = chosen("g", mode="required")
    assert [tool["function"]["name"] for tool in found.tools] == ["g"]
    assert (found.tool_choice, chosen("f", "g").tool_choice) == ("required", "auto")
    with pytest.raises(InvalidValue, match="not among the tools"):
        chosen("h")
    for incomplete in ("allowed_tools", "function"):
        with pytest.raises(InvalidValue, match="is missing"):
            one(tools=tools, tool_choice={"type": incomplete})
