"""Whether each layer of a model can be divided between machines, and whether that pays. Pure.

A divided layer ends in two sums over all machines, after its attention and after its MLP. Each machine reads
its part of the weights at the same time, and then waits for a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families that mlx-lm divides, by the names of their code there; "mistral" is computed by llama's.
FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "llama",
        "minimax",
        "ministral3",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "step3p5",
    }
)
# Sums over all machines in a layer.
SUMS = 2
_COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def undividable(config: Mapping[str, Any], ranks: int) -> str:
    """Why layers of a model with this config cannot be divided by so many machines, as a sentence; "" if they
    can be."""
    family = str(config.get("model_type", "unknown"))
    if family not in FAMILIES:
        return f"Layers of {family} models cannot be divided between machines."
    text = config.get("text_config") or config
    for name in _COUNTS:
        count = text.get(name)
        if isinstance(count, int) and count % ranks:
            return f"Its {count} {name} cannot be divided between {ranks} machines."
    return ""


def step_s(layers: int, layer_s: float, ranks: int, sum_s: float) -> float:
    """Seconds of one token if ``ranks`` equal machines divide the layers.

    ``layer_s``: that one machine takes for a whole layer. ``sum_s``: of one sum of hidden states over all.
    """
    return layers * (layer_s / ranks + SUMS * sum_s)


def pays(layers: int, layer_s: float, ranks: int, sum_s: float, hops_s: float) -> bool:
    """Whether divided layers answer one request faster than layers dealt out over the same machines.

    ``hops_s``: what hidden states take on their way through all machines and back, once for a token.
    """
    return step_s(layers, layer_s, ranks, sum_s) < layers * layer_s + hops_s
