"""Calls as models get them wrong: each is read as it was meant, or is openly none."""

from __future__ import annotations

import itertools
import json
import pkgutil
from typing import Any

import pytest
from call_formats import SpelledAnswer, family, sample_call, spelling
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tool_parsers

from fleetd import limits
from fleetd.api.generation import conversation
from fleetd.engine.answer.answer_parts import CallBegun
from fleetd.engine.answer.answer_reader import AnswerReader, Markers
from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.answer.object_text import object_of, strict_object
from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.protocol import Delta, ToolCall
from fleetd.text.bounded import is_deeper

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "get_weather")
]
PARIS = {"city": "Paris"}
every_format = pytest.mark.parametrize("form", CALL_FORMATS)


def read(form: str, text: str, **fields: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of an answer, which are the same however it is cut."""
    found = []
    for words in ([text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
        for pieces in (True, False):
            seen = SpelledAnswer(form, words, fields.get("tools", TOOLS), pieces=pieces)
            assert not seen.reasoning
            assert seen.streamed in ("", "".join(arguments for _, _, arguments in seen.calls))
            found.append((seen.content, [(name, json.loads(text)) for _, name, text in seen.calls]))
    assert all(each == found[0] for each in found)
    return found[0]


def test_each_format_of_mlx_lm_has_its_row() -> None:
    """Its parsers are not called: a format without a row would have no tools."""
    parsers = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}
    assert parsers <= CALL_FORMATS.keys()
    for name in parsers - {"minicpm5"}:  # whose section is the call itself
        made = family(name)
        assert (made.start, made.end) == (CALL_FORMATS[name].start, CALL_FORMATS[name].end)


# ---- Openers that were forgotten -------------------------------------------------------------------------

FORGOTTEN = [each for each in CALL_FORMATS if each != "harmony"]


def without_opener(form: str, name: str = "look") -> str:
    made = CALL_FORMATS[form]
    return sample_call(form, PARIS, name).removeprefix(made.start).lstrip("\n")


@pytest.mark.parametrize("form", FORGOTTEN)
def test_a_call_whose_opener_is_missing_is_a_call(form: str) -> None:
    assert read(form, f"Let me look.\n{without_opener(form)}") == ("Let me look.", [("look", PARIS)])


def test_qwen_forgets_the_opener_behind_a_sentence() -> None:
    call = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
    text = f"Let me look.\n{call}\n</tool_call>"
    assert read("qwen3_coder", text) == ("Let me look.", [("get_weather", PARIS)])


@pytest.mark.parametrize("form", FORGOTTEN)
def test_it_is_text_in_a_block_of_code_and_for_a_name_that_was_not_offered(form: str) -> None:
    for text in (
        f"So:\n```xml\n{without_opener(form)}\n```",
        f"So:\n{without_opener(form, 'delete_all')}\nDone.",
    ):
        assert read(form, text) == (text, [])


@pytest.mark.parametrize("form", [each for each in FORGOTTEN if CALL_FORMATS[each].closed])
def test_what_may_be_an_answer_is_one_unless_its_section_is_closed(form: str) -> None:
    text = f"So:\n{without_opener(form).removesuffix(CALL_FORMATS[form].end)} is how."
    assert read(form, text) == (text, [])


# ---- Tools that were not offered -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORGOTTEN)
def test_a_call_behind_one_that_was_not_offered_is_found(form: str) -> None:
    text = f"{sample_call(form, PARIS, 'delete_all')}\n{sample_call(form, PARIS)}"
    assert read(form, text)[1] == [("look", PARIS)]


# ---- Arguments -------------------------------------------------------------------------------------------

JSON_FORMATS = ["json_tools", "llama3", "mistral", "kimi_k2", "harmony"]
WRITTEN = [
    ('{"city": "Paris",}', PARIS),
    ('{"city": "Paris"', PARIS),
    ("{'city': 'Paris'}", PARIS),
    ("{city: Paris}", PARIS),
    ('{"city": "Paris"]}', PARIS),
    ('{"city": "say "hi" now"}', {"city": 'say "hi" now'}),
    ('{"city": "a\nb\tc\x01"}', {"city": "a\nb\tc\x01"}),
    (r'{"city": "\d+\.\ud83d\u00e9\ud83d\ude00"}', {"city": "\\d+\\.\ufffdé😀"}),
    (
        '{"n": NaN, "m": 1e999, "k": 007, "l": .5, "o": True}',
        {"n": "NaN", "m": "1e999", "k": 7, "l": 0.5, "o": True},
    ),
    ('{"a": [1, 2,], "b": {"c": null,},}', {"a": [1, 2], "b": {"c": None}}),
    ("null", {}),
    (json.dumps(json.dumps(PARIS)), PARIS),
]


def call_with(form: str, written: str) -> str:
    return sample_call(form, {"x": 1}).replace('{"x": 1}', written)


@pytest.mark.parametrize(("written", "meant"), WRITTEN, ids=str)
@pytest.mark.parametrize("form", JSON_FORMATS)
def test_arguments_that_are_not_quite_json_are_an_object(form: str, written: str, meant: Any) -> None:
    assert read(form, call_with(form, written)) == ("", [("look", meant)])


@pytest.mark.parametrize("written", ["[1]", '"x"', "3", "true"])
@pytest.mark.parametrize("form", JSON_FORMATS)
def test_arguments_that_are_no_object_are_no_call(form: str, written: str) -> None:
    text = call_with(form, written)
    content, calls = read(form, f"So: {text}" if form != "harmony" else text)
    assert calls == []
    assert written in content
    assert CALL_FORMATS[form].start in content


@pytest.mark.parametrize("fence", ["```json\n{}\n```", "```\n{}\n```", "\n{}\n"])
def test_a_call_in_a_block_of_code_inside_of_its_section_is_a_call(fence: str) -> None:
    written = json.dumps({"name": "look", "arguments": PARIS})
    text = f"<tool_call>\n{fence.replace('{}', written)}\n</tool_call> Done."
    assert read("json_tools", text) == (" Done.", [("look", PARIS)])


@pytest.mark.parametrize(
    "written",
    [
        '{"arguments": {"city": "Paris"}, "name": "look"}',
        '{"name": "look", "arguments": {"city": "Paris"}, "id": "c1"}',
        '{"type": "function", "function": {"name": "look", "arguments": {"city": "Paris"}}}',
        '{"function": "look", "parameters": {"city": "Paris"}}',
        '[{"name": "functions.look", "arguments": {"city": "Paris"}}]',
        '{"name": "look", "arguments": {"city": "Paris"}}}',
        '{"name": "look", "arguments": {"city": "Paris"}',
    ],
)
def test_a_call_as_json_has_many_forms(written: str) -> None:
    assert read("json_tools", f"<tool_call>\n{written}\n</tool_call>") == ("", [("look", PARIS)])


def test_what_is_nested_too_deep_comes_as_text_and_can_be_given_back() -> None:
    deep = "[" * 2000 + "]" * 2000
    content, ((name, arguments),) = read("json_tools", call_with("json_tools", f'{{"city": {deep}}}'))
    assert (content, name) == ("", "look")
    assert not is_deeper(arguments, limits.ARGUMENTS_DEPTH + 1)
    conversation.assistant([], [], [conversation.tool_call("c", "look", arguments)], "messages[1]")


@given(
    st.text()
    | st.lists(st.sampled_from(['{"a": ', "}", '"', ",", "\\ud83d", "1" * 30, "[", "NaN", "'"])).map("".join)
)
def test_whatever_was_written_is_taken_back_as_an_object(text: str) -> None:
    """As a client has it of an answer that was cut, or of another server."""
    call = conversation.tool_call("c", "look", text)
    assert isinstance(call["function"]["arguments"], dict)
    conversation.assistant([], [], [call], "messages[1]")
    assert isinstance(json.loads(strict_object(text)), dict)
    assert object_of(text) is None or isinstance(json.loads(object_of(text) or ""), dict)


@pytest.mark.parametrize("form", [each for each in CALL_FORMATS if CALL_FORMATS[each].end])
def test_a_string_that_is_never_closed_ends_where_its_call_does(form: str) -> None:
    call = sample_call(form, {"city": "Par"})
    cut = call[: call.index("Par") + 3] + CALL_FORMATS[form].end
    content, calls = read(form, f"{cut} Done.")
    assert calls == [("look", {"city": "Par"})]
    assert content.strip() in ("Done.", "")


def test_each_of_two_calls_is_whole_whatever_stands_between() -> None:
    for form, between in itertools.product(
        ("json_tools", "qwen3_coder", "glm47", "gemma4"), ("", "\n", " and\n")
    ):
        text = between.join([sample_call(form, PARIS), sample_call(form, {"city": "Rome"})])
        assert read(form, text)[1] == [("look", PARIS), ("look", {"city": "Rome"})]


@every_format
def test_words_that_begin_no_marker_are_shown_at_once(form: str) -> None:
    text = 'Hello. I see (a thing):\n\n- One, two\n  Three "four" it\'s * 5%\n```\nx = y\n```\nDone'
    words = [("<|channel|>final<|message|>" if form == "harmony" else "") + text[0], *text[1:]]
    state = AnswerText("r", spelling(form, words), [], TOOLS)
    shown = ""
    for at in range(len(words)):
        shown += "".join(e.text for e in state.push(at) if isinstance(e, Delta))
        # Blanks may stand before a call, and three signs begin a block of code.
        written = text[: at + 1]
        assert shown.rstrip() == (written if written.endswith("```") else written.rstrip("`")).rstrip()


def test_an_id_that_is_none_or_another_calls_is_made_anew() -> None:
    calls = "".join(
        f'<tool_call>{{"id": {json.dumps(name)}, "name": "look", "arguments": {{}}}}</tool_call>'
        for name in ("c-1.a:0", "c-1.a:0", "x" * 5000, "a b", "")
    )
    seen = SpelledAnswer("json_tools", list(calls), TOOLS)
    ids = [e.call_id for e in seen.events if isinstance(e, ToolCall)]
    assert len(set(ids)) == 5
    assert ids[0] == "c-1.a:0"
    assert all(each.startswith("call_") for each in ids[1:])


# ---- Names, nested objects, thoughts ---------------------------------------------------------------------


def test_a_name_with_dots_is_read_behind_its_namespace() -> None:
    tools = [{"type": "function", "function": {"name": "mcp.x-y.z", "parameters": SCHEMA}}]
    text = sample_call("kimi_k2", PARIS, "mcp.x-y.z")
    assert read("kimi_k2", text, tools=tools) == ("", [("mcp.x-y.z", PARIS)])


def test_objects_inside_of_keywords_are_json() -> None:
    text = '<|tool_call_start|>[look(at={"x": 1, "in": {"y": [2]}})]<|tool_call_end|>'
    assert read("pythonic", text) == ("", [("look", {"at": {"x": 1, "in": {"y": [2]}}})])


def test_a_text_that_ends_in_a_block_of_code_ends_before_the_next_head() -> None:
    text = (
        f"<|channel|>commentary<|message|>So:\n```\nx<|end|><|start|>assistant{sample_call('harmony', PARIS)}"
    )
    assert read("harmony", text) == ("So:\n```\nx", [("look", PARIS)])


@pytest.mark.parametrize("form", ["mistral", "llama3", "pythonic", "gemma4"])
def test_a_call_behind_an_empty_thought_is_found(form: str) -> None:
    known = Markers(("<think>", "</think>"), calls=CALL_FORMATS[form])
    reader = AnswerReader(known, TOOLS, "reasoning")
    parts = [*reader.feed(f"</think>{sample_call(form, PARIS)}"), *reader.end(cut=False)]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["look"]
