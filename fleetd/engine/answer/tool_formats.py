"""What a model writes around the parts of its answers, by its tokenizer; formats that mlx-lm does not know.

Llama 3   {"name": …, "parameters": {…}}    the whole answer; <|python_tag|> may stand before it
gpt-oss   <|channel|>analysis<|message|>…<|end|>    reasoning
          <|start|>assistant<|channel|>final<|message|>…
          <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}

DeepSeek  between tags: dsml.py
"""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from fleetd.engine.answer.answer_reader import Heads, HeadText, Markers
from fleetd.engine.answer.call_formats import CALL_FORMATS, HARMONY_START, LLAMA3_START
from fleetd.engine.answer.dsml import DSML_END, DSML_START, forgiving, is_dsml_template
from fleetd.models.abilities import of_template
from fleetd.models.chat_templates import for_tools, named

_CHANNELS = ("analysis", "commentary", "final")
CHANNEL_HEADS = {
    "head": Heads(
        begins=(
            "<|start|>assistant",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            " to=",
            "to=",
            *_CHANNELS,
        ),
        inside=("<|start|>assistant", "<|channel|>", "<|constrain|>"),
        after={
            "<|end|>": ("<|start|>", "<|channel|>"),
            "<|start|>assistant": ("<|channel|>", "<|message|>", " to="),
            "<|channel|>": _CHANNELS,
            "<|return|>": ("<|start|>",),
        },
        thought=("analysis",),
        writes=HeadText(
            thought="<|channel|>analysis<|message|>",
            note="<|channel|>commentary<|message|>",
            answer="<|channel|>final<|message|>",
            calls="",
            next="<|end|><|start|>assistant",
        ),
    ),
    "header": Heads(
        begins=("<|start|>assistant", "<|message|>", " to=", "to="),
        inside=("<|start|>assistant",),
        after={"<|eom|>": (" to=", "to=", "<|"), "<|eot|>": (" to=", "to=", "<|")},
        thought=("to=self",),
        writes=HeadText(
            thought=" to=self<|message|>",
            note=" to=commentary<|message|>",
            answer=" to=user<|message|>",
            calls=" to={word}<|message|>",
            next="<|eom|><|start|>assistant",
        ),
    ),
}
# How a model calls tools whose chat template knows none: ``prompt.shown_tools`` tells it.
_TOLD = "json_tools"
# As mlx-lm knows a format by which channels are told apart.
_HARMONY: dict[str, Any] = {"initial_state": "head", "transitions": {"head": [("<|message|>", "reasoning")]}}


def with_format(tokenizer: Any) -> Any:
    """The tokenizer of a model, with its format for tool calls if one is known here."""
    template = for_tools(named(tokenizer.chat_template))
    vocabulary = tokenizer.get_vocab()
    if tokenizer.has_tool_calling:
        if _format(tokenizer) not in CALL_FORMATS:
            tokenizer._tool_call_start = None
        return tokenizer
    if {"<|channel|>", "<|message|>", "<|start|>", "<|call|>"} <= vocabulary.keys():
        return _wrapped(tokenizer, "harmony", HARMONY_START, "<|call|>", _HARMONY)
    if LLAMA3_START in vocabulary and "tool_call" in template and '"parameters": ' in template:
        return _wrapped(tokenizer, "llama3", LLAMA3_START, "", None)
    if DSML_START in template or is_dsml_template(tokenizer._chat_template):
        return _wrapped(tokenizer, "deepseek_v32", DSML_START, DSML_END, None)
    if isinstance(tokenizer.chat_template, dict) and (name := of_template(template).tools):
        # mlx-lm looks for formats in a lone template.
        form = CALL_FORMATS[name]
        return _wrapped(tokenizer, name, form.start or form.begins[0], form.end, None)
    return tokenizer


def has_reasoning(tokenizer: Any) -> bool:
    """True if the model's answers have reasoning that is told from the rest."""
    states = tokenizer.response_transitions.values()
    return bool(tokenizer.has_thinking) or any(to == "reasoning" for edges in states for _, to in edges)


def tools_by_grammar(tokenizer: Any) -> bool:
    """True if the model's chat template knows no tools: ``prompt.shown_tools`` shows them, and a grammar
    holds the model to the syntax that it is told there."""
    return bool(tokenizer.has_chat_template) and not tokenizer.has_tool_calling


def call_format(tokenizer: Any) -> str:
    """The key in CALL_FORMATS of how the model writes its calls; "" if it can make none."""
    if tokenizer.has_tool_calling:
        return _format(tokenizer)
    return _TOLD if tools_by_grammar(tokenizer) else ""


def markers(tokenizer: Any) -> Markers:
    """What stands around the parts of this model's answers."""
    return Markers(
        (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None,
        tuple(tokenizer.structural_markers),
        CALL_FORMATS.get(call_format(tokenizer)),
        CHANNEL_HEADS.get(str(tokenizer.response_initial_state or "")),
    )


def _format(tokenizer: Any) -> str:
    return str(tokenizer.init_kwargs.get("tool_parser_type") or "")


def _wrapped(
    tokenizer: Any, name: str, start: str, end: str, response_format: dict[str, Any] | None
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
        response_format=response_format,
    )
