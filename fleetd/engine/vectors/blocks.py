"""What the encoders are built of: attention over texts of a pass, and what stands between products."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.cpu import computed, products
from fleetd.engine.cpu.computed import view
from fleetd.engine.vectors.token_rows import Pass, by_run, joined


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, texts: Pass, *, rope: nn.RoPE | None, window: int
) -> mx.array:
    """Each token attends to all of its own text.

    Args:
        queries, keys, values: (T, heads, D).
        rope: what turns queries and keys by their places, if anything does.
        window: 0, or how far on both sides a token sees.

    Returns:
        (T, heads · D)
    """
    parts = []
    for run in texts.runs:
        q, k, v = (by_run(each, run).transpose(0, 2, 1, 3) for each in (queries, keys, values))
        if rope is not None:
            q, k = rope(q), rope(k)
        mask = texts.near(run.length, window) if 0 < window < run.length - 1 else None
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
        parts.append(out.transpose(0, 2, 1, 3).reshape(run.texts, run.length, -1))
    return joined(parts)


def gelu(x: mx.array) -> mx.array:
    """x · Φ(x), by the error function: MLX takes 60 times as long for it on a CPU."""
    if (
        x.dtype == mx.float32
        and mx.default_device() == mx.cpu
        and (out := products.gelu(view(x))) is not None
    ):
        return computed.array(out)
    found: mx.array = nn.gelu(x)
    return found


def activation(name: str) -> object:
    """A function by its name in a config. Raises ValueError for one that is not known."""
    known = {"gelu": gelu, "gelu_new": nn.gelu_approx, "gelu_pytorch_tanh": nn.gelu_approx, "relu": nn.relu}
    known |= {"silu": nn.silu, "tanh": mx.tanh, "identity": lambda x: x}
    if name not in known:
        raise ValueError(f"{name!r} is not a known activation")
    return known[name]
