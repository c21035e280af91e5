"""Abilities of a model besides answering, as its files and the catalog tell them: tool calls, thinking."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetd.models.catalog import CatalogEntry
from fleetd.models.chat_templates import for_tools, read_templates

# Texts that a chat template writes around calls → the format's name, as the catalog has it. A row matches if
# all of its texts stand in the template; the first row that matches wins.
_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("\uff5cDSML\uff5cfunction_calls",), "deepseek_v32"),
    (("<tool_call>", "tool_call.name"), "json_tools"),
    (("<|channel|>", "<|message|>", "<|call|>"), "harmony"),
    (("tool_call", '"parameters": ', "<|start_header_id|>"), "llama3"),
)
# What stands in place of a format for a model that is told one.
BY_GRAMMAR = "grammar"
_THOUGHTS = ("<think>", "enable_thinking", "reasoning_effort", "<|channel|>", "<|channel>")


class ModelAbilities(msgspec.Struct, frozen=True):
    """Abilities of one model."""

    # How it writes tool calls, by the name of the format; "" if its chat template knows none.
    tools: str = ""
    # True if it can reason before it answers.
    thinking: bool = False
    # True if it has a chat template.
    chats: bool = False

    @property
    def shown_tools(self) -> str:
        """``tools`` for clients and people: BY_GRAMMAR for a model that is told how to call tools."""
        return self.tools or (BY_GRAMMAR if self.chats else "")


def of_files(path: Path | None, entry: CatalogEntry | None) -> ModelAbilities:
    """Abilities by the files in ``path`` if the model is on this machine, else by the catalog. Blocks."""
    templates = read_templates(path) if path is not None else {}
    if templates:
        asked, thoughts = of_template(for_tools(templates)), of_template("".join(templates.values()))
        return ModelAbilities(asked.tools, thoughts.thinking, asked.chats)
    return of_entry(entry) if entry is not None else ModelAbilities()


def of_entry(entry: CatalogEntry) -> ModelAbilities:
    """Abilities by the catalog."""
    return ModelAbilities(entry.tools, entry.thinking, "chat" in entry.roles)


def of_template(template: str) -> ModelAbilities:
    """Abilities by the text of a chat template."""
    tools = next((name for texts, name in _FORMATS if all(text in template for text in texts)), "")
    return ModelAbilities(tools, any(text in template for text in _THOUGHTS), bool(template))
