"""What Ollama's clients want to know of a model, from its files and the catalog. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fleetd.api.model_list import ModelObject
from fleetd.api.ollama import objects as o
from fleetd.api.ollama.render import timestamp
from fleetd.models.abilities import ModelAbilities

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


def capabilities(model: ModelObject, able: ModelAbilities) -> list[str]:
    """The model's abilities that Ollama has words for: it has none for reranking."""
    if model.fleet.purpose != "chat":
        return ["embedding"] if model.fleet.purpose == "embedding" else []
    known = {
        "completion": True,
        "tools": bool(able.shown_tools),
        "thinking": able.thinking,
        "vision": model.fleet.images,
    }
    return [name for name, has in known.items() if has]
