"""Formats of tool calls and of reasoning that mlx-lm has no parser for.

    Llama 3   {"name": …, "parameters": {…}}    the whole answer; <|python_tag|> may stand before it
    gpt-oss   <|channel|>analysis<|message|>…<|end|>    reasoning
              <|start|>assistant<|channel|>final<|message|>…
              <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}

    DeepSeek  between tags: dsml.py

A tokenizer that mlx-lm knows a format for stays as it is.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from fleetd.engine.dsml import DSML_END, DSML_START, forgiving, is_dsml_template, parse_dsml
from fleetd.models.abilities import of_template
from fleetd.models.chat_templates import for_tools, named

LLAMA3_START = "<|python_tag|>"
HARMONY_START = "<|channel|>commentary to=functions."

# The end of one message and the head of the next, inside of any channel.
_NEXT = [("<|end|>", "head"), ("<|start|>assistant", "head"), ("<|channel|>", "head"), ("<|return|>", "head")]
# A head names the channel and, before or after it, whom the message is for. Its text is shown to nobody.
_TO_TOOL = ("to=functions.", "tool")
HARMONY_FORMAT: dict[str, Any] = {
    "initial_state": "head",
    "transitions": {
        "head": [
            ("analysis", "analysis head"),
            ("commentary", "answer head"),
            ("final", "answer head"),
            ("<|message|>", "normal"),
            _TO_TOOL,
        ],
        "analysis head": [("<|message|>", "reasoning"), _TO_TOOL],
        "answer head": [("<|message|>", "normal"), _TO_TOOL],
        "reasoning": _NEXT,
        "normal": _NEXT,
        "tool": [("<|end|>", "head"), ("<|start|>assistant", "head")],
    },
}
HEAD_STATES = frozenset({"head", "analysis head", "answer head"})
_HARMONY_CALL = re.compile(r"\s*([\w.-]+).*?<\|message\|>(.*)", re.DOTALL)


def parse_llama3(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Calls of one answer. Raises ValueError, KeyError or TypeError for a text that is none."""
    decoder, calls, at = json.JSONDecoder(strict=False), [], 0
    while at < len(text.rstrip()):
        start = re.compile(r"[\s;,]*").match(text, at)
        call, at = decoder.raw_decode(text, start.end() if start else at)
        arguments = call["parameters"] if "parameters" in call else call["arguments"]
        calls.append({"name": call["name"], "arguments": arguments})
    return calls


def parse_harmony(text: str, tools: Any = None) -> dict[str, Any]:
    """A call, from its name on. Raises ValueError for a text that is none."""
    found = _HARMONY_CALL.fullmatch(text)
    if found is None:
        raise ValueError("no call")
    return {"name": found[1], "arguments": json.loads(found[2].strip() or "{}", strict=False)}


def with_format(tokenizer: Any) -> Any:
    """The tokenizer of a model, with its format for tool calls if this module knows it."""
    template = for_tools(named(tokenizer.chat_template))
    vocabulary = tokenizer.get_vocab()
    if tokenizer.has_tool_calling:
        return tokenizer
    if {"<|channel|>", "<|message|>", "<|start|>", "<|call|>"} <= vocabulary.keys():
        return _wrapped(tokenizer, "harmony", HARMONY_START, "<|call|>", parse_harmony, HARMONY_FORMAT)
    if LLAMA3_START in vocabulary and "tool_call" in template and '"parameters": ' in template:
        return _wrapped(tokenizer, "llama3", LLAMA3_START, "", parse_llama3, None)
    if DSML_START in template or is_dsml_template(tokenizer._chat_template):
        return _wrapped(tokenizer, "deepseek_v32", DSML_START, DSML_END, parse_dsml, None)
    if isinstance(tokenizer.chat_template, dict) and (name := of_template(template).tools):
        # mlx-lm looks for formats in a lone template.
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        start, end = module.tool_call_start, module.tool_call_end
        return _wrapped(tokenizer, name, start, end, module.parse_tool_call, None)
    return tokenizer


def has_reasoning(tokenizer: Any) -> bool:
    """True if the model's answers have reasoning that is told from the rest."""
    states = tokenizer.response_transitions.values()
    return bool(tokenizer.has_thinking) or any(to == "reasoning" for edges in states for _, to in edges)


def _wrapped(
    tokenizer: Any, name: str, start: str, end: str, parser: Any, response_format: dict[str, Any] | None
) -> TokenizerWrapper:
    inner, chat_template = tokenizer._tokenizer, tokenizer._chat_template
    inner.init_kwargs["tool_parser_type"] = name
    return TokenizerWrapper(
        inner,
        detokenizer_class=lambda _: tokenizer._detokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        chat_template=forgiving(chat_template) if is_dsml_template(chat_template) else chat_template,
        tool_call_start=start,
        tool_call_end=end,
        tool_parser=parser,
        response_format=response_format,
    )
