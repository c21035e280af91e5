"""A small random model of every architecture that can be cut, built as mlx-lm builds it from a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

VOCAB = 256
WINDOW = 32

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_WINDOWS = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
_LAYER_TYPES = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA3 = {**_WINDOWS, "query_pre_attn_scalar": 32}

OWN: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": _WINDOWS,
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "ernie4_5": {"use_bias": False},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32.0},
    "gemma3": {"text_config": {**_COMMON, **_GEMMA3, "model_type": "gemma3_text"}},
    "gemma3_text": _GEMMA3,
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.5,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        **_LAYER_TYPES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },
    "granite": {
        **_TIED,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.18,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "mlp_bias": False,
    },
    "hunyuan_v1_dense": {},
    "kimi_k2": _LATENT,
    "llama": {},
    "mistral": {**_LAYER_TYPES, **_TIED},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": _LAYER_TYPES,
    "phi3": {},
    "qwen2": _TIED,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": _TIED,
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {},
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**_COMMON, **OWN[model_type], "model_type": model_type, **changes}


def tiny(model_type: str, **changes: Any) -> Any:
    """The model with random weights in f32."""
    config = config_of(model_type, **changes)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(11), 1000))

    def draw(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        return noise * 0.05 if array.ndim > 1 else 1.0 + noise * 0.1

    model.update(tree_map(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def write(
    folder: Path, model_type: str, *, dtype: mx.Dtype = mx.float32, bits: int = 0, **changes: Any
) -> Path:
    """The model as files, quantised to ``bits`` where they are given; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model, config = tiny(model_type, **changes), config_of(model_type, **changes)
    model.set_dtype(dtype)
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, **config["quantization"])
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
