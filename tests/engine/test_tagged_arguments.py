"""Calls whose arguments are not JSON: told while they are written, and what the format's parser reads."""

from __future__ import annotations

import ast
import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import chain_model
import jsonschema_rs
import pytest
from call_formats import SpelledAnswer, family
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from speculating import GREEDY, Run

from fleetd.engine.answer.dsml import DSML
from fleetd.engine.answer.schema_values import ParameterSchemas
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import ChatPrompt, Delta, Generate, ToolCall, ToolCallPiece

# What ends a value, and what ends its call.
ENDS = {
    "qwen3_coder": ("</parameter>", "</function>"),
    "minimax_m2": ("</parameter>", "</invoke>"),
    "deepseek_v32": (f"</{DSML}parameter>", f"</{DSML}invoke>"),
    "glm47": ("</arg_value>", ""),
    "laguna": ("</arg_value>", ""),
    "longcat": ("</longcat_arg_value>", ""),
}
PARSERS = [*ENDS, "gemma4"]
LONG = "def f():\n\n    return \"</p\" < b'\\\\n' # é😀\n" * 3


def tagged(parser: str, values: dict[str, str]) -> str:
    """The text of one call of write_file, without the section's markers."""
    if parser == "qwen3_coder":
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"\n<function=write_file>\n{parameters}</function>\n"
    if parser == "minimax_m2":
        parameters = "".join(f'<parameter name="{k}">{value}</parameter>\n' for k, value in values.items())
        return f'\n<invoke name="write_file">\n{parameters}</invoke>\n'
    if parser == "deepseek_v32":
        parameters = "".join(
            f'<{DSML}parameter name="{key}" string="{_is_string(value)}">{value}</{DSML}parameter>\n'
            for key, value in values.items()
        )
        return f'\n<{DSML}invoke name="write_file">\n{parameters}</{DSML}invoke>\n'
    if parser == "gemma4":
        return "call:write_file{" + ",".join(f"{key}:{value}" for key, value in values.items()) + "}"
    tag = "longcat_arg" if parser == "longcat" else "arg"
    return "write_file\n" + "".join(
        f"<{tag}_key>{key}</{tag}_key>\n<{tag}_value>{value}</{tag}_value>\n" for key, value in values.items()
    )


def _is_string(value: str) -> str:
    """What the model says of a value: of one that JSON has besides strings, that it is none."""
    try:
        return str(isinstance(json.loads(value), str)).lower()
    except ValueError:
        return "true"


def tools_of(properties: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "write_file", "parameters": parameters}}]


def answer(parser: str, *calls: str) -> str:
    made = family(parser)
    return "\n".join(f"{made.start}{call}{made.end}" for call in calls)


def string(parser: str, text: str) -> str:
    return f'<|"|>{text}<|"|>' if parser == "gemma4" else text


# ---- What they mean --------------------------------------------------------------------------------------

SCHEMAS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": ["string", "null"]},
    {"type": "string", "enum": ["1", "b"]},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object"},
    {"enum": [1, "b", None]},
    {"const": 1},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [{"type": "array"}, {"type": "boolean"}]},
    {"allOf": [{"type": "number"}, {"minimum": 1}]},
    {"allOf": [{"$ref": "#/$defs/Size"}]},
    {"$ref": "#/$defs/Size"},
    {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
    {"$ref": "#/$defs/Itself"},
    {"description": "of no type"},
    {},
]
DEFINITIONS = {"Size": {"type": "integer", "minimum": 1}, "Itself": {"anyOf": [{"$ref": "#/$defs/Itself"}]}}
FRAGMENTS = st.sampled_from(
    [
        *("<", "</", "</par", "</parameter", "</arg_val", "<parameter=x>", "</function", '<|"', "<|", ">"),
        *("\n", "\n\n", " ", "\t", '"', "'", "\\", "\\n", "{", "}", "[", "]", ",", ":", "\u2028", "é", "😀"),
        *("null", "None", "nu", "NULL", "nil", "true", "1", "1.50", "-2e3", "def f(): pass", "\x01"),
    ]
)
TEXTS = st.one_of(
    st.lists(FRAGMENTS, max_size=8).map("".join),
    st.text(max_size=12),
    st.sampled_from(
        ['{"a": [1, {"b": "c"}]}', "[1, 2]", "null", " null ", "null\n", "Null!", "1e999", "NaN", LONG]
    ),
    st.sampled_from(["3", "3.0", "true", "True", "false", "None", "b", '"b"', "['x']", "{'a': None}"]),
)


def readings(parser: str, text: str) -> list[Any]:
    """What a value that is written so may mean."""
    found: list[Any] = [reading(parser, text)]
    for read in (json.loads, ast.literal_eval):
        with suppress(Exception):
            found.append(read(text.strip()))
    return found


def allows(schema: dict[str, Any], value: Any) -> bool:
    with suppress(ValueError):
        return bool(jsonschema_rs.is_valid(schema | {"$defs": DEFINITIONS}, value))
    return True  # a schema that means nothing


@examples(300)
@given(
    parser=st.sampled_from(list(ENDS)),
    text=TEXTS,
    schema=st.sampled_from(SCHEMAS),
    cuts=st.sets(st.integers(1, 300)),
)
@example(parser="qwen3_coder", text="\n", schema={"type": "string"}, cuts=set())
def test_a_value_is_valid_whenever_a_reading_of_its_text_is(
    parser: str, text: str, schema: dict[str, Any], cuts: set[int]
) -> None:
    tools = tools_of({"n": schema})
    tools[0]["function"]["parameters"]["$defs"] = DEFINITIONS
    whole = answer(parser, tagged(parser, {"n": text}))
    at = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    seen = SpelledAnswer(parser, [whole[a:b] for a, b in itertools.pairwise(at)], tools)
    ((index, name, arguments),) = seen.calls
    assert (index, name, seen.text) == (0, "write_file", "")
    value = json.loads(arguments)["n"]
    assert allows(schema, value) or not any(allows(schema, each) for each in readings(parser, text))
    if schema == {"type": "string"}:
        assert value == readings(parser, text)[0]
    assert seen.streamed == arguments
    assert SpelledAnswer(parser, [whole], tools, pieces=False).calls == seen.calls


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true", True),
        ({"type": ["integer", "string"]}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/Size"}]}, "3", 3),
        ({"$ref": "#/$defs/Size"}, "3", 3),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "string", "enum": ["1", "2"]}, '"2"', "2"),
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "seven", "seven"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parser", ENDS)
def test_types_as_pydantic_writes_them(parser: str, schema: dict[str, Any], text: str, value: Any) -> None:
    tools = tools_of({"n": schema})
    tools[0]["function"]["parameters"]["$defs"] = DEFINITIONS
    seen = SpelledAnswer(parser, list(answer(parser, tagged(parser, {"n": text}))), tools)
    assert json.loads(seen.calls[0][2]) == {"n": value}


def test_a_schema_that_means_millions_of_parts_costs_a_few() -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/Wide"} for _ in range(50)]}
    schemas = ParameterSchemas({"properties": {"n": wide}, "$defs": {"Wide": wide}})
    assert schemas.read("3", "n") == "3"


# ---- As they are written ---------------------------------------------------------------------------------

STRINGS = tools_of({"path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"}})


def file_call(parser: str) -> str:
    values = {"path": string(parser, "a.py"), "n": "7", "content": string(parser, LONG)}
    return tagged(parser, values)


def reading(parser: str, text: str) -> str:
    return text if parser in ("gemma4", "qwen3_coder", "deepseek_v32") else text.strip()


@pytest.mark.parametrize("parser", PARSERS)
def test_an_answer_that_ends_inside_of_a_value_has_half_a_call(parser: str) -> None:
    """The model stops, or a stop string is met."""
    whole = answer(parser, file_call(parser))
    half = whole[: whole.index("return")]
    for seen in (
        SpelledAnswer(parser, list(half), STRINGS),
        SpelledAnswer(parser, list(whole), STRINGS, stops=("return",)),
    ):
        assert (seen.text, seen.calls, seen.state.cut_call) == ("", [], True)
    assert SpelledAnswer(parser, list(whole), STRINGS, stops=("return",)).state.stopped_by == "return"


@pytest.mark.parametrize("parser", PARSERS)
def test_a_section_that_ends_inside_of_a_value_ends_the_value(parser: str) -> None:
    """The model has closed the call, so that it is one; what it wrote behind it is no part of it."""
    whole = answer(parser, file_call(parser))
    end = family(parser).end
    seen = SpelledAnswer(parser, list(whole[: whole.index("return")] + end + "Done."), STRINGS)
    ((_, name, arguments),) = seen.calls
    assert (name, arguments, seen.text) == ("write_file", seen.streamed, "Done.")
    found = json.loads(arguments)
    assert found["path"] == "a.py"
    assert found["content"].rstrip() == "def f():"


def test_a_call_whose_end_tag_is_left_out_ends_with_its_section() -> None:
    text = tagged("qwen3_coder", {"path": "a.py"}).replace("</function>", "")
    assert SpelledAnswer("qwen3_coder", list(answer("qwen3_coder", text)), STRINGS).calls == [
        (0, "write_file", '{"path": "a.py"}')
    ]


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4"])
def test_a_value_that_its_type_does_not_have_is_given_as_the_string_that_was_written(parser: str) -> None:
    text = tagged(parser, {"n": "seven", "path": string(parser, "a")})
    seen = SpelledAnswer(parser, list(answer(parser, text)), STRINGS)
    ((_, _, arguments),) = seen.calls
    assert json.loads(arguments) == {"n": "seven", "path": "a"}


def test_a_call_as_json_is_read_in_every_section() -> None:
    json_call = '{"name": "write_file", "arguments": {"path": "a"}}'
    assert SpelledAnswer("glm47", list(answer("glm47", json_call)), STRINGS).calls == [
        (0, "write_file", '{"path": "a"}')
    ]
    assert SpelledAnswer("qwen3_coder", list(answer("qwen3_coder", "Hm.")), STRINGS).text == answer(
        "qwen3_coder", "Hm."
    )


# ---- In a worker -----------------------------------------------------------------------------------------

WRITES = [
    *("<tool_call>", "\n<function=", "write_file", ">\n<parameter=", "content", ">\n", "one\n", "two</par"),
    *("three\n", "</parameter>\n", "</function>\n", "</tool_call>", chain_model.EOS),
]


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("most", [40, 8, None])
def test_a_model_writes_a_file(most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_model, "CHAINS", {"<write>": WRITES, "<count>": chain_model.CHAINS["<count>"]})
    folder = chain_model.build(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tool_parser_type": "qwen3_coder"}))
    tokenizer = load_tokenizer(folder)
    tokens = list(tokenizer.encode("<write>"))
    run = Run(load_model(folder)[0], tokenizer)
    request = Generate("r", ChatPrompt([]), GREEDY, max_tokens=most, call_pieces=True)
    run.scheduler.inbox.put(PreparedPrompt(request, tokens, tools=STRINGS))
    run.finish()
    written = "".join(e.text for e in run.events if isinstance(e, ToolCallPiece))
    calls = [e.arguments for e in run.events if isinstance(e, ToolCall)]
    if most == 8:  # cut in the middle of the value
        assert (written, calls) == ('{"content": "one\\ntwo', [])
        assert run.finished("r").reason == "length"
    else:
        assert calls == [written] == ['{"content": "one\\ntwo</parthree"}']
        assert run.finished("r").reason == "tool_calls"
    assert not any(e.text for e in run.events if isinstance(e, Delta))
