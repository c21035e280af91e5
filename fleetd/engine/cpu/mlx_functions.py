"""The functions and layers of MLX and mlx-lm that a CPU computes better in NumPy, and their replacements.

They know f32; what comes in another type, or with an argument that they do not know, is left to MLX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations, switch_layers

from fleetd.engine.cpu import computed, products, row_functions, windows
from fleetd.engine.cpu.computed import view
from fleetd.engine.cpu.rotary import rotation


def install() -> None:
    """Replace MLX's attention, RMS norm, rotary embedding, ``matmul`` and linear layers, and mlx-lm's
    ``swiglu`` and what its sliding windows hand out. Once, on a CPU device.

    Also turns off ``mx.compile``, which on a CPU runs the system's C++ compiler for half a second for every
    new constant (each ``top_p`` a client thinks of), and loads what it built from a well-known place in /tmp.
    """
    mx.disable_compile()
    mx.fast.scaled_dot_product_attention = _attention(mx.fast.scaled_dot_product_attention)
    mx.fast.rms_norm = _rms_norm(mx.fast.rms_norm)
    mx.fast.rope = _rope(mx.fast.rope)
    mx.matmul = _matmul(mx.matmul)
    stock_linear = nn.Linear.__call__

    def linear(self: nn.Linear, x: mx.array) -> mx.array:
        return products.row_stable(lambda rows: stock_linear(self, rows), x)

    stock_head = nn.Embedding.as_linear

    def head(self: nn.Embedding, x: mx.array) -> mx.array:
        return products.row_stable(lambda rows: stock_head(self, rows), x)

    nn.Linear.__call__ = linear
    nn.Embedding.as_linear = head
    windows.install()
    stock_swiglu = activations.swiglu
    activations.swiglu = switch_layers.swiglu = fast_swiglu = _swiglu(stock_swiglu)
    # Model modules import the function by name; those already imported hold the old one.
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "swiglu", None) is stock_swiglu:
            module.swiglu = fast_swiglu  # type: ignore[attr-defined]


def _matmul(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Products of many small matrices: on AMD's processors MKL adds in an order that depends on how far apart
    a matrix's rows lie, which in a view goes by how many tokens there are."""

    def matmul(a: mx.array, b: mx.array, **rest: Any) -> mx.array:
        if a.ndim > 2 and b.ndim > 2 and a.dtype == b.dtype == mx.float32:
            a, b = mx.contiguous(a), mx.contiguous(b)
        return stock(a, b, **rest)

    return matmul


def _attention(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: Any = None,
        **rest: Any,
    ) -> mx.array:
        known = sinks is None or sinks.dtype == mx.float32
        if known and not rest and q.dtype == k.dtype == v.dtype == mx.float32:
            # At once: each time that MLX is waited for takes longer than to add a row to a cache.
            mx.eval(q, k, v, mask, sinks)
            rows = view(mask) if isinstance(mask, mx.array) else mask
            of_head = None if sinks is None else view(sinks)
            out = products.scaled_dot_product_attention(view(q), view(k), view(v), scale, rows, of_head)
            if out is not None:
                return computed.array(out)
            if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] == q.shape[0] > 1:
                return _row_by_row(stock, q, k, v, scale, mask, sinks)
        return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)

    return attention


def _row_by_row(
    stock: Callable[..., mx.array],
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array,  # (B, H, T, S), added to the scores
    sinks: mx.array | None,
) -> mx.array:
    """Attention of several sequences, each without its left padding, which would move its sums: on AMD's
    processors MKL adds in another order then."""
    seen = view(mask) > np.finfo(np.float32).min
    starts = seen.any(axis=(1, 2)).argmax(axis=1).tolist()
    return mx.concatenate(
        [
            stock(
                q[b : b + 1],
                k[b : b + 1, :, at:],
                v[b : b + 1, :, at:],
                scale=scale,
                mask=mask[b : b + 1, ..., at:],
                sinks=sinks,
            )
            for b, at in enumerate(starts)
        ]
    )


def _rms_norm(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **rest: Any) -> mx.array:
        if rest or x.dtype != mx.float32 or (weight is not None and weight.dtype != mx.float32):
            return stock(x, weight, eps, **rest)
        return computed.array(row_functions.rms_norm(view(x), None if weight is None else view(weight), eps))

    return rms_norm


def _rope(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rope(
        x: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        **rest: Any,
    ) -> mx.array:
        if not rest and x.ndim == 4 and x.dtype == mx.float32:
            held = None if freqs is None else view(freqs.astype(mx.float32)).tobytes()
            at = view(offset) if isinstance(offset, mx.array) else offset
            out = rotation(dims, traditional, base, scale, held)(view(x), at)
            if out is not None:
                return computed.array(out)
        return stock(
            x,
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
            **rest,
        )

    return rope


def _swiglu(stock: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if gate.dtype != mx.float32 or x.dtype != mx.float32:
            return stock(gate, x)
        return computed.array(row_functions.swiglu(view(gate), view(x)))

    return swiglu
