"""What makes MLX usable on a Linux CPU. On Metal and CUDA nothing in here does anything.

Stock MLX on a CPU links the reference BLAS, multiplies f16 and quantised weights without BLAS, and computes
``exp`` one element at a time. The cures, measured by ``python -m bench prefill`` (see docs/benchmarks.md):

- ``preload_blas``: load MKL with RTLD_GLOBAL before the first ``import mlx.core``; its symbols then win.
- ``to_float32``: weights and activations in f32, quantised layers dequantised at load.
- ``scaled_dot_product_attention``: blocked causal attention in NumPy over zero-copy views.

``mlx_functions.install`` puts attention, and what else stands between products, in place of MLX's.

Exactness: MKL runs in its strict reproducible mode, in which one row of a product has the same bits however
many rows are computed with it, from ``ROWS`` rows and ``COLUMNS`` columns up, and zeros at either end of a
sum change nothing. Everything here keeps to those bounds by padding. So a token's numbers depend on the
tokens before it and on nothing else: not on who shares the batch, not on where a prompt was cut into chunks,
not on whether its tokens came one by one or as a block. ``tests/engine/test_cpu.py`` holds MKL to it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from fleetd.hardware.facts import text
from fleetd.hardware.probe import cores

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

F32 = npt.NDArray[np.float32]

# Below these MKL switches to kernels that add in another order; a single product (one key head) needs more
# columns than a batch of them.
ROWS = 4
COLUMNS = 32
# Queries per block of attention: few enough that a block's scores stay near the core that computes them. A
# block of LEAST_BLOCK takes up to a fifth longer for each query than a whole one.
BLOCK, LEAST_BLOCK = 64, 16
# Multiplications of one attention from which MKL's threads share its products. They spin for a while after
# each, so a small one costs other processes more than it gains.
SHARED_WORK = 1 << 22
# Sums over keys are formed in pieces of this length, one after the other, from the first key that a query
# sees: MKL adds up to RUN terms in one run, and splits longer sums in a way that depends on their length.
# Zeros at either end of a run change nothing, so queries whose first keys differ by up to the rest of a run
# are multiplied together.
PIECE, RUN = 160, 192
# Goes up with whatever changes what these sums come to: fingerprints of layers are of few tokens.
SUMS = b"3"

_blas: ctypes.CDLL | None = None
_threads: ThreadPoolExecutor | None = None
_thread_count = 1


def preload_blas() -> bool:
    """Load MKL so that MLX's CPU backend uses it. Must run before ``import mlx.core``.

    Returns False if there is none: macOS has Accelerate, CUDA needs none, for ARM Linux there is no MKL.
    """
    global _blas
    if sys.platform != "linux":
        return False
    if "mlx.core" in sys.modules:
        raise RuntimeError("preload_blas must run before mlx is imported")
    # The strict mode exists per instruction set and must be chosen before the first product.
    # Its threads spin for 200 ms after each product by default, which slows whatever comes between products.
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    flags = text(Path("/proc/cpuinfo"))
    os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if "avx512vl" in flags else "AVX2,STRICT")
    for folder in (Path(sys.prefix) / "lib", Path("/opt/intel/oneapi/mkl/latest/lib")):
        for library in sorted(folder.glob("libmkl_rt.so*"), reverse=True):
            try:
                _blas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            i, f, p = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
            _blas.cblas_sgemm_batch_strided.argtypes = [i, i, i, i, i, i, f, p, i, i, p, i, i, f, p, i, i, i]
            _blas.cblas_sgemm_batch_strided.restype = None
            _blas.MKL_Set_Num_Threads_Local.argtypes = [i]
            _blas.vsErf.argtypes, _blas.vsErf.restype = [i, p, p], None
            _start_threads(_blas)
            return True
    return False


def exact() -> bool:
    """True if the exactness that the module speaks of is there: it is MKL's."""
    return _blas is not None


def _start_threads(blas: ctypes.CDLL) -> None:
    """One thread per core for attention's blocks; each multiplies alone, so that they do not crowd."""
    global _threads, _thread_count
    threads = int(os.environ.get("MKL_NUM_THREADS") or cores())
    if threads > 1:
        _thread_count = threads
        _threads = ThreadPoolExecutor(
            threads, "attention", initializer=blas.MKL_Set_Num_Threads_Local, initargs=(1,)
        )


def row_stable(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """``product(x)`` for x (..., N), computed with at least ROWS rows."""
    import mlx.core as mx

    rows = x.size // x.shape[-1]
    if rows >= ROWS:
        return product(x)
    padded = mx.concatenate([x.reshape(rows, -1), mx.zeros((ROWS - rows, x.shape[-1]), dtype=x.dtype)])
    out = product(padded)[:rows]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def to_float32(model: nn.Module) -> None:
    """Dequantise every quantised layer and cast all weights to f32, in place, layer by layer."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map_with_path

    def plain(_: str, layer: nn.Module) -> nn.Module:
        if not isinstance(layer, _quantised()):
            return layer
        result = _plain(layer)
        result.weight = dequantized(layer)
        if "bias" in layer:
            result.bias = layer.bias
        mx.eval(result.parameters())
        return result

    model.update_modules(tree_map_with_path(plain, model.leaf_modules(), is_leaf=nn.Module.is_module))
    model.set_dtype(mx.float32)
    # One after the other, so that few are in memory in two types at a time.
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)


def _quantised() -> tuple[type[nn.Module], ...]:
    """Layers that ``to_float32`` unpacks."""
    import mlx.nn as nn

    return (
        *(nn.QuantizedLinear, nn.QuantizedEmbedding),
        # Of a model whose layers are divided between ranks.
        *(nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear),
    )


def _plain(layer: Any) -> Any:
    """What computes with the unpacked weights of a quantised layer; it has one weight of no meaning."""
    import mlx.nn as nn

    match layer:
        case nn.QuantizedEmbedding():
            return nn.Embedding(1, 1)
        case nn.QuantizedAllToShardedLinear():
            return nn.AllToShardedLinear(1, layer.group.size(), "bias" in layer, layer.group)
        case nn.QuantizedShardedToAllLinear():
            return nn.ShardedToAllLinear(layer.group.size(), 1, "bias" in layer, layer.group)
    return nn.Linear(1, 1, bias="bias" in layer)


def dequantized(layer: Any) -> mx.array:
    """The weights of a quantised layer in f32."""
    import mlx.core as mx

    from fleetd.engine.cpu.dequantize import dequantizing

    rows, groups = layer.scales.shape
    weight = mx.zeros((rows, groups * layer.group_size))
    mx.eval(weight, layer.parameters())
    # What is written to the view is written to the array.
    if tasks := dequantizing(layer, _view(weight)):
        _all(tasks, wide=True)
        return weight
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    ).astype(mx.float32)


def float32_bytes(model: nn.Module) -> int:
    """Bytes that the weights take after ``to_float32``; reads none of them."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    layers = [layer for _, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)]
    plain = [layer for layer in layers if isinstance(layer, _quantised())]
    found: int = sum(int(layer.weight.nbytes) * 32 // int(layer.bits) for layer in plain)
    gone = {id(layer[part]) for layer in plain for part in ("weight", "scales", "biases") if part in layer}
    for _, array in tree_flatten(model.parameters()):
        if id(array) not in gone:
            found += int(4 * array.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes)
    return found


def _view(array: mx.array) -> npt.NDArray[Any]:
    """An MLX array's memory as NumPy, without a copy; evaluates it."""
    return np.array(array, copy=False)


def scaled_dot_product_attention(
    q: F32, k: F32, v: F32, scale: float, mask: npt.NDArray[Any] | str | None, sinks: F32 | None = None
) -> F32 | None:
    """softmax(scale · q kᵀ + mask) v in blocks of queries.

    Args:
        q: (B, H, T, D); k: (B, K, S, D); v: (B, K, S, Dv); H a multiple of K, all f32.
        mask: None, "causal" (query t sees keys up to S - T + t), or bool, broadcastable to (B, 1, T, S).
        sinks: (H,), the score of a key that every query of a head sees, whose value is zero.

    Returns:
        (B, H, T, Dv), or None if the mask is of a kind this does not know; the caller then uses stock MLX.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    out = np.empty((B, H, T, v.shape[3]), dtype=np.float32)
    rows: npt.NDArray[np.bool_] | None = None
    if isinstance(mask, np.ndarray):
        if mask.dtype != np.bool_ or mask.ndim not in (2, 4) or (mask.ndim == 4 and mask.shape[1] != 1):
            return None
        rows = np.broadcast_to(mask if mask.ndim == 4 else mask[None, None], (B, 1, T, S))[:, 0]
    tasks: list[Callable[[], None]] = []
    size = block_size(T, _thread_count)
    sinks = None if sinks is None else sinks.reshape(K, H // K, 1, 1)
    for b in range(B):
        start, visible, first = 0, None, None
        if rows is not None:
            # Left padding (a batch of unequal lengths): drop it instead of masking it, so that the row is
            # computed from the same numbers in the same order as if it were alone. What no query sees is
            # padding; with a sliding window the last query alone sees less than the ones before it.
            start = int(rows[b].any(axis=0).argmax())
            visible = rows[b, :, start:]
            if (first := _first_seen(visible)) is not None:
                visible = None
        qb = q[b].reshape(K, H // K, T, D)
        ob = out[b].reshape(K, H // K, T, -1)
        kb, vb = k[b, :, start:], v[b, :, start:]
        causal = mask is not None and visible is None
        t = 0
        while t < T:
            n = min(size, T - t)
            begin, firsts = 0, None
            if first is not None and first[-1]:
                # A sliding window: each query's sums begin at the first key that it sees itself.
                begin = int(first[t])
                n = int(np.searchsorted(first[t : t + n], begin + RUN - PIECE, side="right"))
                if first[t + n - 1] > begin:
                    firsts = first[t : t + n] - begin
            end = kb.shape[1] - T + t + n if causal else kb.shape[1]
            tasks.append(
                partial(
                    _block,
                    qb[:, :, t : t + n],
                    kb[:, begin:end],
                    vb[:, begin:end],
                    scale,
                    ob[:, :, t : t + n],
                    causal=causal,
                    visible=None if visible is None else visible[t : t + n],
                    firsts=firsts,
                    sinks=sinks,
                )
            )
            t += n
    if _blas is not None:
        # Of this thread; 0 stands for as many as the process has.
        _blas.MKL_Set_Num_Threads_Local(0 if B * T * H * S * D >= SHARED_WORK else 1)
    _all(tasks, wide=T >= BLOCK)
    return out


def block_size(queries: int, threads: int) -> int:
    """Queries per block, such that no thread waits for another one's last block: three blocks of 64 take two
    threads as long as four. How queries are divided changes no number."""
    if queries < BLOCK:
        return BLOCK
    blocks = -(-queries // BLOCK)
    even = -(-blocks // threads) * threads
    return max(LEAST_BLOCK, -(-queries // even))


def _all(tasks: list[Callable[[], None]], *, wide: bool) -> None:
    """Run independent blocks, on all cores where they are large enough to be worth handing over."""
    if len(tasks) < 2 or not wide or _threads is None:
        for task in tasks:
            task()
        return
    for done in [_threads.submit(task) for task in tasks]:
        done.result()


def _first_seen(visible: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """The first key (T,) that each query of a (T, S) mask sees, if it sees all from there to its own, query t
    the first S - T + t + 1, and none sees keys that one before it does not; else None."""
    T, S = visible.shape
    first = visible.argmax(axis=1)
    if T == 1:
        return first if visible[0, int(first[0]) :].all() else None
    at = np.arange(S)
    band = (at >= first[:, None]) & (at <= np.arange(S - T, S)[:, None])
    return first if np.array_equal(visible, band) and bool((np.diff(first) >= 0).all()) else None


def _block(
    q: F32,
    k: F32,
    v: F32,
    scale: float,
    out: F32,
    *,
    causal: bool,
    visible: npt.NDArray[np.bool_] | None,
    firsts: npt.NDArray[np.int64] | None,
    sinks: F32 | None,
) -> None:
    """One block: q (K, G, n, D), k (K, S, D), v (K, S, Dv) → out (K, G, n, Dv), in place.

    With ``causal`` the last of the n queries sees all S keys, but for those before the first that each of
    them sees, ``firsts`` (n,), which ascend from 0 to at most RUN - PIECE. ``sinks``: (K, G, 1, 1).
    """
    K, G, n, D = q.shape
    S = k.shape[1]
    rows = max(ROWS, G * n)
    queries = np.zeros((K, rows, D), dtype=np.float32)
    np.multiply(q, np.float32(scale), out=queries[:, : G * n].reshape(K, G, n, D))
    spread = 0 if firsts is None else int(firsts[-1])
    whole = -(-S // PIECE) * PIECE
    # With room for ``_from_first``.
    width = whole + spread
    scores = np.empty((K, rows, width), dtype=np.float32)
    scores[..., S:] = -np.inf
    if S < COLUMNS:
        k = np.concatenate([k, np.zeros((K, COLUMNS - S, D), dtype=np.float32)], axis=1)
        v = np.concatenate([v, np.zeros((K, COLUMNS - S, v.shape[2]), dtype=np.float32)], axis=1)
        _product(queries, k, scores[..., :COLUMNS], transposed=True)
        scores[..., S:COLUMNS] = -np.inf
    else:
        _product(queries, k, scores[..., :S], transposed=True)
    by_query = scores[:, : G * n].reshape(K, G, n, width)
    if causal and n > 1:
        # Only the last n columns can be invisible to any query of the block.
        by_query[..., S - n : S][..., np.triu(np.ones((n, n), dtype=np.bool_), 1)] = -np.inf
    elif visible is not None:
        by_query[..., :S][..., ~visible] = -np.inf
    if firsts is not None:
        # And the first few.
        by_query[..., :spread][..., np.arange(spread) < firsts[:, None]] = -np.inf
    peak = np.maximum.reduce(scores, axis=-1, keepdims=True)
    if sinks is not None:
        of_query = peak[:, : G * n].reshape(K, G, n, 1)
        np.maximum(of_query, sinks, out=of_query)
    scores -= peak
    np.exp(scores, out=scores)
    weights = scores if firsts is None else _from_first(by_query, firsts, whole)
    pieces = np.add.reduce(weights.reshape(*weights.shape[:-1], whole // PIECE, PIECE), axis=-1)
    total = np.add.accumulate(pieces, axis=-1)[..., -1:]
    total = total[:, : G * n].reshape(K, G, n, 1) if firsts is None else total
    if sinks is not None:
        total = total + np.exp(sinks - of_query)
    result = np.empty((K, rows, v.shape[2]), dtype=np.float32)
    if firsts is None:
        _product(scores[..., : v.shape[1]], v, result, transposed=False)
    else:
        _product_from_first(weights, v, firsts, result)
    np.divide(result[:, : G * n].reshape(K, G, n, -1), total, out=out)


def _from_first(weights: F32, firsts: npt.NDArray[np.int64], width: int) -> F32:
    """The weights (K, G, n, ≥ width + firsts[-1]) from each query's first key on: (K, G, n, width).

    A view if each query begins one key after the one before it.
    """
    if _in_steps(firsts):
        return _slanted(weights, width)
    return np.stack([weights[:, :, t, at : at + width] for t, at in enumerate(firsts.tolist())], axis=2)


def _product_from_first(weights: F32, v: F32, firsts: npt.NDArray[np.int64], out: F32) -> None:
    """What ``_from_first`` made times v (K, S, N), into out (K, ≥ G·n, N), in the pieces that each query has
    alone."""
    K, G, n, _ = weights.shape
    S = v.shape[1]
    run = np.zeros((K, out.shape[1], PIECE + int(firsts[-1])), dtype=np.float32)
    placed = run[:, : G * n].reshape(K, G, n, -1)
    even = _slanted(placed, PIECE) if _in_steps(firsts) else None
    for at in range(0, S, PIECE):
        piece = weights[..., at : at + PIECE]
        if even is not None:
            even[...] = piece
        else:
            for t, first in enumerate(firsts.tolist()):
                placed[:, :, t, first : first + PIECE] = piece[:, :, t]
        count = min(run.shape[2], S - at)
        _product(run[..., :count], v[:, at : at + count], out, transposed=False, piece=RUN, onto=at > 0)


def _in_steps(firsts: npt.NDArray[np.int64]) -> bool:
    return int(firsts[-1]) == len(firsts) - 1 and bool((np.diff(firsts) == 1).all())


def _slanted(rows: F32, width: int) -> F32:
    """A view (K, G, n, width) of rows (K, G, n, ≥ width + n - 1), each of which begins one further right."""
    strides = (*rows.strides[:2], rows.strides[2] + rows.strides[3], rows.strides[3])
    return as_strided(rows, (*rows.shape[:3], width), strides)


def _product(a: F32, b: F32, out: F32, *, transposed: bool, piece: int = PIECE, onto: bool = False) -> None:
    """a (K, M, I) times b (K, I, N), or b (K, N, I) transposed, into out (K, M, N); ``onto``: added to it.

    Sums over I are formed in pieces, unless ``b`` is transposed.
    """
    inner = a.shape[2]
    piece = inner if transposed else piece
    if _blas is None or any(x.strides[2] != 4 for x in (a, b, out)):
        for at in range(0, inner, piece):
            part = b.transpose(0, 2, 1) if transposed else b[:, at : at + piece]
            product = np.matmul(a[..., at : at + piece], part)
            np.add(out, product, out=out) if at or onto else np.copyto(out, product)
        return
    row_major, plain, swapped = 101, 111, 112
    (a_at, a_batch, a_row), (b_at, b_batch, b_row), (out_at, out_batch, out_row) = map(_place, (a, b, out))
    for at in range(0, inner, piece):
        _blas.cblas_sgemm_batch_strided(
            row_major,
            plain,
            swapped if transposed else plain,
            a.shape[1],
            out.shape[2],
            min(piece, inner - at),
            1.0,
            a_at + 4 * at,
            a_row,
            a_batch,
            b_at + 4 * at * b_row,
            b_row,
            b_batch,
            1.0 if at or onto else 0.0,
            out_at,
            out_row,
            out_batch,
            a.shape[0],
        )


def _place(x: F32) -> tuple[int, int, int]:
    """The address of a (K, M, N) in memory, and how many elements the next of K and of M are away."""
    batch, row, _ = x.strides
    return x.ctypes.data, batch // 4, row // 4


def gelu(x: F32) -> F32 | None:
    """x · (1 + erf(x / √2)) / 2, elementwise, by MKL's error function; None if there is no MKL."""
    if _blas is None:
        return None
    inner = np.multiply(x, np.float32(0.5**0.5))
    out: F32 = np.empty_like(inner)
    _blas.vsErf(inner.size, inner.ctypes.data, out.ctypes.data)
    out += 1.0
    out *= x
    out *= np.float32(0.5)
    return out
