"""Products with packed weights in int8: a row has the same bits in any company, near the numbers in f32."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
import tiny_architectures
from family_params import in_turn
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from fleetd.engine.cpu import packed_layers, packed_product, products
from fleetd.engine.cpu.affine_weights import Affine
from fleetd.engine.cpu.arithmetic import Kernel, kernel_for
from fleetd.engine.cpu.packed_product import PackedProduct
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.layers.prefill import Prefiller

F32 = npt.NDArray[np.float32]
pytestmark = [
    pytest.mark.usefixtures("cpu_installed"),
    pytest.mark.skipif(not packed_product.kernels(), reason="onnxruntime has no exact kernels here"),
]
ROWS = (1, 2, 3, 4, 7, 16, 64, 256)


def draw(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def linear(
    outputs: int, inputs: int, bits: int, group: int, *, offset: bool = False, dtype: Any = mx.float16
) -> nn.QuantizedLinear:
    """A layer as MLX quantises it; with ``offset``, biases that are no whole number of scales."""
    plain = nn.Linear(inputs, outputs, bias=False)
    plain.weight = mx.array(draw(1, outputs, inputs) * 0.05).astype(dtype)
    layer = nn.QuantizedLinear.from_linear(plain, group, bits)
    if offset:
        layer.biases = layer.biases + layer.scales * mx.array(draw(2, *layer.scales.shape)).astype(dtype) / 4
    mx.eval(layer.parameters())
    return layer


def product_of(layer: nn.QuantizedLinear) -> PackedProduct:
    kernel = kernel_for(layer.bits, layer.group_size, packed_product.kernels())
    assert kernel is not None
    return PackedProduct(Affine.of(layer).packed(kernel))


def error(found: F32, expected: F32) -> float:
    """Root mean square of the difference, as a share of the numbers'."""
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("bits", "group"),
    [(2, 64), (3, 32), (4, 32), (4, 64), (4, 128), (5, 64), (6, 32), (8, 32), (8, 64), (8, 128)],
)
def test_a_product_is_near_the_one_in_f32(bits: int, group: int, offset: bool) -> None:
    layer = linear(90, 384, bits, group, offset=offset)
    x = draw(3, 20, 384)
    found = product_of(layer)(x)
    # Each number of a row is rounded to 8 bits: 1/127 of the largest in its block, at most.
    assert error(found, x @ np.array(products.dequantized(layer)).T) < 0.012


@pytest.mark.parametrize(("threads", "offset"), in_turn([1, 3], [False, True]))
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64)])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (1536, 576), (128, 50), (640, 1)])
def test_a_row_has_the_same_bits_in_any_company(
    inputs: int,
    outputs: int,
    bits: int,
    group: int,
    offset: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if inputs % group:
        group = 32
    monkeypatch.setattr(packed_product, "threads", lambda: threads)
    # Matrices of these sizes are given to threads in parts, or many rows are.
    monkeypatch.setattr(packed_product, "_MANY_WEIGHTS", 1 << 18)
    monkeypatch.setattr(packed_product, "_MUCH_WORK", 1 << 18)
    product = product_of(linear(outputs, inputs, bits, group, offset=offset))
    rows = draw(4, 300, inputs)
    # Sums of a group in which one number is much larger than the others.
    rows[::7, 5] *= 1000
    whole = product(rows)
    for n in ROWS:
        for start in {0, 1, 300 - n}:
            part = product(rows[start : start + n])
            assert np.array_equal(part, whole[start : start + n]), f"{n} rows"


def test_threads_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(320, 256, 4, 32, offset=True), draw(5, 40, 256)
    alone = product_of(layer)(x)
    monkeypatch.setattr(packed_product, "threads", lambda: 3)
    monkeypatch.setattr(packed_product, "_MANY_WEIGHTS", 0)
    assert np.array_equal(product_of(layer)(x), alone)


def test_biases_that_are_whole_numbers_of_scales_are_zero_points() -> None:
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        assert Affine.of(linear(64, 256, 4, 64, dtype=dtype)).packed(Kernel(4, 32, 1)).rest is None
    assert Affine.of(linear(64, 256, 4, 64, offset=True)).packed(Kernel(4, 32, 1)).rest is not None


def test_this_processor_has_exact_kernels_of_both_widths() -> None:
    assert {kernel.bits for kernel in packed_product.kernels()} == {4, 8}


def test_without_onnxruntime_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_product.kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert packed_product.kernels() == ()
    packed_product.kernels.cache_clear()


# ---- The choice --------------------------------------------------------------------------------------------


def test_blocks_are_the_largest_that_divide_a_group() -> None:
    ways = [Kernel(4, 64, 2), Kernel(4, 32, 1), Kernel(8, 64, 1), Kernel(8, 32, 1)]
    assert kernel_for(4, 128, ways) == kernel_for(3, 64, ways) == Kernel(4, 64, 2)
    assert kernel_for(4, 32, ways) == Kernel(4, 32, 1)
    assert kernel_for(6, 128, ways) == Kernel(8, 64, 1)
    assert kernel_for(4, 32, ways[:1]) is None


# ---- Layers ------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, **quantised: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = [nn.Linear(128, 96, bias=True), nn.RMSNorm(96), nn.Linear(100, 8)]
        self.set_dtype(mx.bfloat16)
        if quantised:
            nn.quantize(
                self,
                **quantised,
                class_predicate=lambda _, layer: getattr(layer, "weight", mx.zeros((1, 1))).shape[-1] == 128,
            )
        mx.eval(self.parameters())


@pytest.mark.parametrize(
    "quantised",
    [
        {"bits": 4, "group_size": 64},
        {"bits": 6, "group_size": 32},
        {"bits": 8, "group_size": 128},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
        {},
    ],
)
def test_layers_and_tables_of_any_kind_are_packed(quantised: dict[str, Any]) -> None:
    model, expected = Layers(**quantised), Layers(**quantised)
    expected.update(model.parameters())
    products.to_float32(expected)
    counted = packed_layers.int8_bytes(model, plain=not quantised, tied=False)
    packed_layers.to_int8(model, plain=not quantised)
    assert [type(each) for each in (model.embed, *model.layers)] == [
        packed_layers.PackedEmbedding,
        packed_layers.PackedLinear,
        nn.RMSNorm,
        nn.Linear,
    ]
    tokens = mx.array([[3, 1, 60]])
    assert mx.array_equal(model.embed(tokens), expected.embed(tokens))
    x = mx.array(draw(6, 2, 3, 128))
    assert error(np.array(model.layers[0](x)), np.array(expected.layers[0](x))) < 0.012
    assert packed_layers.weights_bytes(model) == counted
    assert error(np.array(model.embed.as_linear(x)), np.array(expected.embed.as_linear(x))) < 0.012
    assert packed_layers.table_rows(model.embed) == packed_layers.table_rows(expected.embed) == 64


def test_what_a_publisher_left_as_it_is_among_quantised_layers_stays_so() -> None:
    model = Layers(bits=4, group_size=64)
    model.layers.append(nn.Linear(128, 8))
    packed_layers.to_int8(model, plain=False)
    assert type(model.layers[-1]) is nn.Linear
    assert type(model.layers[0]) is packed_layers.PackedLinear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_give_what_mlx_gives(tokens: int, bias: bool) -> None:
    """Of 40 tokens, rows are sorted by their experts."""
    glu = SwitchGLU(64, 96, 6, bias=bias)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer: SwitchLinear = glu[name]
        if bias:
            layer.bias = mx.array(draw(7, *layer.bias.shape))
        glu[name] = layer.to_quantized(group_size=32, bits=4)
    x = mx.array(draw(8, 1, tokens, 64))
    chosen_experts = mx.random.randint(0, 6, (1, tokens, 2), key=mx.random.key(1))
    expected = np.array(glu(x, chosen_experts))
    counted = packed_layers.int8_bytes(glu, plain=False, tied=False)
    packed_layers.to_int8(glu, plain=False)
    assert not any(isinstance(layer, QuantizedSwitchLinear) for layer in glu.leaf_modules().values())
    assert packed_layers.weights_bytes(glu) == counted
    found = np.array(glu(x, chosen_experts))
    assert error(found, expected) < 0.02
    for at in range(tokens):
        alone = np.array(glu(x[:, at : at + 1], chosen_experts[:, at : at + 1]))
        assert np.array_equal(alone[:, 0], found[:, at])


def test_a_model_has_the_bytes_that_are_counted_before() -> None:
    model = tiny_architectures.tiny("llama", tie_word_embeddings=True)
    nn.quantize(model, group_size=32, bits=4)
    counted = packed_layers.int8_bytes(model, plain=False, tied=True)
    packed_layers.to_int8(model, plain=False)
    mx.eval(model(mx.array([[1, 2, 3]])))
    assert packed_layers.weights_bytes(model) == counted


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 96, bias=True), nn.Linear(64, 32, bias=False)
        self.v_proj, self.o_proj = nn.Linear(64, 32, bias=False), nn.Linear(96, 64, bias=False)
        nn.quantize(self, group_size=32, bits=4)
        # One of them with biases that are no whole numbers of scales.
        self.k_proj.biases = self.k_proj.biases + self.k_proj.scales / 3


def test_layers_with_the_same_input_are_computed_at_once_and_have_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Attention()
    names = ("q_proj", "k_proj", "v_proj")
    alone = {name: product_of(model[name]) for name in names}
    bias = np.array(model.q_proj.bias)
    packed_layers.to_int8(model, plain=False)
    runs: list[int] = []
    run = PackedProduct.__call__
    monkeypatch.setattr(PackedProduct, "__call__", lambda self, x: runs.append(len(x)) or run(self, x))

    def check(name: str, x: mx.array) -> None:
        expected = run(alone[name], np.array(x)) + (bias if name == "q_proj" else 0)
        assert np.array_equal(np.array(model[name](x)), expected)

    x, other = (mx.array(draw(seed, 3, 64)) for seed in (8, 9))
    for name in names:
        check(name, x)
    assert runs == [3]
    # In any order, from other inputs, one of them only, and again.
    for name, given in (("v_proj", x), ("q_proj", other), ("k_proj", x), ("k_proj", x), ("q_proj", x)):
        check(name, given)
    assert runs == [3] * 5


@pytest.mark.parametrize("tied", [False, True])
def test_a_prompt_is_read_without_products_that_end_in_logits_only(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_architectures.tiny("llama", tie_word_embeddings=tied)
    nn.quantize(model, group_size=32, bits=4)
    packed_layers.to_int8(model, plain=False)
    tokens = [5, 3, 7, 1, 6, 2, 4, 9]
    computed: list[PackedProduct] = []
    run = PackedProduct.__call__
    monkeypatch.setattr(PackedProduct, "__call__", lambda self, x: computed.append(self) or run(self, x))
    whole, cache = make_prompt_cache(model), make_prompt_cache(model)
    mx.eval(model(mx.array([tokens[:-1]]), cache=whole))
    with_logits = len(computed)
    computed.clear()
    reading = Prefiller(model, tokens, cache)
    reading.step(len(tokens))
    # The head, and what follows the attention of the last block: gate and up at once, and down.
    assert with_logits - len(computed) == 3
    for layer, expected in zip(cache, whole, strict=True):
        assert all(mx.array_equal(*pair) for pair in zip(layer.state, expected.state, strict=True))
    # Read with their probabilities, all are computed again.
    computed.clear()
    Prefiller(model, tokens, make_prompt_cache(model), score=lambda _: None).step(len(tokens))
    assert len(computed) == with_logits


def mlp(*, bias: bool = False) -> llama.MLP:
    found = llama.MLP(llama.ModelArgs("llama", 64, 1, 96, 1, 1e-5, 8, mlp_bias=bias))
    nn.quantize(found, group_size=32, bits=4)
    return found


def test_a_gated_mlp_gives_the_bits_of_its_products_one_by_one() -> None:
    whole = mlp()
    packed_layers.to_int8(whole, plain=False)
    assert type(whole) is packed_layers.GatedMlp
    for n in (1, 2, 7, 40):
        x = mx.array(draw(11, 2, n, 64))
        assert np.array_equal(np.array(whole(x)), np.array(llama.MLP.__call__(whole, x)))


def test_modules_that_compute_something_else_than_a_gated_mlp_keep_their_class() -> None:
    class Doubled(llama.MLP):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) * 2

    biased, doubled = mlp(bias=True), mlp()
    doubled.__class__ = Doubled
    for module, kind in ((biased, llama.MLP), (doubled, Doubled)):
        packed_layers.to_int8(module, plain=False)
        assert type(module) is kind


def test_the_last_of_some_layers_of_a_model_is_computed_for_the_layers_behind_it() -> None:
    model = tiny_architectures.tiny("llama")
    nn.quantize(model, group_size=32, bits=4)
    part = nn.Module()
    part.layers = model.layers[:1]
    packed_layers.to_int8(part, plain=False)
    x = mx.array(draw(12, 1, 5, model.args.hidden_size))
    read = part.layers[0](x)
    with unread_logits():
        assert mx.array_equal(part.layers[0](x), read)
