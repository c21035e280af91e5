"""The chat templates of a folder, by name, as transformers reads them.

    chat_template.jinja     the template "default"; additional_chat_templates/NAME.jinja is the template NAME
    tokenizer_config.json   one template, which is "default", or a list of named templates
    chat_template.json      the same, read if the other files have no template

A conversation with tools is rendered by the template "tool_use" if there is one, else by "default". Models
that see pictures have the last file; transformers does not read it for text, and fleetd does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.json_files import BOM, read_json
from fleetd.models.opening import read_regular

DEFAULT, TOOL_USE = "default", "tool_use"
_MORE = "additional_chat_templates"
_JINJA, _CONFIG, _JSON = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"


def read_templates(folder: Path) -> Mapping[str, str]:
    """The templates of a model folder, by name. A file that cannot be read has none. Blocks."""
    written = []
    for name in (_JINJA, _MORE, _CONFIG, _JSON):
        try:
            written.append((folder / name).stat().st_mtime_ns)
        except OSError:
            written.append(0)
    return _templates(folder, *written)


@functools.lru_cache(maxsize=64)
def _templates(folder: Path, *_written_ns: int) -> Mapping[str, str]:
    """The templates, cached by the files' times: models are listed often, and the files are long."""
    files = {DEFAULT: folder / _JINJA} | {file.stem: file for file in (folder / _MORE).glob("*.jinja")}
    texts = {name: text for name, file in files.items() if (text := _text(file)) is not None}
    return texts or named(_of_json(folder / _CONFIG) or _of_json(folder / _JSON))


def _text(file: Path) -> str | None:
    try:
        return read_regular(file, limits.MODEL_CONFIG_BYTES).removeprefix(BOM).decode()
    except (OSError, UnicodeDecodeError):
        return None


def lone_template(folder: Path) -> Any:
    """The value in chat_template.json if no other file has a template, else None. Blocks."""
    if (folder / _JINJA).exists() or (folder / _MORE).exists() or _of_json(folder / _CONFIG):
        return None
    return _of_json(folder / _JSON)


def for_tools(templates: Mapping[str, str]) -> str:
    """The template of a conversation in which tools are offered; "" if there is none."""
    return templates.get(TOOL_USE) or templates.get(DEFAULT, "")


def _of_json(file: Path) -> Any:
    try:
        return read_json(file, limits.MODEL_JSON_BYTES).get("chat_template")
    except ModelCorrupt:
        return None


def named(found: Any) -> Mapping[str, str]:
    """Templates by name, from a text, a list or a table, as files and tokenizers have them."""
    if isinstance(found, dict):
        found = [{"name": name, "template": text} for name, text in found.items()]
    entries = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
    pairs = [(each.get("name"), each.get("template")) for each in entries if isinstance(each, dict)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
