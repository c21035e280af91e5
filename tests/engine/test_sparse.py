"""Sparse prefill against its oracles: everything kept is dense, and dropping a token is masking its key."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from family_params import each
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from tiny_architectures import FAMILIES, VOCAB, tiny

from fleetd.engine.sparse_prefill.rope import PosRoPE, RopeOffset, install, watched
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller
from fleetd.engine.sparse_prefill.sparse_caches import sparse_cache
from fleetd.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("cpu_installed")

LENGTH, STEPS = 150, 5
Logits = npt.NDArray[np.float32]


def prompt(n: int = LENGTH, key: int = 3) -> list[int]:
    tokens: list[int] = mx.random.randint(0, VOCAB, (n,), key=mx.random.key(key)).tolist()
    return tokens


class MaskedCache:
    """A dense pass over all tokens, rotated natively, in which only the kept keys are there to be seen.

    It stands in for a layer's cache: dropped keys are taken out, which is what a mask comes to, so that sums
    have the same terms in the same order as a sparse pass and bytes can be compared.
    """

    def __init__(self, kept: Sequence[int], like: Any) -> None:
        self.kept = np.array(kept)
        self.window = like.max_size if isinstance(like, RotatingKVCache) else None
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def _visible(self, n: int) -> npt.NDArray[np.bool_]:
        asks = np.arange(self.offset, self.offset + n)[:, None]
        end = self.offset + n
        keys = self.kept[self.kept < end][None]
        near = keys <= asks
        return near if self.window is None else near & (asks - keys < self.window)

    def make_mask(self, n: int, **_: Any) -> mx.array:
        return mx.array(self._visible(n))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        n = keys.shape[2]
        rows = mx.array([int(i) - self.offset for i in self.kept if self.offset <= i < self.offset + n])
        keys, values = keys[:, :, rows], values[:, :, rows]
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self.offset += n
        return keys, values


def oracle_logits(model: Any, tokens: list[int], kept: list[int], more: list[int]) -> Logits:
    """(1 + len(more), V): after the prompt's last token, and after each of ``more``."""
    everything = [*kept, *range(len(tokens), len(tokens) + len(more))]
    caches = [MaskedCache(everything, layer) for layer in make_prompt_cache(model)]
    mx.eval(model(mx.array([tokens[:-1]]), cache=caches))
    out = [model(mx.array([[token]]), cache=caches)[0, -1] for token in [tokens[-1], *more]]
    return np.array(mx.stack(out))


def sparse_logits(
    model: Any, tokens: list[int], kept: list[int], more: list[int], sizes: Sequence[int] = (64,)
) -> Logits:
    """As ``oracle_logits``: prefilled in chunks of ``sizes`` over and over, decoded as a batch of one."""
    prefiller = SparsePrefiller.begin(model, tokens, kept)
    for size in itertools.cycle(sizes):
        if prefiller.step(size) == 0:
            break
    caches = [layer.merge([layer]) for layer in prefiller.cache]
    out = [model(mx.array([[token]]), cache=caches)[0, -1] for token in [tokens[-1], *more]]
    return np.array(mx.stack(out))


def keep_some(sparse: Sparse, length: int, share: float = 0.4, seed: int = 5) -> list[int]:
    """Runs of a few tokens, ends included."""
    draw = np.random.default_rng(seed)
    runs = draw.random(length // 5 + 1) < share
    return sparse.kept([i for i in range(length) if runs[i // 5]], length)


MORE = [7, 201, 33, 90, 14]
# Some are held to a tolerance here (decision 4); test_windows.py holds windows to the bit.
ALLOWED = [name for name, architecture in FAMILIES.items() if not architecture.whole]
ROUNDED = {name for name, architecture in FAMILIES.items() if architecture.chunks == "same"} | {"mistral"}
BYTES = sorted(set(ALLOWED) - ROUNDED | {"deepseek_v3", "gemma2", "kimi_k2"})


def assert_same(name: str, mine: Logits, oracle: Logits) -> None:
    if name in BYTES:
        assert np.array_equal(mine, oracle)
    else:
        assert float(np.abs(mine - oracle).max()) < 1e-5 * float(np.abs(oracle).max())


@pytest.mark.parametrize("name", each(set(FAMILIES) - set(ALLOWED)))
def test_a_model_whose_positions_cannot_be_set_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ModelUnsupported, match="computes every token of a prompt") as refused:
        Sparse.of(tiny(name))
    assert FAMILIES[name].whole in str(refused.value)


@pytest.mark.parametrize("name", each(ALLOWED, every=2))
def test_dropping_tokens_is_masking_their_keys(name: str) -> None:
    model = tiny(name)
    sparse, tokens = Sparse.of(model), prompt()
    kept = keep_some(sparse, LENGTH)
    assert len(kept) < LENGTH - 30
    expected = oracle_logits(model, tokens, kept, MORE)
    assert_same(name, sparse_logits(model, tokens, kept, MORE), expected)
    # Any chunks: single tokens, and chunks that end within runs and within gaps.
    for sizes in ([1, 7, 40], [3, 17]):
        mine = sparse_logits(model, tokens, kept, MORE, sizes)
        assert float(np.abs(mine - expected).max()) < 1e-5 * float(np.abs(expected).max())


@pytest.mark.parametrize("name", each(ALLOWED, every=2))
def test_everything_kept_is_dense(name: str) -> None:
    """By the way that tokens with gaps take, too."""
    model, tokens = tiny(name), prompt(90)
    dense = make_prompt_cache(model)
    expected = [model(mx.array([tokens[a:b]]), cache=dense) for a, b in ((0, 48), (48, 49), (49, 90))]
    Sparse.of(model)
    for gaps in (False, True):
        caches = [sparse_cache(layer) for layer in make_prompt_cache(model)]
        for (a, b), native in zip(((0, 48), (48, 49), (49, 90)), expected, strict=True):
            for layer in caches:
                layer.expect(range(a, b))
                if gaps:
                    layer.offset = RopeOffset(int(layer.offset), mx.arange(a, b))
            assert_same(name, np.array(model(mx.array([tokens[a:b]]), cache=caches)), np.array(native))


# ---- Ropes -----------------------------------------------------------------------------------------------

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i / 8 for i in range(16)],
    "original_max_position_embeddings": 64,
}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": _LLAMA3}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_traditional": True}),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("phi3", {"rope_scaling": _LONG, "original_max_position_embeddings": 64}),
    ("phi3", {"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(("name", "changes"), ROPES)
def test_every_kind_of_rope_takes_positions(name: str, changes: dict[str, Any]) -> None:
    model, tokens = tiny(name, **changes), prompt()
    kept = keep_some(Sparse.of(model), LENGTH)
    assert np.array_equal(sparse_logits(model, tokens, kept, MORE), oracle_logits(model, tokens, kept, MORE))


def test_a_rope_that_depends_on_the_length_is_declined() -> None:
    model = tiny("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    with pytest.raises(ModelUnsupported, match="positions"):
        Sparse.of(model)
    # And runs as before.
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    assert cache[0].offset == 3


def test_a_wrong_rope_is_found_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = PosRoPE.__call__

    def off_by_one(self: PosRoPE, x: mx.array, offset: Any = 0) -> mx.array:
        if isinstance(offset, RopeOffset) and isinstance(offset.positions, mx.array):
            offset = RopeOffset(int(offset), offset.positions + 1)
        return stock(self, x, offset)

    monkeypatch.setattr(PosRoPE, "__call__", off_by_one)
    with pytest.raises(ModelUnsupported, match="kept whole"):
        Sparse.of(tiny("llama"))


def test_a_type_that_nobody_tested_is_declined_by_name() -> None:
    model = tiny("llama")
    model.__class__ = type("Model", (type(model),), {"__module__": "mlx_lm.models.novel"})
    model.model_type = "novel"
    with pytest.raises(ModelUnsupported, match="novel"):
        Sparse.of(model)


def test_ropes_are_wrapped_once_and_show_queries_and_keys() -> None:
    model = tiny("qwen3")
    assert [rope.layer for rope in install(model)] == [0, 1, 2, 3]
    assert install(model) == install(model)
    assert not isinstance(install(model)[0].rope, PosRoPE)
    seen: list[tuple[int, tuple[int, ...], bool]] = []

    def look(layer: int, before: mx.array, after: mx.array) -> None:
        seen.append((layer, before.shape, bool(mx.array_equal(before, after))))

    caches = [sparse_cache(layer) for layer in make_prompt_cache(model)]
    for layer in caches:
        layer.expect([3, 4, 9])
    with watched(install(model), look):
        model(mx.array([[1, 2, 3]]), cache=caches)
    # Queries, then keys.
    assert seen == [(i, (1, heads, 3, 32), False) for i in range(4) for heads in (4, 2)]
    for layer in caches:
        layer.expect([10])
    model(mx.array([[1]]), cache=caches)
    assert len(seen) == 8
