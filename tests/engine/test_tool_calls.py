"""Calls of each family: the same calls, and the same arguments piece by piece, wherever tokens end."""

from __future__ import annotations

import itertools
import json

import miniature_tokenizers as miniature
import pytest
from call_formats import SpelledAnswer
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.engine.answer import tool_formats
from fleetd.engine.answer.call_reader import tool_name
from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.protocol import Delta, ToolCall, ToolCallPiece

ARGUMENTS = {
    "path": "a.py",
    "content": 'def f():\n    return {"}": "\\"é"}\n',
    "deep": [{"x": [1, -2.5e3]}, None],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("write_file", "look")
]
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
HARMONY = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"

# By parser: an answer that calls write_file with TEXT, what it says around the call, and its reasoning.
ANSWERS = [
    (
        "json_tools",
        f'Hm.\n<tool_call>\n{{"name": "write_file", "arguments": {TEXT}}}\n</tool_call>',
        "Hm.",
        "",
    ),
    ("mistral", f"Hm.[TOOL_CALLS]write_file[ARGS]{TEXT}", "Hm.", ""),
    ("mistral", f'[TOOL_CALLS][{{"name": "write_file", "arguments": {TEXT}}}]', "", ""),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0<|tool_call_argument_begin|>"
        f"{TEXT}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        "",
    ),
    ("llama3", f'{{"name": "write_file", "parameters": {TEXT}}}', "", ""),
    ("llama3", f'<|python_tag|>{{"type": "function", "name": "write_file", "parameters": {TEXT}}}', "", ""),
    (
        "harmony",
        f"{HARMONY}<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>{TEXT}<|call|>",
        "",
        "So.",
    ),
    (
        "harmony",
        f"{HARMONY}<|channel|>commentary<|message|>Hm.<|end|>"
        f"<|start|>assistant to=functions.write_file<|channel|>commentary json<|message|>{TEXT}",
        "Hm.",
        "So.",
    ),
]


@pytest.mark.parametrize(("parser", "text", "content", "reasoning"), ANSWERS)
@given(cuts=st.sets(st.integers(1, 400), max_size=40))
def test_arguments_come_as_they_are_written_and_make_up_those_of_the_whole_call(
    parser: str, text: str, content: str, reasoning: str, cuts: set[int]
) -> None:
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    words = [text[a:b] for a, b in itertools.pairwise(at)]
    seen = SpelledAnswer(parser, words, TOOLS)
    assert seen.said == (content, reasoning, [(0, "write_file", TEXT)])
    assert seen.streamed == TEXT
    assert len(seen.ids) == 1
    assert SpelledAnswer(parser, words, TOOLS, pieces=False).said == seen.said


@pytest.mark.parametrize(("parser", "text", "content", "reasoning"), ANSWERS)
def test_each_letter_of_a_string_is_told_at_once(
    parser: str, text: str, content: str, reasoning: str
) -> None:
    """Escapes, numbers, and signs between values wait for their end: what follows may say what they are."""
    seen = SpelledAnswer(parser, list(text), TOOLS)
    begin = text.index(TEXT)
    told = list(
        itertools.accumulate(
            sum(len(e.text) for e in events if isinstance(e, ToolCallPiece)) for events in seen.by_word
        )
    )
    for at in range(len(TEXT)):
        assert told[begin + at] >= at - len(", -2500.0")
    inside = TEXT.index("return")
    assert told[begin + inside + 3] == inside + 4


@pytest.mark.parametrize(("parser", "text", "content", "reasoning"), ANSWERS)
def test_half_a_call_is_never_text(parser: str, text: str, content: str, reasoning: str) -> None:
    begin = text.index("write_file") + len("write_file")
    for end in range(begin, text.index(TEXT) + len(TEXT), 5):
        seen = SpelledAnswer(parser, list(text[:end]), TOOLS, cut=True)
        assert seen.said == (content, reasoning, [])
        assert TEXT.startswith(seen.streamed)
        assert seen.state.cut_call


def test_llama_answers_with_json_of_its_own() -> None:
    for text in ('{"name": "Ann", "age": 3}', "{}", "[1]", "Call write_file.", '{"name": "write_file"}'):
        assert SpelledAnswer("llama3", list(text), TOOLS).said == (text, "", [])


def test_llama_makes_two_calls() -> None:
    one = '{"name": "look", "parameters": {"n": 1}}'
    assert SpelledAnswer("llama3", list(f"{one}; {one}"), TOOLS).calls == [
        (i, "look", '{"n": 1}') for i in range(2)
    ]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            "mistral",
            '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "look", "arguments": {"a": 1}}]',
        ),
        ("mistral", '[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]look[ARGS]{"a": 1}'),
        ("llama3", '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {"a": 1}}'),
        (
            "json_tools",
            "".join(
                f'<tool_call>{{"name": "look", "arguments": {each}}}</tool_call>\n'
                for each in ("{}", '{"a": 1}')
            ),
        ),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_a_call_is_whole_before_the_next_begins(parser: str, text: str, together: bool) -> None:
    seen = SpelledAnswer(parser, [text] if together else list(text), TOOLS)
    assert seen.said == ("", "", [(0, "look", "{}"), (1, "look", '{"a": 1}')])
    order = [(e.index, isinstance(e, ToolCall)) for e in seen.events if not isinstance(e, Delta)]
    assert order == sorted(order)
    assert seen.streamed == '{}{"a": 1}'


def test_a_final_channel_is_the_answer() -> None:
    seen = SpelledAnswer("harmony", list(f"{HARMONY}<|channel|>final<|message|>42."), TOOLS)
    assert seen.said == ("42.", "So.", [])


def test_line_ends_in_strings_are_escaped_so_that_arguments_are_json() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"a": "b\n\tc"}}</tool_call>'
    seen = SpelledAnswer("json_tools", list(text), TOOLS)
    assert json.loads(seen.calls[0][2]) == {"a": "b\n\tc"}
    assert seen.streamed == seen.calls[0][2]


@pytest.mark.parametrize(
    ("written", "name"),
    [("look", "look"), ("functions.look", "look"), ("Look", "look"), ("delete", None), ("x", None)],
)
def test_a_name_is_that_of_a_tool_if_one_can_be_meant(written: str, name: str | None) -> None:
    assert tool_name(written, ["write_file", "look"]) == name
    assert tool_name("LOOK", ["look", "Look"]) is None


def test_gpt_oss_gets_its_channels_and_its_text_as_mlx_lm_reads_it() -> None:
    plain = miniature.gpt_oss()
    made = tool_formats.with_format(plain)
    assert made.init_kwargs["tool_parser_type"] == "harmony"
    assert made.has_tool_calling
    assert tool_formats.has_reasoning(made)
    assert not tool_formats.has_reasoning(plain)
    assert made.eos_token_ids == plain.eos_token_ids
    tokens = plain.encode(
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>42."
    )
    answer = AnswerText("r", made, [], TOOLS)
    events = [e for token in tokens for e in answer.push(token)] + answer.finish()
    said = [(e.channel, e.text) for e in events if isinstance(e, Delta) and e.text]
    assert "".join(text for channel, text in said if channel == "reasoning") == "So."
    assert "".join(text for channel, text in said if channel == "content") == "42."


def test_llama_3_is_known_by_its_template() -> None:
    plain = miniature.llama3()
    assert tool_formats.with_format(plain) is plain
    plain._tokenizer.chat_template = """{% for c in m.tool_calls %}{"name": x, "parameters": }"""
    made = tool_formats.with_format(plain)
    assert made.init_kwargs["tool_parser_type"] == "llama3"
    assert made.tool_call_start == "<|python_tag|>"


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[0])
def test_a_long_call_tells_its_tokens_while_it_is_written(answer: tuple[str, ...], pieces: bool) -> None:
    """Without that, a machine that writes one could not be told from one that hangs."""
    words = list(answer[1])
    events = SpelledAnswer(answer[0], words, TOOLS, pieces=pieces).events
    told = sum(event.tokens for event in events if isinstance(event, Delta | ToolCallPiece))
    assert 0 <= len(words) - told < limits.UNTOLD_TOKENS
