"""The form that a client asks for, in every dialect: what of it reaches an engine, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from openai_bodies import HELLO, chat, completion

from fleetd import limits
from fleetd.api.anthropic import translate as anthropic
from fleetd.api.anthropic.bodies import MessagesBody
from fleetd.api.generation import answer_form
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import parse
from fleetd.api.ollama import translate as ollama
from fleetd.api.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from fleetd.api.openai import translate
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.api.responses.translate import Translated
from fleetd.api.responses.translate import translate as translate_responses
from fleetd.engine.protocol import ChatPrompt, Generate
from fleetd.engine.sampling.constraint import Constraint
from fleetd.errors import BadRequest, InvalidValue, UnsupportedParameter

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"z": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["z", "a"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
NAMED = {"name": "point", "schema": SCHEMA, "strict": True, "description": "A point."}
FLAT = {"type": "json_schema", **NAMED}
WEATHER = {"name": "weather", "parameters": SCHEMA}
LARK = 'start: "*** Begin" /.+/'
NOT_ENFORCED = {"type": "object", "not": {}}


def openai_chat(**fields: Any) -> Generate:
    (only,) = translate.chat(chat(**fields), "r")
    return only


def text_completion(**fields: Any) -> Generate:
    (only,) = translate.completion(completion(**fields), "r")
    return only


def translated(**fields: Any) -> Translated:
    body = decode(msgspec.json.encode({"input": "hi", **fields}), ResponsesBody)
    return translate_responses(body, "r")


def responses(**fields: Any) -> Generate:
    return translated(**fields).generate


def messages(**fields: Any) -> Generate:
    body = {"messages": HELLO, "max_tokens": 5, **fields}
    return anthropic.generate(decode(msgspec.json.encode(body), MessagesBody, spelling=False), "r")


def ollama_chat(**fields: Any) -> Generate:
    body = {"model": "m", "messages": HELLO, **fields}
    return ollama.chat(parse(msgspec.json.encode(body), OllamaChatBody), "r")


def ollama_text(**fields: Any) -> Generate:
    body = {"model": "m", "prompt": "hi", **fields}
    return ollama.generate(parse(msgspec.json.encode(body), OllamaGenerateBody), "r")


def held_to_schema(where: str, schema: Any = SCHEMA) -> Constraint:
    return Constraint("json_schema", as_text(schema), where)


def as_text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def chat_prompt(generate: Generate) -> ChatPrompt:
    assert isinstance(generate.prompt, ChatPrompt)
    return generate.prompt


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas with "not" cannot be enforced."""

    def checked(schema: Any, where: str) -> str:
        if "not" in schema:
            raise UnsupportedParameter(f"{where}: 'not' at $ cannot be enforced.", param=where)
        return json.dumps(schema)

    monkeypatch.setattr(answer_form, "enforceable", checked)


# ---- The form of the text --------------------------------------------------------------------------------

Make = Callable[..., Generate]
VLLM: list[tuple[dict[str, Any], Constraint]] = [
    ({"response_format": {"type": "json_object"}}, Constraint("json_object", where="response_format")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, held_to_schema("response_format")),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, held_to_schema("response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        held_to_schema("response_format"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": None}}},
        held_to_schema("response_format"),
    ),
    ({"guided_json": SCHEMA}, held_to_schema("guided_json")),
    ({"guided_json": TEXT}, held_to_schema("guided_json")),
    ({"guided_json": {}}, held_to_schema("guided_json", {})),
    ({"guided_regex": "a+"}, Constraint("regex", "a+", "guided_regex")),
    ({"guided_choice": ["yes", "né"]}, Constraint("choice", '["yes","né"]', "guided_choice")),
    ({"guided_grammar": LARK}, Constraint("grammar", LARK, "guided_grammar")),
    ({"json_schema": SCHEMA}, held_to_schema("json_schema")),
    ({"grammar": 'root ::= "a"'}, Constraint("grammar", 'root ::= "a"', "grammar")),
    ({"structured_outputs": {"json": SCHEMA}}, held_to_schema("structured_outputs.json")),
    ({"structured_outputs": {"json": TEXT}}, held_to_schema("structured_outputs.json")),
    ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+", "structured_outputs.regex")),
    (
        {"structured_outputs": {"choice": ["a"], "json": None, "json_object": False}},
        Constraint("choice", '["a"]', "structured_outputs.choice"),
    ),
    ({"structured_outputs": {"grammar": LARK}}, Constraint("grammar", LARK, "structured_outputs.grammar")),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "backend": "guidance"}},
        Constraint("json_object", where="structured_outputs.json_object"),
    ),
    (
        {
            "structured_outputs": {
                "regex": "a",
                "whitespace_pattern": "[ ]?",
                "disable_additional_properties": False,
                "structural_tag": None,
                "_backend": None,
            }
        },
        Constraint("regex", "a", "structured_outputs.regex"),
    ),
]


@pytest.mark.parametrize("make", [openai_chat, text_completion])
@pytest.mark.parametrize(("fields", "expected"), VLLM, ids=lambda value: str(value)[:60])
def test_the_fields_of_openai_vllm_and_llama_cpp(
    make: Make, fields: dict[str, Any], expected: Constraint
) -> None:
    assert make(**fields).constraint == expected


@pytest.mark.parametrize(
    ("make", "fields", "expected"),
    [
        (responses, {"text": {"format": {"type": "json_object"}}}, ("json_object", "text.format")),
        (responses, {"text": {"format": FLAT}}, held_to_schema("text.format")),
        (messages, {"output_config": {"format": FLAT}}, held_to_schema("output_config.format")),
        (messages, {"output_format": FLAT}, held_to_schema("output_format")),
        (
            messages,
            {"output_config": {"format": FLAT, "effort": "high"}, "output_format": FLAT},
            held_to_schema("output_config.format"),
        ),
        (ollama_chat, {"format": "json"}, ("json_object", "format")),
        (ollama_chat, {"format": SCHEMA}, held_to_schema("format")),
        (ollama_text, {"format": "json"}, ("json_object", "format")),
        (ollama_text, {"format": SCHEMA}, held_to_schema("format")),
        (ollama_text, {"format": SCHEMA, "raw": True}, held_to_schema("format")),
    ],
)
def test_the_fields_of_the_other_dialects(make: Make, fields: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, tuple):
        expected = Constraint(expected[0], where=expected[1])
    assert make(**fields).constraint == expected


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (openai_chat, {}),
        (openai_chat, {"response_format": None}),
        (openai_chat, {"response_format": {"type": "text"}}),
        (openai_chat, {"guided_json": None, "guided_regex": "", "guided_grammar": "", "grammar": ""}),
        (openai_chat, {"structured_outputs": None}),
        (text_completion, {"response_format": {"type": "text"}, "guided_json": ""}),
        (responses, {"text": {"verbosity": "low"}}),
        (responses, {"text": {"format": {"type": "text"}}}),
        (messages, {"output_config": {"effort": "high", "format": None}, "output_format": None}),
        (ollama_chat, {"format": ""}),
        (ollama_chat, {"format": None}),
    ],
)
def test_what_asks_for_no_form_leaves_the_answer_free(make: Make, fields: dict[str, Any]) -> None:
    assert make(**fields).constraint is None


def test_every_choice_and_every_prompt_has_the_form() -> None:
    body = completion(prompt=["a", "b"], n=2, guided_regex="x")
    assert {each.constraint for each in translate.completion(body, "r")} == {
        Constraint("regex", "x", "guided_regex")
    }
    format_ = {"type": "json_object"}
    assert {each.constraint for each in translate.chat(chat(n=3, response_format=format_), "r")} == {
        Constraint("json_object", where="response_format")
    }


def test_a_schema_that_is_not_strict_is_held_to_as_far_as_a_grammar_can(picky: None) -> None:
    loose = {"name": "x", "schema": NOT_ENFORCED, "strict": False}
    expected = Constraint("json_schema", as_text(NOT_ENFORCED), "response_format", lenient=True)
    assert openai_chat(response_format={"type": "json_schema", "json_schema": loose}).constraint == expected
    flat = {"type": "json_schema", **loose}
    assert responses(text={"format": flat}).constraint == msgspec.structs.replace(
        expected, where="text.format"
    )


def test_a_schema_keeps_the_order_of_its_keys_and_numbers_of_any_size() -> None:
    wide = {"type": "object", "properties": {"z": {"maximum": 2**70}, "a": {"minimum": -(2**70)}}}
    raw = json.dumps({"messages": HELLO, "guided_json": wide}).encode()
    (made,) = translate.chat(decode(raw, type(chat())), "r")
    assert made.constraint is not None
    assert made.constraint.text == as_text(wide)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Generate) == made


def test_a_form_and_tools_go_together() -> None:
    tools = [{"type": "function", "function": WEATHER}]
    made = openai_chat(tools=tools, response_format={"type": "json_object"})
    assert made.constraint == Constraint("json_object", where="response_format")
    assert chat_prompt(made).tools


# ---- Strict tools ----------------------------------------------------------------------------------------

ANTHROPIC_TOOL = {"name": "weather", "input_schema": SCHEMA}


@pytest.mark.parametrize(
    ("make", "tool"),
    [
        (openai_chat, lambda **more: {"type": "function", "function": {**WEATHER, **more}}),
        (responses, lambda **more: {"type": "function", **WEATHER, **more}),
        (messages, lambda **more: {**ANTHROPIC_TOOL, **more}),
        (ollama_chat, lambda **more: {"type": "function", "function": {**WEATHER, **more}}),
    ],
)
def test_strict_tools_are_held_to_their_schemas(make: Make, tool: Callable[..., Any]) -> None:
    for strict in (None, False):
        assert chat_prompt(make(tools=[tool(strict=strict)])).strict_tools == {}
    made = chat_prompt(make(tools=[tool(name="other"), tool(strict=True)]))
    assert made.strict_tools == {"weather": ""}
    assert made.tools is not None
    assert [each["function"]["name"] for each in made.tools] == ["other", "weather"]
    assert "strict" not in made.tools[1]["function"]


@pytest.mark.parametrize(
    ("make", "fields", "where"),
    [
        (
            openai_chat,
            {
                "tools": [
                    {"type": "function", "function": WEATHER},
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": NOT_ENFORCED, "strict": True},
                    },
                ]
            },
            "tools[1].function.parameters",
        ),
        (
            ollama_chat,
            {"tools": [{"function": {"name": "f", "parameters": NOT_ENFORCED, "strict": True}}]},
            "tools[0].function.parameters",
        ),
        (
            responses,
            {"tools": [{"type": "function", "name": "f", "parameters": NOT_ENFORCED, "strict": True}]},
            "tools[0].parameters",
        ),
        (
            responses,
            {
                "tools": [
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [
                            {"type": "function", "name": "f", "parameters": NOT_ENFORCED, "strict": True}
                        ],
                    }
                ]
            },
            "tools[0].tools[0].parameters",
        ),
        (
            messages,
            {"tools": [{"name": "f", "input_schema": NOT_ENFORCED, "strict": True}]},
            "tools.0.input_schema",
        ),
        (openai_chat, {"guided_json": NOT_ENFORCED}, "guided_json"),
        (openai_chat, {"json_schema": NOT_ENFORCED}, "json_schema"),
        (openai_chat, {"structured_outputs": {"json": NOT_ENFORCED}}, "structured_outputs.json"),
        (
            openai_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": NOT_ENFORCED}}},
            "response_format",
        ),
        (responses, {"text": {"format": {**FLAT, "schema": NOT_ENFORCED}}}, "text.format"),
        (messages, {"output_config": {"format": {**FLAT, "schema": NOT_ENFORCED}}}, "output_config.format"),
        (ollama_text, {"format": NOT_ENFORCED}, "format"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(
    picky: None, make: Make, fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        make(**fields)
    assert caught.value.param == where
    assert caught.value.message == f"{where}: 'not' at $ cannot be enforced."


def test_a_tool_that_is_not_strict_may_have_any_schema(picky: None) -> None:
    tool = {"name": "f", "parameters": NOT_ENFORCED}
    assert chat_prompt(openai_chat(tools=[{"type": "function", "function": tool}])).strict_tools == {}
    assert chat_prompt(responses(tools=[{"type": "function", **tool}])).strict_tools == {}


def test_a_strict_tool_without_a_schema_is_strict() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    assert chat_prompt(openai_chat(tools=[tool])).strict_tools == {"f": ""}


def test_a_tool_that_may_not_be_called_holds_nothing() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
        for name in ("a", "b")
    ]
    named = {"type": "function", "function": {"name": "b"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert chat_prompt(openai_chat(tools=tools, tool_choice=allowed)).strict_tools == {"b": ""}


@pytest.mark.parametrize(
    ("make", "fields", "expected"),
    [
        (openai_chat, {}, True),
        (openai_chat, {"parallel_tool_calls": True}, True),
        (openai_chat, {"parallel_tool_calls": False}, False),
        (responses, {"parallel_tool_calls": None}, True),
        (responses, {"parallel_tool_calls": False}, False),
        (messages, {"tool_choice": {"type": "auto"}}, True),
        (messages, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, False),
        (ollama_chat, {}, True),
    ],
)
def test_whether_two_tools_may_be_called(make: Make, fields: dict[str, Any], expected: bool) -> None:
    assert chat_prompt(make(**fields)).parallel_calls is expected


def custom(**format_: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "patch", "description": "Edits.", "format": format_ or None}


@pytest.mark.parametrize(
    ("format_", "strict"),
    [
        ({}, {}),
        ({"type": "text"}, {}),
        ({"type": "grammar", "syntax": "lark", "definition": LARK}, {"patch": LARK}),
        ({"type": "grammar", "syntax": "regex", "definition": "a+"}, {"patch": "start: /a+/"}),
        (
            {"type": "grammar", "syntax": "regex", "definition": r"a/\d\/[/]"},
            {"patch": r"start: /a\/\d\/[\/]/"},
        ),
        ({"type": "grammar", "syntax": "regex", "definition": r"\\/"}, {"patch": r"start: /\\\//"}),
    ],
    ids=str,
)
def test_the_input_of_a_custom_tool_is_held_to_its_grammar(
    format_: dict[str, Any], strict: dict[str, str]
) -> None:
    made = translated(tools=[custom(**format_)])
    assert chat_prompt(made.generate).strict_tools == strict
    # The client reads its tools as it sent them, and the model reads the grammar.
    served = msgspec.json.decode(msgspec.json.encode(made.tools.served))
    assert served[0].get("format") == (format_ or None)
    (tool,) = chat_prompt(made.generate).tools or ()
    assert format_.get("definition", "") in tool["function"]["description"]


def test_the_longest_expression_of_a_custom_tool_reaches_an_engine() -> None:
    longest = "/" * (limits.CONSTRAINT_CHARS // 4)
    made = responses(tools=[custom(type="grammar", syntax="regex", definition=longest)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Generate) == made
    with pytest.raises(InvalidValue, match="length <="):
        responses(tools=[custom(type="grammar", syntax="regex", definition=longest + "/")])


def test_a_custom_tool_in_a_namespace_is_held_by_its_whole_name() -> None:
    tool = custom(type="grammar", syntax="lark", definition=LARK)
    made = responses(tools=[{"type": "namespace", "name": "fs", "tools": [tool]}])
    assert chat_prompt(made).strict_tools == {"fs__patch": LARK}


# ---- Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fields", "param", "says"),
    [
        (
            openai_chat,
            {"response_format": {"type": "structural_tag"}},
            "response_format.type",
            "'structural_tag'",
        ),
        (openai_chat, {"response_format": {}}, "response_format.type", "missing"),
        (openai_chat, {"response_format": "json"}, "response_format", "expected `object"),
        (openai_chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            openai_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            openai_chat,
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex both say",
        ),
        (
            openai_chat,
            {"guided_json": {}, "guided_choice": ["a"]},
            "guided_choice",
            "guided_json and guided_choice",
        ),
        (
            openai_chat,
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "structured_outputs.json and structured_outputs.regex",
        ),
        (openai_chat, {"structured_outputs": {}}, "structured_outputs", "does not say"),
        (openai_chat, {"structured_outputs": {"backend": "guidance"}}, "structured_outputs", "does not say"),
        (openai_chat, {"guided_json": "{"}, "guided_json", "is no JSON"),
        (openai_chat, {"guided_json": 3}, "guided_json", "expected"),
        (openai_chat, {"guided_choice": []}, "guided_choice", "length >= 1"),
        (openai_chat, {"guided_choice": [""]}, "guided_choice[0]", "length >= 1"),
        (openai_chat, {"guided_choice": "yes"}, "guided_choice", "expected `array"),
        (
            openai_chat,
            {"guided_choice": ["x"] * (limits.CONSTRAINT_CHOICES + 1)},
            "guided_choice",
            f"length <= {limits.CONSTRAINT_CHOICES}",
        ),
        (openai_chat, {"guided_regex": "x" * (limits.CONSTRAINT_CHARS + 1)}, "guided_regex", "length <="),
        (
            openai_chat,
            {"guided_choice": ["x" * limits.CONSTRAINT_CHARS]},
            "guided_choice",
            "at most are taken",
        ),
        (
            openai_chat,
            {"guided_regex": "a", "ignore_eos": True},
            "ignore_eos",
            "no place beside guided_regex",
        ),
        (
            text_completion,
            {"response_format": {"type": "json_object"}, "min_tokens": 3},
            "min_tokens",
            "no place beside response_format",
        ),
        (responses, {"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar'"),
        (
            responses,
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "missing",
        ),
        (responses, {"tools": [custom(type="peg")]}, "tools[0].format.type", "'peg'"),
        (
            responses,
            {"tools": [custom(type="grammar", syntax="ebnf", definition="x")]},
            "tools[0].format.syntax",
            "'ebnf'",
        ),
        (
            responses,
            {"tools": [custom(type="grammar", syntax="lark")]},
            "tools[0].format.definition",
            "missing",
        ),
        (
            messages,
            {"output_config": {"format": {"type": "json_object"}}},
            "output_config.format.type",
            "'json_object'",
        ),
        (messages, {"output_format": {"type": "json_schema"}}, "output_format.schema", "missing"),
        (
            messages,
            {"output_config": {"format": FLAT}, "output_format": {"type": "json_schema", "schema": {}}},
            "output_format",
            "differ",
        ),
        (ollama_chat, {"format": "xml"}, "format", "'xml'"),
        (ollama_text, {"format": 1}, "format", "expected"),
    ],
)
def test_a_form_that_is_none_is_refused_by_its_field(
    make: Make, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        make(**fields)
    assert caught.value.param == param
    assert says in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")


def test_the_kinds_that_there_are_stand_in_the_hint() -> None:
    with pytest.raises(InvalidValue) as caught:
        openai_chat(response_format={"type": "xml"})
    assert caught.value.hint == "Use json_object, json_schema, text."
    with pytest.raises(InvalidValue) as caught:
        ollama_chat(format="xml")
    assert caught.value.hint == "Use json."


@pytest.mark.parametrize(
    ("make", "fields", "param"),
    [
        (openai_chat, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            openai_chat,
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (openai_chat, {"grammar_lazy": True}, "grammar_lazy"),
        (responses, {"guided_json": SCHEMA}, "guided_json"),
        (responses, {"response_format": {"type": "json_object"}}, "response_format"),
        (messages, {"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_is_not_served_is_refused_by_name(make: Make, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        make(**fields)
    assert caught.value.param == param
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")


@pytest.mark.parametrize("make", [openai_chat, ollama_chat])
def test_a_schema_of_any_depth_is_an_error_and_no_crash(make: Make) -> None:
    deep = "{" + '"a":{' * 900 + "}" * 900 + "}"
    field = "format" if make is ollama_chat else "guided_json"
    with suppress(BadRequest):
        assert make(**{field: msgspec.Raw(deep.encode())}).constraint is not None


# ---- As clients send them --------------------------------------------------------------------------------

USER_SCHEMA = {
    "properties": {"name": {"title": "Name", "type": "string"}, "age": {"title": "Age", "type": "integer"}},
    "required": ["name", "age"],
    "title": "User",
    "type": "object",
}


@pytest.mark.parametrize(
    ("make", "fields", "where"),
    [
        pytest.param(  # NativeOutput
            openai_chat,
            {
                "stream": False,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "User",
                        "schema": {**USER_SCHEMA, "additionalProperties": False},
                        "strict": True,
                    },
                },
            },
            "response_format",
            id="pydantic-ai",
        ),
        pytest.param(  # with_structured_output(method="json_schema")
            openai_chat,
            {
                "stream": False,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "User",
                        "description": "A user.",
                        "strict": True,
                        "schema": USER_SCHEMA,
                    },
                },
            },
            "response_format",
            id="langchain",
        ),
        pytest.param(  # Mode.JSON_SCHEMA
            openai_chat,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "User", "schema": USER_SCHEMA},
                }
            },
            "response_format",
            id="instructor",
        ),
        pytest.param(  # generateObject, @ai-sdk/openai-compatible
            openai_chat,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "schema": {"$schema": "http://json-schema.org/draft-07/schema#", **USER_SCHEMA},
                        "strict": True,
                        "name": "response",
                    },
                }
            },
            "response_format",
            id="ai-sdk-chat",
        ),
        pytest.param(  # generateObject, @ai-sdk/openai
            responses,
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "Ann, 7"}]}],
                "text": {
                    "format": {
                        "type": "json_schema",
                        "strict": True,
                        "name": "response",
                        "schema": USER_SCHEMA,
                    }
                },
            },
            "text.format",
            id="ai-sdk-responses",
        ),
        pytest.param(  # an Agent with an output_type
            responses,
            {
                "tools": [],
                "parallel_tool_calls": None,
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "final_output",
                        "schema": USER_SCHEMA,
                        "strict": True,
                    }
                },
            },
            "text.format",
            id="openai-agents",
        ),
        pytest.param(
            messages,
            {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": USER_SCHEMA}}},
            "output_config.format",
            id="claude-code",
        ),
        pytest.param(
            openai_chat, {"structured_outputs": {"json": USER_SCHEMA}}, "structured_outputs.json", id="vllm"
        ),
        pytest.param(
            ollama_chat,
            {"format": USER_SCHEMA, "options": {"temperature": 0}, "tools": []},
            "format",
            id="ollama",
        ),
    ],
)
def test_frameworks_ask_for_a_schema(make: Make, fields: dict[str, Any], where: str) -> None:
    found = make(**fields).constraint
    assert found is not None
    assert (found.kind, found.where) == ("json_schema", where)
    assert json.loads(found.text)["properties"].keys() == {"name", "age"}


def test_frameworks_ask_for_one_strict_tool() -> None:
    """As langchain (``method="function_calling"``), instructor (``Mode.TOOLS_STRICT``) and pydantic-ai do."""
    function = {"name": "User", "description": "A user.", "parameters": USER_SCHEMA, "strict": True}
    made = chat_prompt(
        openai_chat(
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "User"}},
            parallel_tool_calls=False,
        )
    )
    assert (made.strict_tools, made.tool_choice, made.parallel_calls) == (
        {"User": ""},
        {"name": "User"},
        False,
    )
