"""A fingerprint is the same wherever the arithmetic is, and another as soon as a weight or a type is."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from family_params import each
from tiny_architectures import FAMILIES, in_int8, tiny

from fleetd.engine.cpu import products
from fleetd.engine.layers.stage import Stage
from fleetd.engine.shared_prefill.fingerprint import TOKENS, any_chunks, arithmetic, layer_hashes, probe
from fleetd.engine.shared_prefill.kv_layout import KvLayout

pytestmark = pytest.mark.usefixtures("cpu_installed")


def hashes(model: Any, first: int = 0, last: int = 4) -> list[bytes]:
    stage = Stage.of(model).part(first, last)
    return layer_hashes(stage, KvLayout.of(stage))


@pytest.mark.parametrize("name", each(FAMILIES, every=2))
def test_each_layer_has_its_own_and_every_part_of_the_model_the_same(name: str) -> None:
    whole = hashes(tiny(name))
    assert len(set(whole)) == 4
    assert all(len(one) == 8 for one in whole)
    assert hashes(tiny(name)) == whole
    assert hashes(tiny(name), 1, 3) == whole[1:3]


@pytest.mark.parametrize("weight", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_weight_that_differs_in_one_bit_shows_in_its_layer_only(weight: str) -> None:
    model = tiny("llama")
    before = hashes(model)
    linear = getattr(model.layers[2].self_attn, weight)
    bits = linear.weight.view(mx.uint32)
    bits[0, 0] = bits[0, 0] ^ (1 << 20)
    linear.weight = bits.view(mx.float32)
    after = hashes(model)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]


def test_another_arithmetic_shows() -> None:
    packed = in_int8(tiny("llama"))
    plain = tiny("llama")
    nn.quantize(plain, group_size=32, bits=4)
    products.to_float32(plain)
    before = hashes(packed)
    assert hashes(packed) == before
    assert not set(before) & set(hashes(plain))


def test_another_dtype_shows() -> None:
    model = tiny("llama")
    before = hashes(model)
    model.set_dtype(mx.bfloat16)
    assert not set(before) & set(hashes(model))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_numbers_are_the_same_in_every_dtype(dtype: mx.Dtype) -> None:
    """They are pinned: machines of different versions of fleetd compare what they make of them."""
    numbers = probe(KvLayout(0, (), 128, dtype))
    assert numbers.shape == (1, TOKENS, 128)
    assert numbers.dtype == dtype
    exact = numbers.astype(mx.float32)
    assert exact[0, 0, :4].tolist() == [-1.0, 0.234375, -0.53125, 0.703125]
    assert float(exact.min()) == -1.0
    assert float(exact.max()) < 1.0
    assert abs(float(exact.mean())) < 0.02
    # No two tokens alike.
    assert len({tuple(row) for row in exact[0].tolist()}) == TOKENS


def test_what_a_worker_says_of_its_arithmetic() -> None:
    stage = Stage.of(tiny("llama")).part(1, 4)
    layout = KvLayout.of(stage)
    said = arithmetic(stage, layout, device="cpu", accelerator="x86_64", versions={"mlx": "1"})
    assert said.layers == layer_hashes(stage, layout, products.SUMS)
    # Code that adds up more keys in another way is told apart, though it agrees on these few tokens.
    assert said.layers != layer_hashes(stage, layout, b"1")
    assert (said.first_layer, said.dtype, said.accelerator) == (1, "float32", "x86_64")
    assert (said.versions, said.chunks) == ({"mlx": "1"}, "any")


@pytest.mark.parametrize(
    ("name", "device", "dtype", "same"),
    [
        ("qwen2", "cpu", mx.float32, True),
        ("llama", "cpu", mx.float32, True),
        ("mistral", "cpu", mx.float32, False),  # has windows
        ("gemma3_text", "cpu", mx.float32, False),
        ("deepseek_v3", "cpu", mx.float32, False),
        ("qwen2", "metal", mx.float32, False),
        ("qwen2", "cuda", mx.float32, False),
        ("qwen2", "cpu", mx.bfloat16, False),
    ],
)
def test_where_chunks_may_be_cut_elsewhere(name: str, device: str, dtype: mx.Dtype, same: bool) -> None:
    stage = Stage.of(tiny(name))
    layout = KvLayout.of(stage)
    assert any_chunks(stage, KvLayout(0, layout.layers, layout.width, dtype), device) is same


def test_without_mkl_chunks_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage.of(tiny("qwen2"))
    monkeypatch.setattr(products, "_blas", None)
    assert not products.exact()
    assert not any_chunks(stage, KvLayout.of(stage), "cpu")
