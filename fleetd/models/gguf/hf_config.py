"""config.json, made from a GGUF file's metadata. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fleetd.models.gguf.families import FAMILIES, Family
from fleetd.models.gguf.refusals import corrupt, refuse_parts, unsupported


class FileFacts(msgspec.Struct, frozen=True):
    """The facts about the tensors that the config needs."""

    # The shape of each tensor, rows first.
    shapes: Mapping[str, tuple[int, ...]]
    # The values of those ``families.ROPE_TENSORS`` that the file has.
    rope: Mapping[str, Sequence[float]]

    @property
    def tied(self) -> bool:
        """True if the head is the embedding."""
        return "output.weight" not in self.shapes


def architecture(metadata: Mapping[str, Any], what: str) -> str:
    """The architecture that the file names. Raises ModelUnsupported if it is no model of a known family."""
    refuse_parts(metadata, what)
    found = metadata.get("general.architecture")
    if found not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise unsupported(what, f"is of the architecture {found!r}; GGUF import knows {known}.", metadata)
    return str(found)


class _Fields:
    """Reads numbers of one architecture from the metadata. Raises ModelCorrupt for one outside its bounds."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, what: str) -> None:
        self.metadata, self.arch, self.what = metadata, arch, what

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        found = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            raise corrupt(self.what, f"{self.arch}.{key} is {found!r}, not a number from {low} to {high}")
        return found

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        found = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(found, int | float) or not math.isfinite(found) or not low <= found <= high:
            raise corrupt(self.what, f"{self.arch}.{key} is {found!r}, not a number from {low} to {high}")
        # The file has f32: 9.999999747378752e-06 was written as 1e-05, and is the f32 nearest to both.
        return float(f"{found:.7g}")


def layers_of(metadata: Mapping[str, Any], what: str) -> int:
    """How many blocks the model has; a file may hold further ones that predict more tokens at once."""
    fields = _Fields(metadata, architecture(metadata, what), what)
    blocks = fields.whole("block_count", 1, 4096)
    return blocks - fields.whole("nextn_predict_layers", 0, blocks - 1, 0)


def build(metadata: Mapping[str, Any], facts: FileFacts, what: str) -> dict[str, Any]:
    """config.json without the quantisation part.

    Raises:
        ModelCorrupt: a value is missing or impossible.
        ModelUnsupported: mlx-lm or this import does not know this variant of the family.
    """
    arch = architecture(metadata, what)
    family, fields = FAMILIES[arch], _Fields(metadata, arch, what)
    hidden = fields.whole("embedding_length", 1, 1 << 20)
    heads = fields.whole("attention.head_count", 1, 4096)
    rotated = fields.whole("rope.dimension_count", 1, 4096, 0) if fields.get("rope.dimension_count") else None
    plain = arch in ("llama", "qwen2", "qwen3")
    head_dim = fields.whole("attention.key_length", 1, 4096, (plain and rotated) or hidden // heads)
    kv_heads = fields.whole("attention.head_count_kv", 1, 4096, heads)
    if heads % kv_heads or head_dim % 2 or (rotated is not None and (rotated % 2 or rotated > head_dim)):
        raise corrupt(what, f"{heads} heads over {kv_heads} KV heads of size {head_dim}, {rotated} rotated")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers_of(metadata, what),
        "intermediate_size": fields.whole("feed_forward_length", 0, 1 << 22, 0 if "moe" in arch else None),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "vocab_size": facts.shapes["token_embd.weight"][0],
        "max_position_embeddings": fields.whole("context_length", 1, 1 << 26),
        "rope_theta": fields.real("rope.freq_base", 1.0, 1e12, 10_000.0),
        "tie_word_embeddings": facts.tied and not family.own_head,
        "torch_dtype": "float16" if family.dtype == "F16" else "bfloat16",
    }
    scaling = _scaling(fields, family, facts, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if (own := _OWN.get(arch)) is not None:
        own(fields, facts, config, rotated or head_dim)
    return config


# ---- Positions -------------------------------------------------------------------------------------------


def _scaling(
    fields: _Fields, family: Family, facts: FileFacts, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if (divisors := facts.rope.get("rope_freqs.weight")) is not None:
        found = _llama3(divisors, config["rope_theta"], config["head_dim"])
        if found is None or "llama3" not in family.scalings:
            raise unsupported(fields.what, "carries RoPE divisors of no known recipe.", fields.metadata)
        return found
    if "rope_factors_long.weight" in facts.rope:
        return _longrope(fields, family, facts, config)
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind not in family.scalings:
        raise unsupported(fields.what, f"scales RoPE by {kind!r}, which cannot be imported.", fields.metadata)
    factor = fields.real("rope.scaling.factor", 1.0, 1024.0)
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if fields.real("rope.scaling.attn_factor", 0.0, 1e6, 1.0) != 1.0:
        raise unsupported(fields.what, "scales RoPE by a YaRN of its own.", fields.metadata)
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.whole("rope.scaling.original_context_length", 1, 1 << 26),
        "beta_fast": fields.real("rope.scaling.yarn_beta_fast", 0.1, 1e4, 32.0),
        "beta_slow": fields.real("rope.scaling.yarn_beta_slow", 0.1, 1e4, 1.0),
    }


def _longrope(fields: _Fields, family: Family, facts: FileFacts, config: Mapping[str, Any]) -> dict[str, Any]:
    long, short = facts.rope["rope_factors_long.weight"], facts.rope.get("rope_factors_short.weight")
    original = fields.whole("rope.scaling.original_context_length", 2, 1 << 26)
    factor = config["max_position_embeddings"] / original
    expected = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    stated = fields.real("rope.scaling.attn_factor", 0.0, 1e6, expected)
    known = "longrope" in family.scalings and math.isclose(stated, expected, rel_tol=1e-4)
    if short is None or not known:
        raise unsupported(fields.what, "scales RoPE by factors of no known recipe.", fields.metadata)
    return {
        "type": "longrope",
        "rope_type": "longrope",
        "long_factor": list(long),
        "short_factor": list(short),
        "original_max_position_embeddings": original,
    }


def _llama3(divisors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The published recipe with these divisors (factor 8: Llama 3.1 and 3.3; 32: Llama 3.2), or None."""
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
    return None


def llama3_divisors(recipe: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """The factor that slows each rotation frequency: 1 for short waves, the recipe's for long ones."""
    low, high, factor = recipe["low_freq_factor"], recipe["high_freq_factor"], recipe["factor"]
    context = recipe["original_max_position_embeddings"]
    divisors = []
    for pair in range(head_dim // 2):
        turns = context * theta ** (-2 * pair / head_dim) / (2 * math.pi)  # in the original context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (share + (1 - share) / factor))
    return divisors


# ---- Settings of single families ---------------------------------------------------------------------------

_Config = dict[str, Any]


def _llama(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    biased = "blk.0.attn_q.bias" in facts.shapes
    if biased != ("blk.0.attn_output.bias" in facts.shapes):
        raise unsupported(fields.what, "has biases in a part of its attention only.", fields.metadata)
    config |= {"attention_bias": biased, "mlp_bias": False}


def _gemma2(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    config["attn_logit_softcapping"] = fields.real("attn_logit_softcapping", 1e-3, 1e6, 50.0)
    config["final_logit_softcapping"] = fields.real("final_logit_softcapping", 1e-3, 1e6, 30.0)
    _gemma_scale(config, largest=46)


def _gemma3(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    if fields.get("final_logit_softcapping"):
        raise unsupported(fields.what, "caps its logits, which mlx-lm's Gemma 3 does not.", fields.metadata)
    window = fields.whole("attention.sliding_window", 0, 1 << 26, 0)
    pattern = fields.get("attention.sliding_window_pattern")
    config["sliding_window"] = window or config["max_position_embeddings"]
    # In all published sizes every sixth layer sees the whole text; without a window all layers do.
    config["sliding_window_pattern"] = (
        (pattern if type(pattern) is int and pattern > 0 else 6) if window else 1
    )
    config["rope_local_base_freq"] = fields.real("rope.freq_base_swa", 1.0, 1e12, 10_000.0)
    _gemma_scale(config, largest=62)


def _gemma_scale(config: _Config, *, largest: int) -> None:
    """Set the scale of queries, which the file lacks: the head's size, or in the largest model the mean."""
    mean = config["hidden_size"] // config["num_attention_heads"]
    is_largest = config["num_hidden_layers"] == largest
    config["query_pre_attn_scalar"] = mean if is_largest else config["head_dim"]


def _phi3(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    _head_of_hidden(fields, config)
    config["partial_rotary_factor"] = _share(rotated, config["head_dim"])
    scaling = config.get("rope_scaling")
    if scaling is not None:
        config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]


def _glm4(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    if fields.get("rope.dimension_sections") is not None:
        raise unsupported(fields.what, "is a GLM that reads images.", fields.metadata)
    config["attention_bias"] = "blk.0.attn_q.bias" in facts.shapes
    config["partial_rotary_factor"] = _share(rotated, config["head_dim"])


def _experts(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    experts = fields.whole("expert_count", 1, 4096)
    config["num_experts"] = experts
    config["num_experts_per_tok"] = fields.whole("expert_used_count", 1, experts)
    config["moe_intermediate_size"] = fields.whole(
        "expert_feed_forward_length", 1, 1 << 22, _rows(facts, "blk.0.ffn_gate_exps.weight")
    )


def _shared_expert(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    _experts(fields, facts, config, rotated)
    config["shared_expert_intermediate_size"] = fields.whole(
        "expert_shared_feed_forward_length", 1, 1 << 22, _rows(facts, "blk.0.ffn_gate_shexp.weight")
    )


def _qwen2moe(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    _shared_expert(fields, facts, config, rotated)
    _head_of_hidden(fields, config)


def _qwen3moe(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    _experts(fields, facts, config, rotated)
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


def _gpt_oss(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    experts = fields.whole("expert_count", 1, 4096)
    config["num_local_experts"] = experts
    config["num_experts_per_tok"] = fields.whole("expert_used_count", 1, experts)
    config["intermediate_size"] = fields.whole(
        "expert_feed_forward_length", 1, 1 << 22, config["intermediate_size"]
    )
    config["sliding_window"] = fields.whole("attention.sliding_window", 1, 1 << 26)
    layers = config["num_hidden_layers"]
    config["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


def _qwen35(fields: _Fields, facts: FileFacts, config: _Config, rotated: int) -> None:
    state = fields.whole("ssm.state_size", 1, 1 << 16)
    value_heads = fields.whole("ssm.time_step_rank", 1, 4096)
    key_heads = fields.whole("ssm.group_count", 1, 4096)
    inner = fields.whole("ssm.inner_size", 1, 1 << 24)
    if value_heads % key_heads or inner % value_heads:
        raise corrupt(fields.what, f"{value_heads} value heads of {inner} in all, over {key_heads} key heads")
    if "moe" in fields.arch:
        _shared_expert(fields, facts, config, rotated)
    rope = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta"),
        "partial_rotary_factor": _share(rotated, config["head_dim"]),
    }
    nested = {
        **{key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")},
        "model_type": f"{config['model_type']}_text",
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": state,
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": fields.whole("ssm.conv_kernel", 2, 64),
        "full_attention_interval": fields.whole("full_attention_interval", 1, 4096, 4),
        "rope_parameters": rope,
    }
    kept = {key: config[key] for key in ("architectures", "model_type", "tie_word_embeddings", "torch_dtype")}
    config.clear()
    config.update(kept, text_config=nested)


_OWN: dict[str, Callable[[_Fields, FileFacts, _Config, int], None]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}


def _head_of_hidden(fields: _Fields, config: _Config) -> None:
    """Raises ModelUnsupported if heads have not the size that mlx-lm derives for the family."""
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise unsupported(
            fields.what, f"has heads of {config['head_dim']}, unlike its family.", fields.metadata
        )


def _share(rotated: int, head_dim: int) -> float:
    """The part of a head that is rotated; times ``head_dim`` it gives ``rotated`` again, rounded down."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 2.0)


def _rows(facts: FileFacts, tensor: str) -> int | None:
    shape = facts.shapes.get(tensor)
    return shape[-2] if shape is not None and len(shape) > 1 else None
