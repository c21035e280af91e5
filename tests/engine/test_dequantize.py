"""Dequantised weights: the bytes that MLX gives, by whichever way they are computed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from family_params import in_turn

from fleetd.engine.cpu import dequantize, products

pytestmark = pytest.mark.usefixtures("on_cpu")


def quantized(dtype: mx.Dtype, bits: int, group_size: int, *, size: float = 1.0) -> nn.QuantizedLinear:
    """300 rows, so that pieces and blocks end unevenly."""
    weights = size * mx.random.normal((300, 576), key=mx.random.key(bits))
    layer = nn.Linear(576, 300)
    layer.weight = weights.astype(dtype)
    made: nn.QuantizedLinear = nn.QuantizedLinear.from_linear(layer, group_size, bits)
    return made


def as_mlx_does(layer: nn.QuantizedLinear) -> mx.array:
    return mx.dequantize(
        layer.weight, layer.scales, layer.biases, group_size=layer.group_size, bits=layer.bits
    ).astype(mx.float32)


@pytest.mark.parametrize(
    ("dtype", "bits"), in_turn([mx.float16, mx.bfloat16, mx.float32], [2, 3, 4, 5, 6, 8])
)
@pytest.mark.parametrize("group_size", [32, 64])
def test_every_byte_is_as_mlx_gives_it(
    dtype: mx.Dtype, bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also what does not end with a block.
    monkeypatch.setattr(dequantize, "BLOCK", 7 * group_size)
    layer = quantized(dtype, bits, group_size)
    expected = np.array(as_mlx_does(layer))
    out = np.zeros(expected.shape, np.float32)
    tasks = dequantize.dequantizing(layer, out)
    assert tasks
    for task in tasks:
        task()
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))
    model = nn.Sequential(layer)
    products.to_float32(model)
    assert np.array_equal(np.array(model.layers[0].weight).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("size", [1e-4, 3e5], ids=["with few bits left", "beyond the largest"])
@pytest.mark.parametrize("bits", [4, 5])
def test_groups_at_the_ends_of_the_range_of_f16_are_as_mlx_gives_them(size: float, bits: int) -> None:
    """All of some rows, and single groups of others."""
    layer = quantized(mx.float32, bits, 32)
    rows, columns = mx.arange(300)[:, None], mx.arange(18)
    odd = mx.where((rows < 40) | ((rows * 18 + columns) % 97 == 0), size, 1.0)
    layer.scales = (layer.scales * odd).astype(mx.float16)
    layer.biases = (layer.biases * odd).astype(mx.float16)
    expected = np.array(as_mlx_does(layer))
    assert not np.isfinite(expected).all() or np.abs(expected[:40]).max() < 1e-3
    out = np.zeros(expected.shape, np.float32)
    for task in dequantize.dequantizing(layer, out):
        task()
    np.testing.assert_array_equal(out, expected)
