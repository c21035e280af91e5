"""Whether each layer of a model can be divided between machines. Pure.

A divided layer ends in two sums over all machines, after its attention and after its MLP. Each machine reads
its part of the weights at the same time, and then waits for a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose layers mlx-lm divides, as configs name them.
FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "kimi_k25",
        "llama",
        "longcat_flash",
        "minimax",
        "ministral3",
        "mistral",
        "mistral4",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "step3p5",
    }
)
# What has to divide, and what people call it.
_COUNTS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "pairs of keys and values",
    "intermediate_size": "channels of a layer",
    "moe_intermediate_size": "channels of an expert",
}


def undividable(config: Mapping[str, Any], ranks: int) -> str:
    """Why layers of a model with this config cannot be divided by so many machines, as a sentence; "" if they
    can be."""
    family = str(config.get("model_type", "unknown"))
    if family not in FAMILIES:
        return f"Layers of {family} models cannot be divided between machines."
    text = config.get("text_config") or config
    for name, words in _COUNTS.items():
        count = text.get(name)
        if isinstance(count, int) and count % ranks:
            return f"Its {count} {words} cannot be divided between {ranks} machines."
    return ""
