"""DeepSeek V3.2: its template takes what every other one takes, and its calls are read."""

from __future__ import annotations

import json
from typing import Any

import miniature_tokenizers as miniature
import pytest
from call_formats import SpelledAnswer

from fleetd.engine.answer.dsml import DSML, DSML_START
from fleetd.engine.answer.tool_formats import with_format
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import ChatPrompt, Generate
from fleetd.errors import BadRequest

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "Rain?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return with_format(miniature.deepseek_v32())


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str:
    request = Generate("r", ChatPrompt(messages, tools, "auto", options))
    return str(tokenizer.decode(prepare(request, tokenizer, len(tokenizer.get_vocab())).tokens))


@pytest.mark.parametrize(("thinking", "end"), [(True, "<think>"), (False, "</think>")])
def test_every_switch_and_option_is_taken(tokenizer: Any, thinking: bool, end: str) -> None:
    options = {"enable_thinking": thinking, "thinking": thinking, "reasoning_effort": "low", "x": 1}
    assert rendered(tokenizer, [ASK], **options).endswith(end)


def test_tools_are_shown_where_there_is_no_system_message(tokenizer: Any) -> None:
    text = rendered(tokenizer, [ASK], TOOLS)
    assert '"name": "look"' in text
    assert text.index('"name": "look"') < text.index("Rain?")
    assert (
        rendered(tokenizer, [{"role": "system", "content": "Be brief."}, ASK], TOOLS).count("## Tools") == 1
    )


def test_calls_and_their_results_are_shown(tokenizer: Any) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "a<b", "n": 7}}},
        {"id": "b", "type": "function", "function": {"name": "look", "arguments": "not JSON"}},
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "content": text, "tool_call_id": text} for text in ("a", "b")]
    text = rendered(tokenizer, [ASK, said, *results], TOOLS, enable_thinking=False)
    seen = SpelledAnswer("deepseek_v32", [text[text.rindex(DSML_START) :]], TOOLS)
    assert [json.loads(arguments) for _, _, arguments in seen.calls] == [
        {"at": "a<b", "n": 7},
        {"input": "not JSON"},
    ]
    assert "<result>b</result>\n</function_results>" in text


def test_a_result_without_a_call_is_the_requests_fault(tokenizer: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        rendered(tokenizer, [{"role": "tool", "content": "canary"}, ASK])
    assert "canary" not in str(caught.value)


def test_the_format_is_known_by_the_template(tokenizer: Any) -> None:
    plain = miniature.deepseek_v32()
    assert not plain.has_tool_calling
    assert tokenizer.has_tool_calling
    assert tokenizer.init_kwargs["tool_parser_type"] == "deepseek_v32"
    written = miniature.llama3()
    written._tokenizer.chat_template = f"{{{{ '<{DSML}function_calls>' }}}}"
    assert with_format(written).tool_call_start == DSML_START
