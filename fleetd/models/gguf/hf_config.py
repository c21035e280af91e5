"""A GGUF file's architecture as config.json, and its tensors' names as mlx-lm has them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fleetd.errors import ModelCorrupt, ModelUnsupported

#: general.architecture → (class name, rows of q and k are interleaved for RoPE by the writer)
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
}

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.(weight|bias)")
#: Per-frequency divisors of Llama 3's long-context RoPE: the recipe is recognised, not stored.
ROPE_FREQUENCIES = "rope_freqs.weight"


def architecture(metadata: Mapping[str, Any], what: str) -> str:
    found = metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise ModelUnsupported(
            f"{what} is of the architecture {found!r}; GGUF import knows {', '.join(sorted(ARCHITECTURES))}.",
            hint="Take the same model from the hub instead: fleetctl models pull ORGANISATION/NAME.",
        )
    return str(found)


def module_of(tensor: str, layers: int) -> tuple[str, str] | None:
    """The module and parameter a tensor belongs to, or None for one that no supported model has."""
    stem, _, leaf = tensor.rpartition(".")
    if stem in _OUTER and leaf in ("weight", "bias"):
        return _OUTER[stem], leaf
    match = _BLOCK.fullmatch(tensor)
    if match and int(match[1]) < layers and match[2] in _INNER:
        return f"model.layers.{int(match[1])}.{_INNER[match[2]]}", match[3]
    return None


def build(
    metadata: Mapping[str, Any],
    *,
    embedding_rows: int,
    tied: bool,
    biased: bool,
    rope_divisors: Sequence[float] | None,
    what: str,
) -> dict[str, Any]:
    """config.json without the quantisation part.

    Raises:
        ModelCorrupt: a value is missing or impossible.
        ModelUnsupported: positions are encoded in a way this import does not know.
    """
    arch = architecture(metadata, what)

    def whole(key: str, low: int, high: int, default: int | None = None) -> int:
        found = metadata.get(f"{arch}.{key}", default)
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            raise _corrupt(what, f"{arch}.{key} is {found!r}, not a number from {low} to {high}")
        return found

    def real(key: str, low: float, high: float, default: float | None = None) -> float:
        found = metadata.get(f"{arch}.{key}", default)
        if not isinstance(found, int | float) or not math.isfinite(found) or not low <= found <= high:
            raise _corrupt(what, f"{arch}.{key} is {found!r}, not a number from {low} to {high}")
        # Stored as f32: 9.999999747378752e-06 was written as 1e-05, and is f32's nearest to both.
        return float(f"{found:.7g}")

    hidden = whole("embedding_length", 1, 1 << 20)
    heads = whole("attention.head_count", 1, 4096)
    head_dim = whole("attention.key_length", 1, 4096, whole("rope.dimension_count", 1, 4096, hidden // heads))
    kv_heads = whole("attention.head_count_kv", 1, 4096, heads)
    if heads % kv_heads or head_dim % 2:
        raise _corrupt(what, f"{heads} heads over {kv_heads} KV heads of size {head_dim}")
    context = whole("context_length", 1, 1 << 26)
    theta = real("rope.freq_base", 1.0, 1e12, 10_000.0)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch][0]],
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": whole("block_count", 1, 4096),
        "intermediate_size": whole("feed_forward_length", 1, 1 << 22),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "vocab_size": embedding_rows,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
    }
    if arch == "llama":
        config |= {"attention_bias": biased, "mlp_bias": False}
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if rope_divisors is not None:
        config["rope_scaling"] = _llama3(rope_divisors, theta, head_dim, what)
    elif scaling == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": real("rope.scaling.factor", 1.0, 1024.0)}
    elif scaling != "none":
        raise ModelUnsupported(
            f"{what} scales RoPE by {scaling!r}, which cannot be imported.",
            hint="Take the same model from the hub instead: fleetctl models pull ORGANISATION/NAME.",
        )
    return config


def _llama3(divisors: Sequence[float], theta: float, head_dim: int, what: str) -> dict[str, Any]:
    """The published recipe whose divisors are these: 8 in Llama 3.1 and 3.3, 32 in Llama 3.2."""
    for factor in (8.0, 32.0):
        recipe = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = llama3_divisors(recipe, theta, head_dim)
        if len(expected) == len(divisors) and all(
            math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, divisors, strict=True)
        ):
            return recipe
    raise ModelUnsupported(
        f"{what} carries RoPE divisors of no known recipe.",
        hint="Take the same model from the hub instead: fleetctl models pull ORGANISATION/NAME.",
    )


def llama3_divisors(recipe: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """How much each rotation frequency is slowed: not at all for short waves, fully for long ones."""
    low, high, factor = recipe["low_freq_factor"], recipe["high_freq_factor"], recipe["factor"]
    context = recipe["original_max_position_embeddings"]
    divisors = []
    for pair in range(head_dim // 2):
        turns = context * theta ** (-2 * pair / head_dim) / (2 * math.pi)  # in the original context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (share + (1 - share) / factor))
    return divisors


def _corrupt(what: str, why: str) -> ModelCorrupt:
    return ModelCorrupt(f"{what} is not a sound GGUF file: {why}.", hint="Download the file again.")
