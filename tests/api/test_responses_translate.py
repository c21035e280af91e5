"""What a Responses body becomes before a template renders it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetd.api.generation.fields import decode
from fleetd.api.openai import bodies as openai_bodies
from fleetd.api.openai import translate as openai_translate
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.api.responses.translate import Translated, carried, translate
from fleetd.engine.protocol import ChatPrompt
from fleetd.errors import FleetError, InvalidValue, UnsupportedParameter

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": PARAMETERS}


def translated(**fields: Any) -> Translated:
    body = json.dumps({"input": [USER], **fields}).encode()
    return translate(decode(body, ResponsesBody), "resp_1")


def prompt(**fields: Any) -> ChatPrompt:
    found = translated(**fields).generate.prompt
    assert isinstance(found, ChatPrompt)
    return found


def refused(kind: type[FleetError] = UnsupportedParameter, **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        translated(**fields)
    return str(caught.value)


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_a_session_is_the_same_conversation_as_a_chat() -> None:
    ours = prompt(
        instructions="Be brief.",
        tools=[WEATHER],
        reasoning={"effort": "low"},
        input=[
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part("Look.", "reasoning_text")]},
            {"type": "message", "id": "m", "role": "assistant", "content": [part("I look.", "output_text")]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "4 °C"},
            {"type": "function_call_output", "call_id": "c2", "output": [part("9 °C")]},
            {"type": "message", "role": "user", "content": [part("And "), part("then?")]},
        ],
    )
    calls = [("c1", '{"city": "Oslo"}'), ("c2", "{}")]
    chat = {
        "messages": [
            said("system", "Be brief."),
            USER,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Look.",
                "tool_calls": [
                    {"id": name, "type": "function", "function": {"name": "weather", "arguments": text}}
                    for name, text in calls
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4 °C"},
            {"role": "tool", "tool_call_id": "c2", "content": "9 °C"},
            said("user", "And \nthen?"),
        ],
        "tools": [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}],
        "reasoning_effort": "low",
    }
    body = decode(json.dumps(chat).encode(), openai_bodies.ChatBody)
    assert ours == openai_translate.chat(body, "x")[0].prompt


def test_system_messages_come_first_and_later_ones_are_reminders() -> None:
    codex = [
        {"type": "message", "role": "developer", "content": [part("You code.")]},
        {"type": "message", "role": "developer", "content": [part("Skills."), part("Permissions.")]},
        {"type": "message", "role": "user", "content": [part("<environment/>")]},
        {"type": "message", "role": "user", "content": [part("Show hello.py")]},
        {"type": "message", "role": "assistant", "content": [part("It is empty.", "output_text")]},
        {"type": "message", "role": "developer", "content": [part("Plan mode.")]},
        {"type": "message", "role": "user", "content": "Go on."},
    ]
    found = prompt(instructions="Be brief.", input=codex).messages
    assert found == [
        said("system", "Be brief.\nYou code.\nSkills.\nPermissions."),
        said("user", "<environment/>\nShow hello.py"),
        said("assistant", "It is empty."),
        said("user", "<system-reminder>\nPlan mode.\n</system-reminder>\nGo on."),
    ]


def test_reasoning_is_read_from_where_a_client_keeps_it() -> None:
    def reasoning(**fields: Any) -> Any:
        item = {"type": "reasoning", "summary": [], **fields}
        found = prompt(input=[USER, item, said("assistant", "yes"), USER]).messages[1]
        return found.get("reasoning_content")

    assert reasoning(content=[part("a", "reasoning_text")], encrypted_content=carried("b")) == "a"
    assert reasoning(encrypted_content=carried("ü")) == "ü"
    assert (
        reasoning(encrypted_content="gAAAAAB-of-another-server", summary=[part("s", "summary_text")]) == "s"
    )
    for broken in ("fleetd:%%%", "fleetd:/w==", "gAAAAAB"):
        assert reasoning(encrypted_content=broken) is None


def test_custom_tools_and_namespaces_are_functions_to_a_model() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    space = {"type": "namespace", "name": "mcp__fs__", "description": "Files.", "tools": [WEATHER]}
    found = prompt(
        tools=[patch, space],
        tool_choice={"type": "custom", "name": "apply_patch"},
        input=[
            USER,
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
            {
                "type": "function_call",
                "call_id": "c2",
                "name": "weather",
                "namespace": "mcp__fs__",
                "arguments": "",
            },
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_image", "image_url": "data:"}],
            },
        ],
    )
    assert found.tools is not None
    first, second = [tool["function"] for tool in found.tools]
    assert first["parameters"]["required"] == ["input"]
    assert first["description"] == "Edits.\n\nThe input has this grammar (lark):\nstart: /.+/"
    assert (second["name"], second["parameters"]) == ("mcp__fs__weather", PARAMETERS)
    assert found.tool_choice == {"name": "apply_patch"}
    calls = [message["tool_calls"][0]["function"] for message in found.messages if "tool_calls" in message]
    assert calls == [
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "mcp__fs__weather", "arguments": {}},
    ]
    assert "image was left out" in found.messages[-1]["content"]


def test_only_the_tools_that_are_allowed_are_offered() -> None:
    other = {**WEATHER, "name": "other"}

    def chosen(*names: str, **fields: Any) -> Any:
        allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": name} for name in names]}
        return prompt(tools=[WEATHER, other], tool_choice=allowed | fields)

    found = chosen("weather", mode="required")
    assert [tool["function"]["name"] for tool in found.tools] == ["weather"]
    assert (found.tool_choice, chosen("weather", "other").tool_choice) == ("required", "auto")
    with pytest.raises(InvalidValue, match="not among the tools"):
        chosen("wether")
    with pytest.raises(InvalidValue, match="needs tools"):
        chosen()


def test_what_no_machine_here_can_serve_is_left_out_with_a_word() -> None:
    found = translated(
        tools=[{"type": "local_shell"}, WEATHER, {"type": "web_search", "external_web_access": False}],
        input=[
            USER,
            {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"type": "exec"}},
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        ],
    )
    assert [each.split(":")[0] for each in found.warnings] == ["tools[0]", "tools[2]", "input[1]", "input[2]"]
    assert [tool.name for tool in found.tools.served] == ["weather"]
    assert isinstance(found.generate.prompt, ChatPrompt)
    assert found.generate.prompt.messages == [USER]
    assert "there are no tools" in refused(
        InvalidValue, tools=[{"type": "web_search"}], tool_choice="required"
    )


def test_sealed_reasoning_of_another_server_is_no_turn() -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    found = prompt(input=[USER, sealed, said("user", "so?")])
    assert found.messages == [said("user", "hi\nso?")]
    found = prompt(input=[USER, sealed, said("assistant", "ok"), USER])
    assert found.messages == [USER, said("assistant", "ok"), USER]


def test_a_file_that_a_tool_returned_leaves_a_note() -> None:
    file = {
        "type": "function_call_output",
        "call_id": "a",
        "output": [{"type": "input_file", "file_id": "f"}],
    }
    found = translated(input=[file]).generate.prompt
    assert isinstance(found, ChatPrompt)
    note = "[A part of type 'input_file' was left out here: what tools return is read as text only.]"
    assert found.messages[0]["content"] == note


@pytest.mark.parametrize(
    ("name", "value"), [("stop", ["x"]), ("n", 2), ("logit_bias", {"5": 1}), ("frequency_penalty", 0.5)]
)
def test_what_only_chats_know_is_refused_and_not_dropped(name: str, value: Any) -> None:
    assert f"'{name}'" in refused(**{name: value})


def test_refusals_name_the_field() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}
    assert refused(input=[image]).startswith("input[0].content[0].file_id: no files are kept here")
    assert "whole conversation" in refused(conversation="conv_0")
    assert "web_search" in refused(tool_choice={"type": "web_search"})
    assert "/v1/chat/completions" in refused(include=["message.output_text.logprobs"])
    chat_tool = {"type": "function", "function": {"name": "weather"}}
    assert "beside type" in refused(InvalidValue, tools=[chat_tool])
    assert "'max_output_tokens'" in refused(InvalidValue, max_completion_tokens=5)
    assert "'input'" in refused(InvalidValue, messages=[USER])
    assert "needs role and content" in refused(InvalidValue, input=[{"type": "message"}])
    assert "needs a name" in refused(InvalidValue, input=[{"type": "function_call"}])
    bad = {"type": "function_call_output", "call_id": "a", "output": {"a": 1}}
    assert "input[0].output" in refused(InvalidValue, input=[bad])


@pytest.mark.parametrize("lost", [{}, {"call_id": None}, {"call_id": ""}])
@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "patch", "input": "x"},
        {"type": "function_call_output", "output": "x"},
        {"type": "custom_tool_call_output", "output": "x"},
    ],
)
def test_a_call_and_its_output_need_the_id_that_ties_them(item: dict[str, Any], lost: dict[str, Any]) -> None:
    assert "'input[1].call_id' is missing" in refused(InvalidValue, input=[USER, {**item, **lost}])
