"""A small random model of every architecture that can be cut, built as mlx-lm builds it from a config.

A family is an entry in ``OWN``, under the type that its config has, and more entries for what else is
published under that type or run by the same code. Tests take them from ``FAMILIES``; those of ``LONG`` run
in the long tests only.
"""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from fleetd.engine.cpu import packed_layers
from fleetd.engine.layers.architectures import ANY_TEXT, CUT, Architecture

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

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_QWEN35 = {**_DELTA, "rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_SCALED = {
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
_MISTRAL4 = {**_LATENT, **_SCALED, "rope_scaling": None, "routed_scaling_factor": 1.0}
_INDEX = {"index_head_dim": 64, "index_n_heads": 4, "index_topk": 48, "moe_layer_freq": 1}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_CONV = {
    "norm_eps": 1e-6,
    "conv_bias": False,
    "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
}
_LINEAR_MOE = {
    **_EXPERTS,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_BAILING_V3 = {
    **_LATENT,
    **_LINEAR_MOE,
    "rope_scaling": None,
    "moe_shared_expert_intermediate_size": 64,
    "short_conv_kernel_size": 4,
}
_MINIMAX = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "rotary_dim": 16,
}
_GPT = {
    "n_ctx": 4096,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 4096,
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": True,
}
_NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 1,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-6,
    "use_bias": False,
    "use_conv_bias": True,
}
_GEMMA4 = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
_GEMMA3N = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    "hidden_size_per_layer_input": 32,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 32,
}
_HUNYUAN = {
    "moe_topk": 2,
    "num_experts": 1,
    "num_shared_expert": 1,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "use_cla": True,
    "cla_share_factor": 2,
    "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
}
_KIMI_K3 = {
    **_LATENT,
    "model_type": "kimi_linear",
    "num_experts": 0,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "mla_use_output_gate": True,
    "attn_res_block_size": 2,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
}

OWN: dict[str, dict[str, Any]] = {
    "afmoe": {**_LAYER_TYPES, **_EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "bailing_moe": {
        **_EXPERTS,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone_moe": {
        **_LAYER_TYPES,
        **_EXPERTS,
        "num_shared_experts": 1,
        "is_moe_layer": [False, True, True, True],
    },
    "mimo_v2_flash": {
        "num_experts_per_tok": 2,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "moe_intermediate_size": 64,
        "n_shared_experts": None,
        "n_routed_experts": 4,
        "routed_scaling_factor": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "v_head_dim": 32,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "rwkv7": {
        "norm_eps": 1e-6,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 32,
        "decay_low_rank_dim": 16,
    },
    "seed_oss": {},
    "step3p5": {
        **_LAYER_TYPES,
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "swiglu_limits": [0.0, 0.0, 0.0, 7.0],
    },
    "afm7": {"hidden_dim": 128, "num_layers": 4, "num_kv_reuse_layers": 0, "num_heads": 4, "num_kv_heads": 2},
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {
        **_LATENT,
        **_LINEAR_MOE,
        "num_key_value_heads": 4,
        "rope_scaling": None,
    },
    "bailing_moe_linear": {**_LINEAR_MOE, "num_key_value_heads": 4},
    "bailing_moe_v3": _BAILING_V3,
    "bailing_v3": {
        **_BAILING_V3,
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
    },
    "cohere": {},
    "cohere2": _WINDOWS,
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_INDEX},
    "ernie4_5": {"use_bias": False},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
    "falcon_h1": {**_MAMBA, **_TIED, "mamba_d_ssm": 128, "mamba_rms_norm": True},
    "gear": {
        "sliding_window": WINDOW,
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32.0},
    "gemma3": {"text_config": {**_COMMON, **_GEMMA3, "model_type": "gemma3_text"}},
    "gemma3_text": _GEMMA3,
    "gemma3n": {"text_config": {**_COMMON, **_GEMMA3N, "model_type": "gemma3n_text"}},
    "gemma4": {"text_config": {**_COMMON, **_GEMMA4, "model_type": "gemma4_text"}},
    "gemma4_text": _GEMMA4,
    # Without inputs of each layer's own; with experts, and with full attention whose keys are the values.
    "gemma4_moe": {
        "model_type": "gemma4",
        "text_config": {
            **_COMMON,
            **_GEMMA4,
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    },
    "gemma4_unified": {"text_config": {**_COMMON, **_GEMMA4, "model_type": "gemma4_unified_text"}},
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
    "glm4_moe_lite": {**_LATENT, "rope_scaling": None},
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEX,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt_oss": {
        **_LAYER_TYPES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },
    "gpt2": _GPT,
    "gpt_bigcode": {**_GPT, "n_inner": 256},
    "granite": {
        **_TIED,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.18,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "mlp_bias": False,
    },
    "granitemoehybrid": {
        **_MAMBA,
        **_TIED,
        "layer_types": ["mamba", "attention"] * 2,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.18,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "hunyuan": {**_HUNYUAN, **_TIED},
    # All layers but the first read the keys of another: three of four cuts part them.
    "hunyuan_3": {**_HUNYUAN, **_TIED, "model_type": "hunyuan", "cla_share_factor": 3},
    "hunyuan_experts": {**_HUNYUAN, **_TIED, "model_type": "hunyuan", "num_experts": 4},
    "hunyuan_v1_dense": {},
    "iquestcoder": {},
    "jamba": {
        **_TIED,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "joyai_llm_flash": _LATENT,
    "kimi_k2": _LATENT,
    "kimi_k25": {"text_config": {**_COMMON, **_LATENT, "model_type": "deepseek_v3"}},
    "kimi_k3": {"text_config": {**_COMMON, **_KIMI_K3}},
    "kimi_k3_experts": {
        "model_type": "kimi_k3",
        "text_config": {**_COMMON, **_KIMI_K3, "num_experts": 4, "attn_res_block_size": 3},
    },
    "kimi_linear": {
        **_LATENT,
        **_EXPERTS,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "model_max_length": 4096,
        "q_lora_rank": None,
        "rope_scaling": None,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {
        **_CONV,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2_moe": {**_CONV, **_EXPERTS, "norm_topk_prob": True, "use_expert_bias": True, "num_dense_layers": 1},
    "llama": {},
    "longcat_flash": {
        **_LATENT,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 256,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 64,
        "zero_expert_num": 2,
        "num_layers": 4,
        "routed_scaling_factor": 1.5,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "rope_scaling": None,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 32,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 8,
        "layer_norm_epsilon": 1e-6,
    },
    "minimax": _MINIMAX,
    "minimax_m2": _MINIMAX,
    "minimax_m3_vl": {
        "text_config": {
            **_COMMON,
            "model_type": "minimax_m3_vl_text",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 64,
            "moe_layer_freq": [0, 1, 1, 1],
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 16,
            "index_topk_blocks": 2,
            "sparse_attention_freq": [0, 1, 1, 1],
        }
    },
    "ministral3": {**_SCALED, **_LAYER_TYPES},
    "mistral": {**_LAYER_TYPES, **_TIED},
    "mistral3": {"text_config": {**_COMMON, **_SCALED, "model_type": "ministral3"}},
    "mistral3_llama": {
        "model_type": "mistral3",
        "text_config": {**_COMMON, "sliding_window": None, "model_type": "mistral"},
    },
    "mistral3_small_4": {
        "model_type": "mistral3",
        "text_config": {**_COMMON, **_MISTRAL4, "model_type": "mistral4"},
    },
    "mistral4": _MISTRAL4,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {**_NEMOTRON, "hybrid_override_pattern": ["M", "*", "-", "M"]},
    # Nemotron 3: experts in layers of their own, which keep nothing.
    "nemotron_3": {
        **_NEMOTRON,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": ["M", "E", "*", "M"],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "olmo2": {},
    "olmo3": _LAYER_TYPES,
    "olmo_hybrid": {
        **_DELTA,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "phi3": {},
    "plamo2": {
        **_TIED,
        "hidden_size_per_head": 32,
        "mamba_num_heads": 4,
        "mamba_d_state": 32,
        "attention_window_size": 4096,
        "full_attention_idx": [1, 3],
    },
    "qwen2": _TIED,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": _TIED,
    "qwen3_5": {"text_config": {**_COMMON, **_QWEN35, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "text_config": {
            **_COMMON,
            **_QWEN35,
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "model_type": "qwen3_5_moe_text",
        }
    },
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_next": {
        **_DELTA,
        **_EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_vl": {"text_config": {**_COMMON, **_TIED, "model_type": "qwen3"}},
    "qwen3_vl_moe": {
        "text_config": {
            **_COMMON,
            **_EXPERTS,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "model_type": "qwen3_moe",
        }
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {},
    "xverse": {},
}
# With these settings they have no experts.
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": None},
    "kimi_k2": {"n_routed_experts": None},
}
# Each has something in common with one of the others that the quick run tries: what it keeps, how its layers
# are called, or where its parts lie.
LONG = {
    "afmoe",
    "apertus",
    "bailing_moe",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "gear",
    "mimo_v2_flash",
    "rwkv7",
    "seed_oss",
    "step3p5",
    "afm7",
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "bailing_v3",
    "cohere",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma4",
    "gemma4_unified",
    "glm4",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_bigcode",
    "granite",
    "granitemoehybrid",
    "hunyuan_3",
    "hunyuan_experts",
    "hunyuan_v1_dense",
    "iquestcoder",
    "jamba",
    "joyai_llm_flash",
    "kimi_k2",
    "kimi_k25",
    "kimi_k3_experts",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "longcat_flash",
    "mamba2",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl",
    "ministral3",
    "mistral3",
    "mistral3_llama",
    "mistral3_small_4",
    "mistral4",
    "nemotron_h",
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
    "xverse",
}


def _code_of(config: dict[str, Any]) -> str:
    """The module of mlx-lm that builds the text model of such a config, without building it."""
    code = _get_classes(config)[0].__module__.removeprefix("mlx_lm.models.")
    return _code_of({"model_type": "llama", **config["text_config"]}) if code in ANY_TEXT else code


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**_COMMON, "model_type": model_type, **OWN[model_type], **changes}


# How each of these models is run in pieces.
FAMILIES: dict[str, Architecture] = {name: CUT[_code_of(config_of(name))] for name in OWN}


@lru_cache(64)
def _weights(config: str) -> Any:
    """Random weights of the model with this config; drawing them takes longer than building it."""
    model = _built(json.loads(config))
    keys = iter(mx.random.split(mx.random.key(11), 1000))

    def draw(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        return noise * 0.05 if array.ndim > 1 else 1.0 + noise * 0.1

    weights = tree_map(draw, model.parameters())
    mx.eval(weights)
    return weights


@lru_cache(128)
def _arguments(config: str) -> tuple[Any, Any]:
    """The class of the model with this config, and its arguments, which take longer to read than to use."""
    model_class, args_class = _get_classes(json.loads(config))
    return model_class, args_class.from_dict(json.loads(config))


def _built(config: dict[str, Any]) -> Any:
    model_class, arguments = _arguments(json.dumps(config))
    return model_class(copy.deepcopy(arguments))


def tiny(model_type: str, **changes: Any) -> Any:
    """The model with random weights in f32, the same every time; each one may be changed by itself."""
    config = config_of(model_type, **changes)
    model = _built(config)
    # Arrays of its own, in which an item can be set.
    model.update(tree_map(mx.array, _weights(json.dumps(config))))
    model.eval()
    mx.eval(model.parameters())
    return model


def in_int8(model: Any, bits: int = 4) -> Any:
    """The model with quantised weights, as a CPU computes with them."""
    nn.quantize(model, group_size=32, bits=bits)
    packed_layers.to_int8(model, plain=False)
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
