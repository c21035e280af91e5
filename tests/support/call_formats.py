"""Tokenizers that write tool calls as a family of models does, from texts that a test chooses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fleetd.engine import dsml, tool_formats


@dataclass(frozen=True)
class Family:
    """Where a family's calls begin and end, and what reads them."""

    start: str
    end: str
    parse: Callable[..., Any]


_OURS = {
    "llama3": Family(tool_formats.LLAMA3_START, "", tool_formats.parse_llama3),
    "harmony": Family(tool_formats.HARMONY_START, "<|call|>", tool_formats.parse_harmony),
    "deepseek_v32": Family(dsml.DSML_START, dsml.DSML_END, dsml.parse_dsml),
}


def family(parser: str) -> Family:
    """By the parser's name: ours or mlx-lm's."""
    if parser in _OURS:
        return _OURS[parser]
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return Family(module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def spelling(parser: str, words: list[str]) -> Any:
    """A tokenizer whose tokens are given pieces of text, with the format of a family."""
    made = family(parser)
    response = tool_formats.HARMONY_FORMAT if parser == "harmony" else {}

    class Detokenizer:
        text = last_segment = ""

        def add_token(self, token: int) -> None:
            self.last_segment = words[token]

        def finalize(self) -> None:
            self.last_segment = ""

    return SimpleNamespace(
        detokenizer=Detokenizer(),
        init_kwargs={"tool_parser_type": parser},
        has_thinking=False,
        has_tool_calling=True,
        tool_call_start=made.start,
        tool_call_end=made.end,
        tool_parser=made.parse,
        structural_markers=[],
        response_transitions=response.get("transitions", {}),
        response_initial_state=response.get("initial_state"),
    )
