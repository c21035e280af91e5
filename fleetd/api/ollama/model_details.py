"""What Ollama's clients want to know of a model, from its files and the catalog.

Pure but for ``read_template``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetd import limits
from fleetd.api.ollama import objects as o
from fleetd.api.ollama.render import timestamp
from fleetd.api.openai.objects import ModelObject
from fleetd.engine.protocol import Ready
from fleetd.errors import ModelCorrupt
from fleetd.models.catalog import CatalogEntry
from fleetd.models.folder import read_json

# "4b" in qwen3-4b, "135m" in smollm2-135m: what people call the size.
_SIZE = re.compile(r"(?:^|[-_.])(\d+(?:\.\d+)?[bm])(?=$|[-_.])", re.IGNORECASE)
# What config.json calls it → what Ollama does, behind "ARCHITECTURE.".
_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}


def details(model: ModelObject, config: Mapping[str, Any] | None = None) -> o.OllamaDetails:
    """``config``: the model's config.json, where it is on this machine."""
    family = model.fleet.architecture
    quantization = (config or {}).get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    size = _SIZE.search(model.id.rpartition("/")[2])
    return o.OllamaDetails(
        parent_model="",
        format="safetensors",
        family=family,
        families=[family] if family else [],
        parameter_size=size[1].upper() if size else "",
        quantization_level=f"{bits}bit" if isinstance(bits, int) else "",
    )


def tag(model: ModelObject) -> o.OllamaTag:
    return o.OllamaTag(
        name=model.id,
        model=model.id,
        modified_at=modified(model),
        size=model.fleet.weights_bytes,
        digest=digest(model),
        details=details(model),
    )


def digest(model: ModelObject) -> str:
    """Other files, another digest. A hash of the files themselves may cost minutes of reading."""
    return hashlib.sha256(f"{model.id} {model.created} {model.fleet.weights_bytes}".encode()).hexdigest()


def modified(model: ModelObject) -> str:
    return timestamp(datetime.fromtimestamp(model.created, UTC))


def model_info(model: ModelObject, config: Mapping[str, Any], context_tokens: int) -> dict[str, Any]:
    """Facts under GGUF's names; clients read ``general.architecture``, and the context under it."""
    architecture = model.fleet.architecture or "unknown"
    nested = config.get("text_config")
    found: dict[str, Any] = {"general.architecture": architecture, "general.basename": model.id}
    for section in (nested if isinstance(nested, dict) else {}, config):
        for key, name in _KEYS.items():
            if isinstance(section.get(key), int):
                found[f"{architecture}.{name}"] = section[key]
    found[f"{architecture}.context_length"] = context_tokens
    return found


def capabilities(entry: CatalogEntry | None, template: str, facts: Ready | None) -> list[str]:
    """Of what Ollama has words for. ``facts``: those of the loaded model, which knows best.

    ``entry`` and ``template`` are the catalog's and the model's own; "" where it is not on this machine.
    """
    if entry is not None and "chat" not in entry.roles:
        return ["embedding"]
    if facts is not None:
        tools, thinking = facts.tool_calls, facts.reasoning
    else:
        tools = "tools" in template or bool(entry is not None and entry.tools and not template)
        thinking = "enable_thinking" in template or "<think>" in template or "reasoning_effort" in template
    return ["completion", *(["tools"] if tools else []), *(["thinking"] if thinking else [])]


def read_template(folder: Path) -> str:
    """The chat template of a model folder; "" if it has none that can be read. Blocks."""
    try:
        with (folder / "chat_template.jinja").open(encoding="utf-8") as file:
            return file.read(limits.MODEL_CONFIG_BYTES)
    except (OSError, UnicodeDecodeError):
        pass
    try:
        found = read_json(folder / "tokenizer_config.json", limits.MODEL_CONFIG_BYTES).get("chat_template")
    except ModelCorrupt:
        return ""
    if isinstance(found, list):  # several, by name
        found = next((each.get("template") for each in found if isinstance(each, dict)), "")
    return found if isinstance(found, str) else ""
