"""BERT, RoBERTa and XLM-R: a token attends to all of its text, places have rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.vectors.blocks import activation, attention
from fleetd.engine.vectors.token_rows import Pass
from fleetd.models.vector_files import first_place

# Parts of the names in publishers' files, and those of the modules here.
_NAMES = (
    ("encoder.layer.", "layers."),
    (".attention.self.", ".attention."),
    (".attention.output.dense.", ".attention.out."),
    (".attention.output.LayerNorm.", ".attention_norm."),
    (".intermediate.dense.", ".up."),
    (".output.dense.", ".down."),
    (".output.LayerNorm.", ".norm."),
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
)


class BertAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def __call__(self, x: mx.array, texts: Pass) -> mx.array:
        q, k, v = (each(x).reshape(x.shape[0], self.heads, -1) for each in (self.query, self.key, self.value))
        found: mx.array = self.out(attention(q, k, v, texts, rope=None, window=0))
        return found


class BertLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        eps = config.get("layer_norm_eps", 1e-12)
        self.attention = BertAttention(width, config["num_attention_heads"])
        self.attention_norm = nn.LayerNorm(width, eps)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps)
        self.act: Any = activation(config.get("hidden_act", "gelu"))

    def __call__(self, x: mx.array, texts: Pass) -> mx.array:
        x = self.attention_norm(x + self.attention(x, texts))
        found: mx.array = self.norm(x + self.down(self.act(self.up(x))))
        return found


class BertEmbeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], width)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], width)
        self.token_type_embeddings = nn.Embedding(config.get("type_vocab_size", 2), width)
        self.LayerNorm = nn.LayerNorm(width, config.get("layer_norm_eps", 1e-12))
        self.first = first_place(config)

    def __call__(self, texts: Pass) -> mx.array:
        places = self.position_embeddings(texts.positions + self.first)
        one_kind = self.token_type_embeddings.weight.shape[0] == 1
        kinds = self.token_type_embeddings(mx.array([0]) if one_kind else texts.types)
        found: mx.array = self.LayerNorm(self.word_embeddings(texts.tokens) + places + kinds)
        return found


class Bert(nn.Module):  # type: ignore[misc]
    """States (T, width) of a pass's tokens."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise NotImplementedError("positions that are not absolute")
        self.embeddings = BertEmbeddings(config)
        self.layers = [BertLayer(config) for _ in range(config["num_hidden_layers"])]

    def __call__(self, texts: Pass) -> mx.array:
        x = self.embeddings(texts)
        for layer in self.layers:
            x = layer(x, texts)
            texts.between_layers(x)
        return x

    @staticmethod
    def cleaned(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return weights

    @staticmethod
    def renamed(name: str) -> str:
        """The name here of a tensor in publishers' files."""
        for part in ("bert.", "roberta.", "model."):
            name = name.removeprefix(part)
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        return name
