"""What image encoders of several families do alike. In shapes L is the number of patches, W the width."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

# Patches of one step of attention: all of a large image at once would take gigabytes.
QUERIES = 512


def activation(name: str) -> Any:
    """An activation function by the name that configs have for it. Raises ValueError."""
    known = {"silu": nn.silu, "gelu": nn.gelu, "gelu_pytorch_tanh": nn.gelu_approx}
    if name not in known:
        raise ValueError(f"unknown activation {name!r}")
    return known[name]


def by_heads(rows: mx.array, heads: int) -> mx.array:
    """(1, L, W) → (1, heads, L, W / heads)."""
    _, count, width = rows.shape
    return rows.reshape(1, count, heads, width // heads).transpose(0, 2, 1, 3)


def attended(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Attention in which each patch sees all others: three (1, heads, L, head) → (1, L, W)."""
    _, heads, count, head = q.shape
    found = [
        mx.fast.scaled_dot_product_attention(q[:, :, at : at + QUERIES], k, v, scale=head**-0.5)
        for at in range(0, count, QUERIES)
    ]
    return mx.concatenate(found, axis=2).transpose(0, 2, 1, 3).reshape(1, count, heads * head)
