"""Small random models of every family that GGUF import knows, written as llama.cpp's converter writes them.

Names come from the `gguf` package's own table of names, keys from its writer; what the converter changes
about the weights (rows of q and k, heads of values, norms, decays) is done here in its direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from support.tiny_architectures import OWN, config_of

Array = np.ndarray[Any, Any]
#: Values of a GGUF tensor and its name → kind and bytes (rows of bytes).
Encode = Callable[[str, Array], tuple[Kind, Array]]

LAYERS = 2
#: The 256 characters that stand for bytes in byte-level BPE, then some more.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
TOKENS = [
    *map(chr, [*_PLAIN, *range(0x100, 0x200 - len(_PLAIN))]),
    *("th", "the", "<|im_start|>", "<|im_end|>"),
]
_WIDE = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": len(TOKENS),
}
_WIDE_EXPERTS = {"moe_intermediate_size": 256}
_DELTA_NET = {
    **_WIDE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


def _config(model_type: str, **changes: Any) -> dict[str, Any]:
    if model_type.startswith("qwen3_5"):
        return {"model_type": model_type, "text_config": {**_DELTA_NET, **changes}}
    experts = _WIDE_EXPERTS if "moe_intermediate_size" in OWN[model_type] else {}
    return config_of(model_type, **{**_WIDE, **experts, **changes})


_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 24,
    "long_factor": [1.0 + pair / 8 for pair in range(24)],
}
#: general.architecture → config of a small model.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", num_hidden_layers=1),
    "qwen2": _config("qwen2"),
    "qwen3": _config("qwen3"),
    "qwen2moe": _config("qwen2_moe", **_SHARED),
    "qwen3moe": _config("qwen3_moe"),
    "qwen35": _config("qwen3_5"),
    # All experts answer: else a last bit that chooses another one is kept in the state of the next tokens.
    "qwen35moe": _config("qwen3_5_moe", **{**_SHARED, "num_experts_per_tok": 4}),
    "gemma2": _config("gemma2", query_pre_attn_scalar=64),
    "gemma3": _config(
        "gemma3_text",
        query_pre_attn_scalar=64,
        sliding_window=32,
        sliding_window_pattern=6,
        rope_scaling={"type": "linear", "factor": 8.0},
        num_hidden_layers=6,
        rope_theta=1e6,
    ),
    "phi3": _config(
        "phi3",
        rope_scaling=_LONGROPE,
        original_max_position_embeddings=512,
        partial_rotary_factor=0.75,
    ),
    "gpt-oss": _config(
        "gpt_oss",
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        rope_theta=150000,
    ),
    "glm4": _config("glm4"),
}
_NAMES = {arch: key for key, arch in gguf.MODEL_ARCH_NAMES.items()}
_BF16 = ("gemma2", "gemma3", "glm4", "gpt-oss", "qwen35", "qwen35moe")


def model_of(config: Mapping[str, Any], weights: Mapping[str, Array] | None = None) -> Any:
    """mlx-lm's model in f32, with these weights or with those that it draws."""
    model_class, args_class = _get_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    if weights is not None:
        # As a loader does it: some models drop a head that the file ties to the embedding.
        arrays = {name: mx.array(values) for name, values in weights.items()}
        model.load_weights(
            list(model.sanitize(arrays).items() if hasattr(model, "sanitize") else arrays.items())
        )
    model.set_dtype(mx.float32)
    model.eval()
    return model


def drawn(arch: str, seed: int = 0) -> dict[str, Array]:
    """Random weights under mlx-lm's names, such that 16 bits of the family's dtype hold them exactly."""
    rng = np.random.default_rng(seed)
    dtype = mx.bfloat16 if arch in _BF16 else mx.float16
    found: dict[str, Array] = {}
    for name, array in tree_flatten(model_of(CONFIGS[arch]).parameters()):
        if name.endswith("lm_head.weight") and arch == "gemma3":
            continue
        noise = rng.standard_normal(array.shape)
        if name.endswith("A_log"):
            found[name] = np.log(rng.uniform(0.5, 8.0, array.shape)).astype(np.float32)
            continue
        values = noise * 0.05 if array.ndim > 1 else 1.0 + noise * 0.1
        if name.endswith("conv1d.weight"):
            values = noise * 0.5
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = noise * 0.1
        found[name] = np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))
    return found


def write(
    path: Path,
    arch: str,
    weights: Mapping[str, Array],
    encode: Encode,
    *,
    tensors_per_file: int = 0,
    **metadata: Any,
) -> Path:
    """The GGUF file of these weights.

    Args:
        tensors_per_file: how many lie in each of several files; 0 for one file.
        metadata: keys to add, as the writer's methods name them.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_file)
    _keys(writer, arch)
    _tokenizer(writer)
    for key, value in metadata.items():
        getattr(writer, key)(value)
    for name, values in tensors(arch, weights).items():
        kind, raw = encode(name, values)
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(name: str, values: Array) -> tuple[Kind, Array]:
    """An ``Encode`` that keeps everything as it is."""
    return Kind.F32, values.astype(np.float32)


def tensors(arch: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The file's tensors by its names, in its layout."""
    config = CONFIGS[arch]
    text = config.get("text_config", config)
    names = gguf.get_tensor_name_map(_NAMES[arch], text["num_hidden_layers"])
    found: dict[str, Array] = {}
    for name, values in weights.items():
        hf = name.replace(".switch_mlp.", ".experts.").removeprefix("language_model.")
        if hf.endswith("dt_bias"):
            hf = hf.replace("dt_bias", "dt_proj.bias")
        elif hf.endswith("sinks"):
            hf += ".weight"
        theirs = names.get_name(hf, (".weight", ".bias"))
        if theirs is None:
            raise AssertionError(f"llama.cpp has no name for {hf}")
        found[theirs] = _as_written(arch, name, values, text)
    if arch == "phi3":
        for kind in ("long", "short"):
            found[f"rope_factors_{kind}.weight"] = np.array(
                text["rope_scaling"][f"{kind}_factor"], np.float32
            )
    return found


def _as_written(arch: str, name: str, values: Array, text: Mapping[str, Any]) -> Array:
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = text["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        rest = values.shape[1:]
        return values.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(values.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if name.endswith("shared_expert_gate.weight"):
        return values.reshape(-1)
    if ".linear_attn." in name:
        return _tiled(name.rpartition(".linear_attn.")[2], values, text)
    return values


def _tiled(name: str, values: Array, text: Mapping[str, Any]) -> Array:
    """Heads of values in the order that broadcasts over the heads of keys."""
    keys, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    size = text["linear_value_head_dim"]
    first = 2 * keys * text["linear_key_head_dim"]

    def tile(part: Array, size: int) -> Array:
        return part.reshape(keys, heads // keys, size, -1).swapaxes(0, 1).reshape(part.shape)

    match name.partition(".")[0]:
        case "in_proj_qkv":
            return np.concatenate([values[:first], tile(values[first:], size)])
        case "conv1d":
            kernel = values[..., 0]
            return np.concatenate([kernel[:first], tile(kernel[first:], size)])
        case "in_proj_z":
            return tile(values, size)
        case "in_proj_a" | "in_proj_b" | "dt_bias":
            return tile(values, 1)
        case "A_log":
            return tile(-np.exp(values), 1)
        case "out_proj":
            return np.ascontiguousarray(tile(np.ascontiguousarray(values.T), size).T)
    return values


def _keys(writer: gguf.GGUFWriter, arch: str) -> None:
    text = CONFIGS[arch].get("text_config", CONFIGS[arch])
    rope = text.get("rope_parameters", {})
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", text.get("rope_theta", 10000.0)))
    if arch not in ("phi3", "qwen2", "qwen2moe"):
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
    share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if share is not None:
        writer.add_rope_dimension_count(int(share * text["head_dim"]))
    if (experts := text.get("num_experts", text.get("num_local_experts"))) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text.get("moe_intermediate_size", text["intermediate_size"]))
    if (shared := text.get("shared_expert_intermediate_size")) is not None:
        writer.add_expert_shared_feed_forward_length(shared)
    if arch in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(text["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
        writer.add_sliding_window(4096)
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if arch == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(128)
    if arch == "phi3":
        writer.add_sliding_window(0)
        writer.add_rope_scaling_orig_ctx_len(512)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(8) / np.log(512))))
    if arch.startswith("qwen35"):
        writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(text["linear_key_head_dim"])
        writer.add_ssm_group_count(text["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
        writer.add_ssm_inner_size(text["linear_num_value_heads"] * text["linear_value_head_dim"])
        writer.add_full_attention_interval(text["full_attention_interval"])
        writer.add_rope_dimension_sections([3, 3, 2, 0])


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)


def logits(model: Any, length: int = 48) -> Array:
    """f32 logits of a fixed text of ``length`` tokens: (length, vocabulary)."""
    tokens = np.random.default_rng(5).integers(0, 256, (1, length))
    return np.array(model(mx.array(tokens)).astype(mx.float32))[0]
