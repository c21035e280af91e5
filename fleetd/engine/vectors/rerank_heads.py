"""What makes one number of the states of a query and a document: the higher, the better they fit.

sequence classifiers   the first token's state (ModernBERT: or the mean), a layer, and one row of weights
Qwen3-Reranker         the last token's state, and by how much "yes" comes before "no"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from fleetd.engine.vectors.blocks import activation
from fleetd.engine.vectors.pooling import F32, pooled
from fleetd.engine.vectors.token_rows import Pass


class ClassifierHead(nn.Module):  # type: ignore[misc]
    """The head of a sequence classifier with one label."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, modern = config["hidden_size"], config["model_type"] == "modernbert"
        self.dense = nn.Linear(width, width, bias=config.get("classifier_bias", False) if modern else True)
        self.act: Any = activation(config.get("classifier_activation", "gelu") if modern else "tanh")
        norm = nn.LayerNorm(width, config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False))
        self.norm = norm if modern else nn.Identity()
        self.score = nn.Linear(width, 1)
        self.mean = modern and config.get("classifier_pooling", "cls") == "mean"

    def __call__(self, states: mx.array, texts: Pass) -> F32:
        first = mx.array(pooled(states, texts, "mean" if self.mean else "cls"))
        inner = self.norm(self.act(self.dense(first.astype(states.dtype))))
        return products_with(inner, self.score.weight) + np.float32(self.score.bias.item())

    @staticmethod
    def renamed(name: str) -> str:
        """The name here of a tensor of a head in publishers' files; "" if it is of none."""
        for theirs, ours in (
            ("bert.pooler.dense.", "dense."),
            ("classifier.dense.", "dense."),
            ("head.dense.", "dense."),
            ("head.norm.", "norm."),
            ("classifier.out_proj.", "score."),
            ("classifier.", "score."),
        ):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return ""


class YesNoHead:
    """How much likelier a decoder's next token is "yes" than "no", as a logit."""

    def __init__(self, rows: mx.array) -> None:
        """``rows``: those of "yes" and of "no" in the head's weights, (2, width)."""
        yes, no = rows.astype(mx.float32)
        self.weight = (yes - no)[None]

    def __call__(self, states: mx.array, texts: Pass) -> F32:
        return products_with(mx.array(pooled(states, texts, "last")), self.weight)


def products_with(rows: mx.array, weight: mx.array) -> F32:
    """The products (n,) of rows (n, width) with one row of weights: each depends on its row alone, where a
    matrix product with one column adds in an order of its own."""
    numbers = np.array(rows.astype(mx.float32)) * np.array(weight.astype(mx.float32))
    found: F32 = np.add.reduce(numbers, axis=-1)
    return found
