# ruff: noqa: N803, N806 — shape letters are the names the field uses for dimensions
"""The CPU's own attention and linear layers: right, and the same bits whatever is computed beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import blas_threads
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
import tiny_architectures
import tiny_models
from family_params import in_turn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import activations
from mlx_lm.models.cache import make_prompt_cache

from fleetd.engine.cpu import products
from fleetd.hardware.probe import cores

F32 = npt.NDArray[np.float32]
CHANGED = "the bits of one row depend on what was computed beside it: MKL no longer adds as cpu.py assumes"
# Around every bound at which MKL, the blocks or the pieces of a sum change their ways.
EDGES = [15, 16, 17, 127, 128, 129, 159, 160, 161, 191, 192, 193, 319, 320, 321, 383, 385, 1023, 1024, 1025]
SHAPES = [(9, 3, 64), (16, 8, 128), (4, 4, 80), (4, 1, 64)]


@pytest.fixture(autouse=True, scope="module")
def all_threads() -> Iterator[None]:
    """MKL is held to what it does on every core, as a worker uses it."""
    blas_threads.use(cores())
    yield
    blas_threads.use(1)


def draw(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def oracle(
    q: F32, k: F32, v: F32, scale: float, mask: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.float64]:
    """Attention written down as it is defined, in double precision."""
    groups = q.shape[1] // k.shape[1]
    wide = [np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v)]
    scores = np.einsum("bhtd,bhsd->bhts", q.astype(np.float64), wide[0]) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: npt.NDArray[np.float64] = np.einsum("bhts,bhsd->bhtd", weights, wide[1])
    return out / weights.sum(axis=-1, keepdims=True)


def causal(T: int, S: int, *, window: int | None = None, padding: int = 0) -> npt.NDArray[np.bool_]:
    at, key = np.arange(S - T, S)[:, None], np.arange(S)[None]
    seen = (key <= at) & (key >= padding)
    return seen if window is None else seen & (key > at - window)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 200), (5, 5), (130, 130), (7, 300), (128, 193)])
@pytest.mark.parametrize(
    ("shape", "kind"),
    in_turn(SHAPES, ["none", "causal", "causal array", "left padding", "window", "holes"]),
)
def test_attention_is_attention(shape: tuple[int, int, int], T: int, S: int, kind: str) -> None:
    H, K, D = shape
    q, k, v = draw(1, 2, H, T, D), draw(2, 2, K, S, D), draw(3, 2, K, S, D)
    seen: npt.NDArray[np.bool_] | None = None
    given: Any = None
    if kind == "causal":
        given, seen = "causal", causal(T, S)
    elif kind == "causal array":
        given = seen = causal(T, S)
    elif kind == "left padding":
        # Only as much as leaves every query something to see.
        given = seen = np.stack([causal(T, S, padding=p)[None] for p in (0, (S - T) // 2)])
    elif kind == "window":
        given = seen = causal(T, S, window=3)
    elif kind == "holes":
        given = seen = np.random.default_rng(5).random((2, 1, T, S)) < 0.5
        seen[..., S - 1] = True
    out = products.scaled_dot_product_attention(q, k, v, D**-0.5, given)
    assert out is not None
    np.testing.assert_allclose(out, oracle(q, k, v, D**-0.5, seen), rtol=2e-4, atol=2e-5)


def test_masks_it_does_not_know_are_left_to_mlx() -> None:
    q = draw(1, 1, 4, 3, 64)
    added = np.zeros((3, 3), dtype=np.float32)
    assert products.scaled_dot_product_attention(q, q, q, 0.1, added) is None
    per_head = np.ones((1, 4, 3, 3), dtype=np.bool_)
    assert products.scaled_dot_product_attention(q, q, q, 0.1, per_head) is None


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("D", [64, 128])
def test_small_products_have_the_same_bits_however_many_tokens_have_one_each(D: int) -> None:
    """As Gemma 3n multiplies the four hidden states of a token: in views whose rows lie the further apart the
    more tokens there are."""
    hidden, weights = mx.array(draw(D, 4, 1, 6, D)), mx.array(draw(1, 1, 6, 4, 4)).transpose(0, 1, 3, 2)
    together = np.array(mx.matmul(hidden.transpose(1, 2, 3, 0), weights))
    alone = [
        np.array(mx.matmul((hidden[:, :, t : t + 1] + 0).transpose(1, 2, 3, 0), weights[:, t : t + 1]))
        for t in range(6)
    ]
    assert np.concatenate(alone, axis=1).tobytes() == together.tobytes(), CHANGED


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("padding", [1, 22, 29, 33])
def test_a_sequence_in_a_batch_with_scores_that_are_added_has_the_bits_it_has_alone(padding: int) -> None:
    """As DeepSeek's latent attention adds the scores of its rotated part."""
    q, k = mx.array(draw(1, 2, 4, 1, 32)), mx.array(draw(2, 2, 1, padding + 9, 32))
    added = mx.array(draw(3, 2, 4, 1, padding + 9))
    hidden = (mx.arange(padding + 9) < padding)[None, None, None] & (mx.arange(2) == 1)[:, None, None, None]
    mask = mx.where(hidden, mx.finfo(mx.float32).min, added)
    both = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.2, mask=mask)
    own = k[1:, :, padding:]
    alone = mx.fast.scaled_dot_product_attention(q[1:], own, own, scale=0.2, mask=added[1:, ..., padding:])
    assert np.array(both[1:]).tobytes() == np.array(alone).tobytes(), CHANGED


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(("H", "K", "D"), SHAPES)
def test_attention_in_any_chunks_has_the_same_bits(H: int, K: int, D: int) -> None:
    S = 1030
    q, k, v = draw(1, 1, H, S, D), draw(2, 1, K, S, D), draw(3, 1, K, S, D)
    whole = products.scaled_dot_product_attention(q, k, v, D**-0.5, "causal")
    assert whole is not None
    for cuts in ([1, 2, 17, 193, 1024], [64, 320, 576, 832], [127, 129, 383, 385, 1023, 1025], EDGES):
        for a, b in itertools.pairwise([0, *cuts, S]):
            part = products.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, :b], v[:, :, :b], D**-0.5, "causal"
            )
            assert part is not None
            assert np.array_equal(part, whole[:, :, a:b]), f"{CHANGED} (rows {a} to {b})"


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(("shape", "window"), in_turn(SHAPES, [5, 31, 64, 128, 129, 200, 512]))
@pytest.mark.parametrize("sunk", [False, True])
def test_a_windows_query_has_the_bits_it_has_alone(
    shape: tuple[int, int, int], window: int, *, sunk: bool
) -> None:
    """In any chunks, with as many keys before as a cache has there, and more."""
    H, K, D = shape
    S = 700
    q, k, v = draw(1, 1, H, S, D), draw(2, 1, K, S, D), draw(3, 1, K, S, D)
    sinks = draw(4, H) if sunk else None
    whole = products.scaled_dot_product_attention(q, k, v, D**-0.5, causal(S, S, window=window), sinks)
    assert whole is not None
    for t in (0, 4, 30, 31, 127, 128, 199, 200, 201, 511, 512, 513, 699):
        a = max(0, t + 1 - window)
        alone = products.scaled_dot_product_attention(
            q[:, :, t : t + 1], k[:, :, a : t + 1], v[:, :, a : t + 1], D**-0.5, None, sinks
        )
        assert alone is not None
        assert np.array_equal(alone[:, :, 0], whole[:, :, t]), f"{CHANGED} (query {t})"
    for cuts in ([1, 2, 17, 193], [64, 320, 576], [127, 129, 383, 385]):
        for a, b in itertools.pairwise([0, *cuts, S]):
            start = max(0, a + 1 - window)
            part = products.scaled_dot_product_attention(
                q[:, :, a:b],
                k[:, :, start:b],
                v[:, :, start:b],
                D**-0.5,
                causal(b - a, b - start, window=window),
                sinks,
            )
            assert part is not None
            assert np.array_equal(part, whole[:, :, a:b]), f"{CHANGED} (rows {a} to {b})"


@pytest.mark.usefixtures("cpu_installed")
def test_a_window_with_gaps_has_the_same_bits_in_any_chunks() -> None:
    """Of tokens that stand apart, a query may see hundreds less than the one before it."""
    at = np.sort(np.random.default_rng(8).choice(1500, 600, replace=False))
    at[350:] += 900
    seen = (at[None] <= at[:, None]) & (at[:, None] - at[None] < 400)
    q, k, v = draw(1, 1, 4, 600, 64), draw(2, 1, 2, 600, 64), draw(3, 1, 2, 600, 64)
    whole = products.scaled_dot_product_attention(q, k, v, 0.125, seen)
    assert whole is not None
    np.testing.assert_allclose(whole, oracle(q, k, v, 0.125, seen), rtol=2e-4, atol=2e-5)
    for a, b in itertools.pairwise([0, 1, 48, 200, 349, 351, 400, 600]):
        part = products.scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, :b], v[:, :, :b], 0.125, seen[a:b, :b]
        )
        assert part is not None
        assert np.array_equal(part, whole[:, :, a:b]), f"{CHANGED} (rows {a} to {b})"


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 200), (5, 5), (130, 130), (7, 300), (128, 193)])
@pytest.mark.parametrize("window", [None, 3, 50])
def test_sinks_are_keys_without_a_value(T: int, S: int, window: int | None) -> None:
    q, k, v, sinks = draw(1, 2, 8, T, 64), draw(2, 2, 2, S, 64), draw(3, 2, 2, S, 64), draw(4, 8)
    mask = causal(T, S, window=window)
    out = products.scaled_dot_product_attention(q, k, v, 0.125, mask, sinks)
    stock = mx.fast.scaled_dot_product_attention(
        *map(mx.array, (q, k, v)), scale=0.125, mask=mx.array(mask), sinks=mx.array(sinks), stream=mx.cpu
    )
    assert out is not None
    np.testing.assert_allclose(out, np.array(stock), rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(("H", "K", "D"), SHAPES)
def test_attention_on_any_number_of_threads_has_the_same_bits(
    H: int, K: int, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(1, 1, H, 193, D), draw(2, 1, K, 400, D), draw(3, 1, K, 400, D)
    found = []
    for threads in (1, 2, 3, 8, 64):
        monkeypatch.setattr(products, "_thread_count", threads)
        out = products.scaled_dot_product_attention(q, k, v, 0.1, "causal")
        assert out is not None
        found.append(out.tobytes())
    assert len(set(found)) == 1, CHANGED


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_blocks_go_round_evenly(threads: int) -> None:
    for queries in range(products.BLOCK, 2200):
        size = products.block_size(queries, threads)
        assert products.LEAST_BLOCK <= size <= products.BLOCK
        rounds = -(-queries // size // threads)
        assert rounds * size <= queries / threads + rounds or size == products.LEAST_BLOCK


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(("shape", "n"), in_turn(SHAPES, EDGES))
def test_a_padded_batch_row_has_the_bits_it_has_alone(shape: tuple[int, int, int], n: int) -> None:
    H, K, D = shape
    q, k, v = draw(1, 2, H, 1, D), draw(2, 2, K, 1100, D), draw(3, 2, K, 1100, D)
    seen = np.stack([causal(1, 1100, padding=p)[None] for p in (0, 1100 - n)])
    both = products.scaled_dot_product_attention(q, k, v, D**-0.5, seen)
    alone = products.scaled_dot_product_attention(q[1:], k[1:, :, -n:], v[1:, :, -n:], D**-0.5, None)
    assert both is not None
    assert alone is not None
    assert np.array_equal(both[1], alone[0]), CHANGED


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(
    ("inner", "outer"),
    [(576, 192), (576, 576), (1536, 576), (576, 1536), (1024, 3072), (3072, 1024), (576, 16384)],
)
def test_a_linear_layers_row_does_not_depend_on_the_others(inner: int, outer: int) -> None:
    layer = nn.Linear(inner, outer, bias=False)
    layer.weight = mx.array(draw(1, outer, inner) * 0.05)
    rows = mx.array(draw(2, 300, inner))
    whole = np.array(layer(rows))
    for n in [1, 2, 3, 4, 5, 7, 15, 16, 17, 64, 127, 128, 129, 192, 193, 256]:
        for start in {0, 300 - n}:
            part = np.array(layer(rows[start : start + n]))
            assert np.array_equal(part, whole[start : start + n]), f"{CHANGED} ({n} rows of {inner}x{outer})"


def run(model: Any, tokens: list[int], sizes: list[int]) -> tuple[F32, list[F32]]:
    """Logits of every position, computed in chunks of ``sizes`` (the last repeated), and the KV cache."""
    cache = make_prompt_cache(model)
    rows: list[F32] = []
    done = 0
    for size in itertools.chain(sizes[:-1], itertools.repeat(sizes[-1])):
        if done >= len(tokens):
            break
        rows.append(np.array(model(mx.array([tokens[done : done + size]]), cache=cache)[0]))
        done += size
    kv = [np.array(x) for layer in cache for x in layer.keys_and_values()]
    return np.concatenate(rows), kv


def smollm2_in_int8() -> Any:
    return tiny_architectures.in_int8(tiny_models.smollm2())


BOTH = pytest.mark.parametrize("make", [tiny_models.smollm2, smollm2_in_int8])
# Whole; as a worker under load; a verified block in the middle; one by one across the last bounds.
CHUNKS = [[1030], [64], [1, 15, 1, 111, 1, 63, 1, 300], [1015, 1]]


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(
    ("make", "chunks"),
    [
        (tiny_models.smollm2, CHUNKS),
        (smollm2_in_int8, CHUNKS),
        (tiny_models.qwen3_06b, CHUNKS[2:3]),
        pytest.param(tiny_models.qwen3_06b, CHUNKS[:2] + CHUNKS[3:], marks=pytest.mark.long),
    ],
)
def test_a_model_gives_the_same_bits_in_any_chunks(make: Any, chunks: list[list[int]]) -> None:
    model, tokens = make(), tiny_models.prompt(1030)
    logits, kv = run(model, tokens, [256])
    for sizes in chunks:
        other, other_kv = run(model, tokens, sizes)
        assert np.array_equal(other, logits), f"{CHANGED} (chunks {sizes})"
        assert all(np.array_equal(a, b) for a, b in zip(kv, other_kv, strict=True)), CHANGED


@BOTH
@pytest.mark.usefixtures("cpu_installed")
def test_decoding_one_by_one_has_the_bits_of_a_block(make: Callable[[], Any]) -> None:
    model = make()
    tokens = tiny_models.prompt(200)
    block, _ = run(model, tokens, [180, 8])
    single, _ = run(model, tokens, [180, 1])
    assert np.array_equal(block, single), CHANGED


@BOTH
@pytest.mark.usefixtures("cpu_installed")
def test_an_answer_has_the_same_bits_alone_and_in_a_batch(make: Callable[[], Any]) -> None:
    model = make()
    prompts = [tiny_models.prompt(n, seed=n) for n in (3, 14, 125, 190, 382)]

    def answer(prompts: list[list[int]]) -> dict[int, list[tuple[int, bytes]]]:
        generator = BatchGenerator(model, stream=mx.default_stream(mx.cpu))
        caches = []
        for p in prompts:
            cache = make_prompt_cache(model)
            model(mx.array([p[:-1]]), cache=cache)
            caches.append(cache)
        uids = generator.insert([p[-1:] for p in prompts], max_tokens=[8] * len(prompts), caches=caches)
        out: dict[int, list[tuple[int, bytes]]] = {uid: [] for uid in uids}
        while any(len(steps) < 8 for steps in out.values()):
            for r in generator.next()[1]:
                out[r.uid].append((r.token, np.array(r.logprobs).tobytes()))
        generator.close()
        return out

    together = list(answer(prompts).values())
    for i, p in enumerate(prompts):
        (alone,) = answer([p]).values()
        assert alone == together[i], f"{CHANGED} (prompt of {len(p)})"


@pytest.mark.usefixtures("cpu_installed")
def test_a_sliding_window_model_agrees_with_stock_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_models.sliding(), tiny_models.prompt(150)
    ours = [run_logits(model, tokens, sizes) for sizes in ([150], [64, 33, 1], [1])]
    monkeypatch.setattr(products, "scaled_dot_product_attention", lambda *_: None)
    stock = run_logits(model, tokens, [150])
    for logits in ours:
        np.testing.assert_allclose(logits, stock, rtol=1e-3, atol=1e-3)


def run_logits(model: Any, tokens: list[int], sizes: list[int]) -> F32:
    cache = make_prompt_cache(model)
    rows, done, size = [], 0, sizes[0]
    while done < len(tokens):
        rows.append(np.array(model(mx.array([tokens[done : done + size]]), cache=cache)[0]))
        done += size
        sizes = sizes[1:] or sizes
        size = sizes[0]
    return np.concatenate(rows)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), (3, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_to_float32_gives_the_weights_mlx_gives(bits: int, group: int, bias: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 128)
            self.layers = [nn.Linear(128, 96, bias=bias), nn.RMSNorm(96)]

    model = Model()
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=group, bits=bits)
    expected = {
        name: mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=group, bits=bits)
        for name, layer in (("embed", model.embed), ("linear", model.layers[0]))
    }
    products.to_float32(model)
    assert type(model.embed) is nn.Embedding
    assert type(model.layers[0]) is nn.Linear
    assert model.layers[1].weight.dtype == mx.float32
    for name, layer in (("embed", model.embed), ("linear", model.layers[0])):
        assert layer.weight.dtype == mx.float32
        assert mx.array_equal(layer.weight, expected[name].astype(mx.float32))
    assert ("bias" in model.layers[0]) == bias


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("divided", "plain"),
    [
        (nn.QuantizedAllToShardedLinear, nn.AllToShardedLinear),
        (nn.QuantizedShardedToAllLinear, nn.ShardedToAllLinear),
    ],
)
def test_to_float32_gives_divided_layers_whole_ones_weights(divided: Any, plain: Any, bias: bool) -> None:
    """Ranks that multiply by other weights than one machine does give other answers."""
    linear = nn.Linear(128, 96, bias=bias)
    linear.set_dtype(mx.float16)
    whole = nn.QuantizedLinear.from_linear(linear, 32, 4)
    # The group of a process that is no rank: each layer's part is all of it.
    model = nn.Sequential(divided.from_quantized_linear(whole), whole)
    expected_bytes = products.float32_bytes(model)
    products.to_float32(model)
    part, whole = model.layers
    assert type(part) is plain
    assert mx.array_equal(part.weight, whole.weight)
    assert ("bias" in part) == bias
    assert sum(array.nbytes for _, array in tree_flatten(model.parameters())) == expected_bytes
    x = mx.array(draw(3, 5, 128))
    assert mx.allclose(part(x), whole(x), atol=1e-5)


@pytest.mark.usefixtures("cpu_installed")
def test_swiglu_leaves_its_arguments_alone() -> None:
    gate, x = mx.array(draw(1, 2, 64)), mx.array(draw(2, 2, 64))
    before = np.array(gate), np.array(x)
    mx.eval(activations.swiglu(gate, x))
    assert np.array_equal(np.array(gate), before[0])
    assert np.array_equal(np.array(x), before[1])


@pytest.mark.usefixtures("on_cpu")
def test_installing_changes_nothing_in_half_precision(request: pytest.FixtureRequest) -> None:
    q = mx.array(draw(1, 1, 4, 20, 64)).astype(mx.bfloat16)
    k = mx.array(draw(2, 1, 2, 20, 64)).astype(mx.bfloat16)
    gate = mx.array(draw(3, 4, 64)).astype(mx.float16)

    def compute() -> list[mx.array]:
        return [
            mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask="causal"),
            activations.swiglu(gate, gate),
        ]

    before = compute()
    mx.eval(before)
    request.getfixturevalue("cpu_installed")
    for a, b in zip(before, compute(), strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b)
