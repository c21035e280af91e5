"""ModernBERT: places turn queries and keys, and most layers see only what is near."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.vectors.blocks import activation, attention
from fleetd.engine.vectors.token_rows import Pass


def _norm(config: Mapping[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(
        config["hidden_size"], config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False)
    )


class ModernAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any], *, near: bool) -> None:
        super().__init__()
        width, bias = config["hidden_size"], config.get("attention_bias", False)
        self.heads = config["num_attention_heads"]
        self.Wqkv, self.Wo = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.rope = nn.RoPE(width // self.heads, base=_base(config, near=near))
        self.window = config.get("local_attention", 128) // 2 if near else 0

    def __call__(self, x: mx.array, texts: Pass) -> mx.array:
        q, k, v = self.Wqkv(x).reshape(x.shape[0], 3, self.heads, -1).transpose(1, 0, 2, 3)
        found: mx.array = self.Wo(attention(q, k, v, texts, rope=self.rope, window=self.window))
        return found


def _base(config: Mapping[str, Any], *, near: bool) -> float:
    """What the angles of places are powers of: older configs name it apart, newer ones for each kind."""
    kind = "sliding_attention" if near else "full_attention"
    told = (config.get("rope_parameters") or {}).get(kind) or {}
    older = config.get("local_rope_theta", 10_000.0) if near else config.get("global_rope_theta", 160_000.0)
    if told.get("rope_type", "default") != "default":
        raise NotImplementedError(f"rope of type {told['rope_type']}")
    return float(told.get("rope_theta") or older)


class ModernMlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner, bias = config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        self.Wi, self.Wo = nn.Linear(width, 2 * inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.act: Any = activation(config.get("hidden_activation", "gelu"))

    def __call__(self, x: mx.array) -> mx.array:
        inner, gate = mx.split(self.Wi(x), 2, axis=-1)
        found: mx.array = self.Wo(self.act(inner) * gate)
        return found


class ModernLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any], index: int, *, near: bool) -> None:
        super().__init__()
        # The norm of the embeddings stands before the first layer already.
        self.attn_norm = _norm(config) if index else nn.Identity()
        self.attn = ModernAttention(config, near=near)
        self.mlp_norm = _norm(config)
        self.mlp = ModernMlp(config)

    def __call__(self, x: mx.array, texts: Pass) -> mx.array:
        x = x + self.attn(self.attn_norm(x), texts)
        found: mx.array = x + self.mlp(self.mlp_norm(x))
        return found


class ModernEmbeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.norm = _norm(config)


class ModernBert(nn.Module):  # type: ignore[misc]
    """States (T, width) of a pass's tokens."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embeddings = ModernEmbeddings(config)
        self.layers = [ModernLayer(config, index, near=near) for index, near in enumerate(_near(config))]
        self.final_norm = _norm(config)

    def __call__(self, texts: Pass) -> mx.array:
        x = self.embeddings.norm(self.embeddings.tok_embeddings(texts.tokens))
        for layer in self.layers:
            x = layer(x, texts)
            texts.between_layers(x)
        found: mx.array = self.final_norm(x)
        return found

    @staticmethod
    def cleaned(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return weights

    @staticmethod
    def renamed(name: str) -> str:
        """The name here of a tensor in publishers' files."""
        return name.removeprefix("model.")


def _near(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer sees only what is near."""
    if kinds := config.get("layer_types"):
        return [kind == "sliding_attention" for kind in kinds]
    every = config.get("global_attn_every_n_layers", 3)
    return [index % every != 0 for index in range(config["num_hidden_layers"])]
