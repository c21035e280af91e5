"""What a model can do besides answer, as far as its files and the catalog tell: call tools, think."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.catalog import CatalogEntry
from fleetd.models.json_files import read_json
from fleetd.models.opening import read_regular

# What a chat template writes around calls → the format's name, as the catalog has it. All of a row's texts
# stand in the template; the first row that does wins.
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
_THOUGHTS = ("<think>", "enable_thinking", "reasoning_effort", "<|channel|>", "<|channel>")


class ModelAbilities(msgspec.Struct, frozen=True):
    """``tools``: how it writes tool calls, by the name of the format; "" if it writes none.
    ``thinking``: it can reason before it answers."""

    tools: str = ""
    thinking: bool = False


def of_files(path: Path | None, entry: CatalogEntry | None) -> ModelAbilities:
    """Abilities by the files in ``path``, if the model is here, else by the catalog. Reads files."""
    template = read_template(path) if path is not None else ""
    if template:
        return of_template(template)
    return ModelAbilities(entry.tools, entry.thinking) if entry is not None else ModelAbilities()


def of_template(template: str) -> ModelAbilities:
    """Abilities by what a chat template writes and asks for."""
    tools = next((name for texts, name in _FORMATS if all(text in template for text in texts)), "")
    return ModelAbilities(tools, any(text in template for text in _THOUGHTS))


def read_template(folder: Path) -> str:
    """The chat template of a model folder; "" if it has none that can be read. Blocks."""
    written = []
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            written.append((folder / name).stat().st_mtime_ns)
        except OSError:
            written.append(0)
    return _template(folder, *written)


@functools.lru_cache(maxsize=64)
def _template(folder: Path, _jinja_ns: int, _config_ns: int) -> str:
    """The template, kept for files of these times: models are listed often, and the files are long."""
    try:
        return read_regular(folder / "chat_template.jinja", limits.MODEL_CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        pass
    try:
        found = read_json(folder / "tokenizer_config.json", limits.MODEL_CONFIG_BYTES).get("chat_template")
    except ModelCorrupt:
        return ""
    if isinstance(found, list):  # several, by name
        found = next((each.get("template") for each in found if isinstance(each, dict)), "")
    return found if isinstance(found, str) else ""
