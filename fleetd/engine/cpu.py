"""What makes MLX usable on a Linux CPU. On Metal and CUDA nothing in here does anything.

Stock MLX on a CPU links the reference BLAS, multiplies f16 and quantised weights without BLAS, and computes
``exp`` one element at a time. The cures, each measured by ``bench/prefill.py`` (see docs/benchmarks.md):

- ``preload_blas``: load MKL with RTLD_GLOBAL before the first ``import mlx.core``; its symbols then win.
- ``to_float32``: weights and activations in f32, quantised layers dequantised at load.
- ``scaled_dot_product_attention``: blocked causal attention in NumPy over zero-copy views.
- ``swiglu``: the same for the activation between the MLP's matrices.

Exactness: MKL runs in its strict reproducible mode, in which a row of a product has the same bits however
many rows are computed with it, from ``ROWS`` rows up. ``RowStableLinear`` pads to that, so an answer does not
depend on who else is in the batch, and a block of tokens gives the same bits as its tokens one by one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

F32 = npt.NDArray[np.float32]

# MKL's strict mode is bit-stable from four rows up; measured for every shape of the supported models by
# tests/engine/test_cpu.py, which fails if a new MKL changes it.
ROWS = 4
# Queries per block of attention. 128 rows of a few thousand f32 keys stay in the L2 cache.
BLOCK = 128
# Below this many queries each row is computed by itself, exactly as decode computes it.
FEW = 16
# Elements under which NumPy's fixed costs outweigh MLX's slow exp.
SWIGLU_MIN = 1 << 12

_blas: ctypes.CDLL | None = None


def preload_blas() -> bool:
    """Load MKL so that MLX's CPU backend uses it. Must run before ``import mlx.core``.

    Returns False where there is none (macOS uses Accelerate, CUDA needs none, ARM Linux has no MKL).
    """
    global _blas
    if sys.platform != "linux":
        return False
    if "mlx.core" in sys.modules:
        raise RuntimeError("preload_blas must run before mlx is imported")
    # Strict reproducibility costs nothing measurable and buys batch-independent bits. AVX2 exists wherever
    # MLX's wheels run; AVX512 would be 1.2x faster in prefill, so it is taken where the CPU has it.
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if "avx512vl" in flags else "AVX2,STRICT")
    for folder in (
        Path(sys.prefix) / "lib",
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/opt/intel/oneapi/mkl/latest/lib"),
    ):
        for library in sorted(folder.glob("libmkl_rt.so*"), reverse=True):
            try:
                _blas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return True
    return False


def install() -> None:
    """Replace MLX's attention and every mlx-lm module's ``swiglu``. Call once, after mlx is imported, on a CPU device."""
    import mlx.core as mx
    import mlx_lm.models.activations as activations
    import mlx_lm.models.switch_layers as switch_layers

    stock = mx.fast.scaled_dot_product_attention

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
        if sinks is not None or rest or q.dtype != mx.float32 or k.dtype != mx.float32:
            return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        out = scaled_dot_product_attention(
            _view(q),
            _view(k),
            _view(v),
            scale,
            mask if mask is None or isinstance(mask, str) else _view(mask),
        )
        return stock(q, k, v, scale=scale, mask=mask) if out is None else mx.array(out)

    stock_swiglu = activations.swiglu

    def fast_swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if gate.dtype != mx.float32 or gate.size < SWIGLU_MIN:
            return stock_swiglu(gate, x)
        return mx.array(swiglu(_view(gate), _view(x)))

    mx.fast.scaled_dot_product_attention = attention
    activations.swiglu = fast_swiglu
    switch_layers.swiglu = fast_swiglu
    # Model modules import the function by name; those already imported hold the old one.
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "swiglu", None) is stock_swiglu:
            module.swiglu = fast_swiglu  # type: ignore[attr-defined]


def to_float32(model: nn.Module) -> None:
    """Dequantise every quantised layer and cast all weights to f32, in place, layer by layer."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path

    def plain(_: str, layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.QuantizedLinear):
            weight = mx.dequantize(
                layer.weight,
                layer.scales,
                layer.get("biases"),
                group_size=layer.group_size,
                bits=layer.bits,
                mode=layer.mode,
            ).astype(mx.float32)
            linear = nn.Linear(1, 1, bias="bias" in layer)
            linear.weight = weight
            if "bias" in layer:
                linear.bias = layer.bias
            mx.eval(linear.parameters())
            return linear
        if isinstance(layer, nn.QuantizedEmbedding):
            weight = mx.dequantize(
                layer.weight,
                layer.scales,
                layer.get("biases"),
                group_size=layer.group_size,
                bits=layer.bits,
                mode=layer.mode,
            ).astype(mx.float32)
            embedding = nn.Embedding(1, 1)
            embedding.weight = weight
            mx.eval(embedding.parameters())
            return embedding
        return layer

    model.update_modules(tree_map_with_path(plain, model.leaf_modules(), is_leaf=nn.Module.is_module))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def _view(array: mx.array) -> npt.NDArray[Any]:
    """An MLX array's memory as NumPy, without a copy; evaluates it."""
    return np.array(array, copy=False)


def scaled_dot_product_attention(
    q: F32, k: F32, v: F32, scale: float, mask: npt.NDArray[Any] | str | None
) -> F32 | None:
    """softmax(scale · q kᵀ + mask) v in blocks of queries.

    Args:
        q: (B, H, T, D); k: (B, K, S, D); v: (B, K, S, Dv); H a multiple of K, all f32.
        mask: None, "causal" (query t sees keys up to S - T + t), or a bool array broadcastable to (B, 1, T, S).

    Returns:
        (B, H, T, Dv), or None where the mask is of a kind this does not know; the caller then uses stock MLX.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    G = H // K
    out = np.empty((B, H, T, v.shape[3]), dtype=np.float32)
    if isinstance(mask, np.ndarray):
        if mask.dtype != np.bool_ or mask.ndim not in (2, 4) or (mask.ndim == 4 and mask.shape[1] != 1):
            return None
        if mask.ndim == 2:
            mask = mask[None, None]
        rows = np.broadcast_to(mask, (B, 1, T, S))[:, 0]
    else:
        rows = None
    for b in range(B):
        qb = q[b].reshape(K, G, T, D)
        ob = out[b].reshape(K, G, T, -1)
        start = 0
        window: npt.NDArray[np.bool_] | None = None
        if rows is not None:
            visible = rows[b]
            # Left padding (a batch of unequal lengths): drop the padding instead of masking it, so that the
            # row is computed from the same numbers in the same order as if it were alone.
            start = int(visible[-1].argmax())
            if not _is_causal(visible[:, start:], T):
                window = visible[:, start:]
        kb, vb = k[b, :, start:], v[b, :, start:]
        causal = mask is not None
        step = 1 if T <= FEW else BLOCK
        for t in range(0, T, step):
            n = min(step, T - t)
            end = kb.shape[1] - T + t + n if causal and window is None else kb.shape[1]
            _block(
                qb[:, :, t : t + n],
                kb[:, :end],
                vb[:, :end],
                scale,
                ob[:, :, t : t + n],
                causal and window is None,
                None if window is None else window[t : t + n],
            )
    return out


def _is_causal(visible: npt.NDArray[np.bool_], T: int) -> bool:
    """Whether a (T, S) mask is plain causal: row t sees the first S - T + t + 1 keys."""
    S = visible.shape[1]
    if T == 1:
        return bool(visible.all())
    return (
        bool((visible.sum(axis=1) == np.arange(S - T + 1, S + 1)).all())
        and bool(visible[:, 0].all())
        and bool(visible[-1].all())
    )


def _block(
    q: F32, k: F32, v: F32, scale: float, out: F32, causal: bool, visible: npt.NDArray[np.bool_] | None
) -> None:
    """One block: q (K, G, n, D), k (K, S, D), v (K, S, Dv) → out (K, G, n, Dv), in place.

    With ``causal`` the last of the n queries sees all S keys.
    """
    K, G, n, D = q.shape
    S = k.shape[1]
    scores = (q * np.float32(scale)).reshape(K, G * n, D) @ k.transpose(0, 2, 1)  # (K, G·n, S)
    if causal and n > 1:
        # Only the last n columns can be invisible to any query of the block.
        hidden = np.triu(np.ones((n, n), dtype=np.bool_), 1)
        scores.reshape(K, G, n, S)[..., S - n :][..., hidden] = -np.inf
    elif visible is not None:
        scores.reshape(K, G, n, S)[..., ~visible] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    result = scores @ v
    result /= total
    out[...] = result.reshape(K, G, n, -1)


def swiglu(gate: F32, x: F32) -> F32:
    """silu(gate) · x, elementwise."""
    out = np.negative(gate)
    # exp overflows to inf for very negative gates, which is the right limit: silu → -0.
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1.0
    np.divide(gate, out, out=out)
    out *= x
    return out
