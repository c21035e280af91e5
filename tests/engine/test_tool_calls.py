"""What a format makes of an answer beside what test_tool_corpus.py has, and how a model's format is known."""

from __future__ import annotations

import json

import miniature_tokenizers as miniature
import pytest
from call_formats import SpelledAnswer

from fleetd.engine.answer import tool_formats
from fleetd.engine.answer.call_reader import tool_name
from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.protocol import Delta

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("write_file", "look")
]
HARMONY = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"


def test_llama_answers_with_json_of_its_own() -> None:
    for text in ('{"name": "Ann", "age": 3}', "{}", "[1]", "Call write_file.", '{"name": "write_file"}'):
        assert SpelledAnswer("llama3", list(text), TOOLS).said == (text, "", [])


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
