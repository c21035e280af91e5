"""Tokenizers that write tool calls as a family of models does, from texts that a test chooses."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from fleetd.engine import tool_formats


def spelling(parser: str, words: list[str]) -> Any:
    """A tokenizer whose tokens are given pieces of text, with the format of a family."""
    fields: dict[str, Any]
    if parser == "llama3":
        fields = {"start": tool_formats.LLAMA3_START, "end": "", "parse": tool_formats.parse_llama3}
    elif parser == "harmony":
        fields = {"start": tool_formats.HARMONY_START, "end": "<|call|>", "parse": tool_formats.parse_harmony}
    else:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        fields = {
            "start": module.tool_call_start,
            "end": module.tool_call_end,
            "parse": module.parse_tool_call,
        }
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
        tool_call_start=fields["start"],
        tool_call_end=fields["end"],
        tool_parser=fields["parse"],
        structural_markers=[],
        response_transitions=response.get("transitions", {}),
        response_initial_state=response.get("initial_state"),
    )
