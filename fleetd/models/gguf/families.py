"""The families of models that can be imported, and mlx-lm's names for GGUF's tensors. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from fleetd.models.gguf.packing import HalfType


class Family(msgspec.Struct, frozen=True):
    """One value of ``general.architecture``."""

    # The model's class in transformers, for config.json.
    class_name: str
    # mlx-lm's name.
    model_type: str
    # A block's tensor → the module in a layer that has its ``weight`` and ``bias``.
    modules: Mapping[str, str]
    # A block's tensor with its ending → a parameter that is no module's weight or bias.
    parameters: Mapping[str, str] = msgspec.field(default_factory=dict)
    # The dtype of scales and of weights that are not quantised. Families whose activations are known to
    # leave the range of F16 have BF16.
    dtype: HalfType = "F16"
    # The scalings of RoPE that mlx-lm applies for the family.
    scalings: frozenset[str] = frozenset()
    # True if the file's writer interleaves the rows of q and k for its RoPE.
    interleaved: bool = False
    # True if mlx-lm adds 1 to the weight of a norm; the file holds the sum.
    offset_norms: bool = False
    # True if mlx-lm has a separate head even if the file ties the head to the embedding.
    own_head: bool = False
    # The part of a parameter's name before ``model`` and ``lm_head``.
    root: str = ""


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET_PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_ANY_SCALING = frozenset({"linear", "yarn"})

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        _ATTENTION | _TWO_NORMS | _MLP,
        scalings=_ANY_SCALING | {"llama3"},
        interleaved=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _ATTENTION | _TWO_NORMS | _MLP, scalings=_ANY_SCALING),
    "qwen3": Family(
        "Qwen3ForCausalLM", "qwen3", _ATTENTION | _QK_NORMS | _TWO_NORMS | _MLP, scalings=_ANY_SCALING
    ),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _ATTENTION | _TWO_NORMS | _EXPERTS | _SHARED_EXPERT,
        own_head=True,
    ),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _ATTENTION | _QK_NORMS | _TWO_NORMS | _EXPERTS),
    "qwen35": Family(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        _ATTENTION | _QK_NORMS | _DELTA_NET | _MLP,
        _DELTA_NET_PARAMETERS,
        dtype="BF16",
        root="language_model.",
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        _ATTENTION | _QK_NORMS | _DELTA_NET | _EXPERTS | _SHARED_EXPERT,
        _DELTA_NET_PARAMETERS,
        dtype="BF16",
        root="language_model.",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", _ATTENTION | _FOUR_NORMS | _MLP, dtype="BF16", offset_norms=True
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _ATTENTION | _QK_NORMS | _FOUR_NORMS | _MLP,
        dtype="BF16",
        scalings=frozenset({"linear"}),
        offset_norms=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        _TWO_NORMS
        | _FUSED_MLP
        | {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
        },
        scalings=frozenset({"longrope"}),
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        _ATTENTION
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate_proj",
            "ffn_up_exps": "mlp.experts.up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
        {"attn_sinks.weight": "self_attn.sinks"},
        dtype="BF16",
        scalings=frozenset({"yarn"}),
        own_head=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        "glm4",
        _ATTENTION
        | _TWO_NORMS
        | _FUSED_MLP
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        dtype="BF16",
        own_head=True,
    ),
}

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(([a-z0-9_]+)(?:\.(weight|bias))?)")

#: Per-frequency divisors of RoPE; they become part of the config.
ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


def block_of(tensor: str) -> int | None:
    """The number of the block that a tensor belongs to; None if it belongs to none."""
    match = _BLOCK.fullmatch(tensor)
    return int(match[1]) if match else None


def parameter_of(family: Family, tensor: str) -> str | None:
    """mlx-lm's name of a tensor; None if the family is not known to have such a tensor."""
    stem, _, leaf = tensor.rpartition(".")
    if stem in _OUTER and leaf in ("weight", "bias"):
        return f"{family.root}{_OUTER[stem]}.{leaf}"
    match = _BLOCK.fullmatch(tensor)
    if match is None:
        return None
    layer = f"{family.root}model.layers.{int(match[1])}"
    if (parameter := family.parameters.get(match[2])) is not None:
        return f"{layer}.{parameter}"
    if match[4] is not None and (module := family.modules.get(match[3])) is not None:
        return f"{layer}.{module}.{match[4]}"
    return None
