"""Which architectures a test is run on: a sample in the quick run, all of them in the long one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# Each has something in common with one of the others that the quick run tries: what it keeps, how its layers
# are called, or where its parts lie.
LONG = {
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "cohere",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma4",
    "glm4",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "granite",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "jamba",
    "kimi_k2",
    "kimi_k25",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "longcat_flash",
    "mamba2",
    "minimax",
    "minimax_m3_vl",
    "ministral3",
    "mistral4",
    "olmo2",
    "olmo_hybrid",
    "plamo2",
    "qwen2",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smollm3",
    "starcoder2",
}
# MLX multiplies with experts' matrices on a CPU in f32 only.
EXPERTS = {
    "bailing_hybrid",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "deepseek_v2",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_k25",
    "kimi_linear",
    "lfm2_moe",
    "longcat_flash",
    "minimax",
    "minimax_m3_vl",
    "mistral4",
    "mixtral",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
}
# With these settings they have none.
NO_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": None},
    "kimi_k2": {"n_routed_experts": None},
}


def each(names: Iterable[str]) -> list[Any]:
    """For ``pytest.mark.parametrize``."""
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in sorted(names)]
