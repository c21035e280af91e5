"""What a Messages body becomes before a template renders it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from fleetd.api.anthropic import bodies, translate
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import parse
from fleetd.api.openai import bodies as openai_bodies
from fleetd.api.openai import translate as openai_translate
from fleetd.engine.protocol import ChatPrompt
from fleetd.errors import InvalidValue, UnsupportedParameter

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "4 °C"}


def prompt(**fields: Any) -> ChatPrompt:
    body = {"messages": [USER], "max_tokens": 9, **fields}
    return translate.prompt(parse(json.dumps(body).encode(), bodies.MessagesBody))


def refused(kind: type[Exception] = UnsupportedParameter, **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        prompt(**fields)
    return str(caught.value)


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


BILLING = "x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={};"


def test_the_billing_block_and_marks_of_the_cache_leave_the_prompt_as_it_is() -> None:
    plain = prompt(system="Be brief.", tools=[WEATHER], messages=[{"role": "user", "content": [text("hi")]}])
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    for number in ("00000", "a1b2c"):
        noisy = prompt(
            system=[text(BILLING.format(number)), text("Be brief.", **mark)],
            tools=[{**WEATHER, **mark, "defer_loading": False, "eager_input_streaming": True}],
            messages=[{"role": "user", "content": [text("hi", **mark)]}],
            cache_control={"type": "ephemeral"},
            metadata={"user_id": number},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            service_tier="auto",
        )
        assert replace(noisy, cache_marks=[]) == plain
    assert prompt(system=f"{BILLING.format('1')}\nBe brief.").messages == prompt(system="Be brief.").messages


def test_marks_are_places_in_the_messages_that_templates_render() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    found = prompt(
        system=[text(BILLING.format("1"), **mark), text("Be brief.", **mark), text("Be kind.")],
        messages=[
            {"role": "user", "content": [text("one", **mark), text("two")]},
            {
                "role": "assistant",
                "content": [
                    text("Let me look."),
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}, **mark},
                ],
            },
            {"role": "user", "content": [{**RESULT, **mark}, text("Well?")]},
        ],
        tools=[{**WEATHER, **mark}],
    )
    marked = [found.messages[index]["content"][:chars] for index, chars in found.cache_marks]
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "user"]
    # The last four; before any text there is nothing to keep.
    assert marked == ["Be brief.", "one", "Let me look.", "4 °C"]
    assert not prompt(system=[text("Be brief.")], **mark).cache_marks


def test_marks_are_seen_wherever_they_are() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}

    def marked(**fields: Any) -> bool:
        body = {"messages": [USER], **fields}
        return translate.marks_cache(parse(json.dumps(body).encode(), bodies.MessagesBody))

    assert not marked()
    assert marked(**mark)
    assert marked(system=[text("a", **mark)])
    assert marked(tools=[{**WEATHER, **mark}])
    assert marked(messages=[{"role": "user", "content": [text("a", **mark)]}])


def test_the_same_conversation_as_in_openais_dialect() -> None:
    ours = prompt(
        system=[text("Be brief."), text("Be kind.")],
        messages=[
            {"role": "user", "content": [text("one"), text("two")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    text("Let me look."),
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "4 °C"}],
            },
        ],
        tools=[WEATHER],
        thinking={"type": "adaptive"},
    )
    theirs = {
        "messages": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "one\ntwo"},
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "4 °C"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "The weather.",
                    "parameters": WEATHER["input_schema"],
                },
            }
        ],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    body = decode(json.dumps(theirs).encode(), openai_bodies.ChatBody)
    assert ours == openai_translate.chat(body, "r")[0].prompt


def test_several_results_an_error_among_them_come_before_what_the_user_says() -> None:
    found = prompt(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [text("4"), {"type": "image"}]},
                    {"type": "tool_result", "tool_use_id": "b", "content": "gone", "is_error": True},
                    text("And now?"),
                ],
            },
        ]
    ).messages
    assert found[1]["content"] is None
    assert [call["id"] for call in found[1]["tool_calls"]] == ["a", "b"]
    assert [(each["role"], each.get("tool_call_id"), each["content"]) for each in found[2:]] == [
        ("tool", "a", "4\n[An image was left out here: what tools return is read as text only.]"),
        ("tool", "b", "Error: gone"),
        ("user", None, "And now?"),
    ]


def test_system_messages_in_the_middle_become_the_users_text() -> None:
    found = prompt(
        system="Top.",
        messages=[
            {"role": "system", "content": "First."},
            USER,
            {"role": "system", "content": "Tools changed."},
            {"role": "assistant", "content": "ok"},
            {"role": "system", "content": [text("Again.")]},
        ],
    ).messages
    reminder = "<system-reminder>\n{}\n</system-reminder>"
    assert [(each["role"], each["content"]) for each in found] == [
        ("system", "Top.\nFirst."),
        ("user", "hi\n" + reminder.format("Tools changed.")),
        ("assistant", "ok"),
        ("user", reminder.format("Again.")),
    ]


def test_what_one_says_in_several_messages_is_one_message() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    found = prompt(
        messages=[
            {"role": "user", "content": [text("one", **mark)]},
            {"role": "user", "content": [text("two"), text("three", **mark)]},
            {"role": "system", "content": "Look."},
            {"role": "user", "content": "four"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("I look.")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so"},
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
                ],
            },
            {"role": "assistant", "content": [text("Now.", **mark)]},
            {"role": "user", "content": [RESULT]},
            {"role": "user", "content": [text("Well?", **mark)]},
        ],
    )
    user, said, result, asked = found.messages
    assert user["content"] == "one\ntwo\nthree\n<system-reminder>\nLook.\n</system-reminder>\nfour"
    assert (said["content"], said["reasoning_content"]) == ("I look.\nNow.", "hm\nso")
    assert [call["id"] for call in said["tool_calls"]] == ["call_1"]
    assert (result["role"], result["content"], asked["content"]) == ("tool", "4 °C", "Well?")
    marked = [found.messages[index]["content"][:chars] for index, chars in found.cache_marks]
    assert marked == ["one", "one\ntwo\nthree", "I look.\nNow.", "Well?"]


def test_calls_in_several_messages_stay_without_a_text() -> None:
    def called(name: str) -> dict[str, Any]:
        block = {"type": "tool_use", "id": name, "name": "weather", "input": {}}
        return {"role": "assistant", "content": [block]}

    _, said, _ = prompt(
        messages=[USER, called("a"), called("b"), {"role": "user", "content": [RESULT]}]
    ).messages
    assert said["content"] is None
    assert [call["id"] for call in said["tool_calls"]] == ["a", "b"]


ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, OFF),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"output_config": {"effort": "low"}}, {**OFF, "reasoning_effort": "low"}),
        # A hint is never a reason to refuse: words of later versions, and whatever else stands there.
        ({"output_config": {"effort": "ultra"}}, OFF),
        ({"output_config": {"effort": 3, "format": None}, "output_format": None}, OFF),
        ({"output_config": {"effort": {"level": "high"}, "task_budget": 9}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, ON),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}},
            {**ON, "reasoning_effort": "high"},
        ),
    ],
)
def test_thinking_is_what_the_template_calls_it(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert prompt(**fields).template_kwargs == kwargs


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "weather"}, {"name": "weather"}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    assert prompt(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_what_would_change_the_answer_is_refused_by_name() -> None:
    image = {"role": "user", "content": [text("see"), {"type": "image", "source": {"type": "file"}}]}
    assert "messages.0.content.1.source: images of type 'file'" in refused(messages=[image])
    assert "prefill" in refused(messages=[USER, {"role": "assistant", "content": "The"}])
    assert "'web_search_20250305'" in refused(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert "mcp_servers" in refused(mcp_servers=[{"type": "url", "url": "x"}])
    assert "among the tools" in refused(
        InvalidValue, tools=[WEATHER], tool_choice={"type": "tool", "name": "wether"}
    )
    assert "no tools" in refused(InvalidValue, tool_choice={"type": "any"})


def test_what_a_tool_returned_and_no_model_reads_leaves_a_note() -> None:
    returned = [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}},
        {"type": "image", "source": {"type": "base64"}},
        {
            "type": "search_result",
            "title": "Tides",
            "source": "https://sea",
            "content": [text("High at six.")],
        },
        {"type": "tool_reference", "tool_name": "weather"},
    ]
    result = {"type": "tool_result", "tool_use_id": "a", "content": returned}
    (message,) = prompt(messages=[{"role": "user", "content": [result]}]).messages
    assert message["content"].split("\n") == [
        "[A part of type 'document' was left out here: what tools return is read as text only.]",
        "[An image was left out here: what tools return is read as text only.]",
        "Tides",
        "https://sea",
        "High at six.",
        "The tool weather may be called.",
    ]


def test_a_session_that_began_at_another_server_goes_on() -> None:
    searched = [
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {"query": "tide"}},
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": [{"type": "web_search_result"}]},
        text("At six."),
    ]
    _, said, _ = prompt(messages=[USER, {"role": "assistant", "content": searched}, USER]).messages
    note = (
        "[A part of type 'web_search_tool_result' was left out here: what tools return is read as text only.]"
    )
    assert said == {"role": "assistant", "content": f"{note}\nAt six."}


def test_documents_of_text_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The sea."}
    block = {"type": "document", "source": source, "title": "Notes", "citations": {"enabled": False}}
    (message,) = prompt(messages=[{"role": "user", "content": [block, text("Sum up.")]}]).messages
    assert message["content"] == "Notes\nThe sea.\nSum up."


@pytest.mark.parametrize("lost", [{}, {"id": None}, {"id": ""}])
def test_a_call_and_its_result_need_the_id_that_ties_them(lost: dict[str, Any]) -> None:
    call = {"type": "tool_use", "name": "weather", "input": {}, **lost}
    said = [USER, {"role": "assistant", "content": [call]}, USER]
    assert "'messages.1.content.0.id' is missing" in refused(InvalidValue, messages=said)
    result = {"type": "tool_result", "content": "x", "tool_use_id": lost.get("id")}
    asked = [{"role": "user", "content": [result]}]
    assert "'messages.0.content.0.tool_use_id' is missing" in refused(InvalidValue, messages=asked)
