"""What a CPU computes between products: as MLX does, with the same bits for a row in any company."""

from __future__ import annotations

from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from fleetd.engine.cpu import computed, products, row_functions
from fleetd.engine.cpu.computed import Computed
from fleetd.engine.cpu.rotary import Rotation, rotation

F32 = npt.NDArray[np.float32]
FREQS = {"base": None, "scale": 1.0, "freqs": mx.array([1.0, 3.5, 20.0, 900.0])}

stock_rope, stock_norm = mx.fast.rope, mx.fast.rms_norm


def draw(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("width", [16, 64, 576, 4096])
def test_a_norm_is_mlxs_and_does_not_depend_on_other_rows(width: int) -> None:
    x, weight = mx.array(draw(1, 2, 130, width)), mx.array(draw(2, width))
    whole = mx.fast.rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(np.array(whole), np.array(stock_norm(x, weight, 1e-5)), rtol=2e-6, atol=1e-6)
    for n in (1, 2, 3, 7, 64):
        assert mx.array_equal(mx.fast.rms_norm(x[1:, 5 : 5 + n], weight, 1e-5), whole[1:, 5 : 5 + n])
    heads = x.reshape(2, 130, 2, -1).transpose(0, 2, 1, 3)
    alone = mx.fast.rms_norm(heads[:1, :, 7:8], None, 1e-5)
    assert mx.array_equal(alone, mx.fast.rms_norm(heads, None, 1e-5)[:1, :, 7:8])


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("more", [{"base": 10000.0, "scale": 1.0}, {"base": 5e5, "scale": 0.25}, FREQS])
@pytest.mark.parametrize(("dims", "width"), [(8, 8), (8, 24)])
def test_a_rotation_has_mlxs_bits(traditional: bool, more: dict[str, Any], dims: int, width: int) -> None:
    for offset in (0, 5, 1020, 90000, mx.array([3, 2050]), mx.array(7), mx.array([7]), -2, mx.array([-1, 4])):
        for n in (1, 2, 300):
            x = mx.array(draw(n, 2, n, 3, width)).transpose(0, 2, 1, 3)
            expected = stock_rope(x, dims, traditional=traditional, offset=offset, **more)
            found = mx.fast.rope(x, dims, traditional=traditional, offset=offset, **more)
            assert mx.array_equal(found, expected), (offset, n)


def test_swiglu_is_swiglu() -> None:
    gate, x = draw(1, 3, 700) * 10, draw(2, 3, 700)
    gate[0, :4] = [-200.0, 200.0, 0.0, -0.0]
    g = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * x
    np.testing.assert_allclose(row_functions.swiglu(gate.copy(), x), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.usefixtures("on_cpu")
def test_a_computed_array_gives_what_mlx_gives() -> None:
    one, two = draw(1, 1, 2, 12), draw(2, 1, 2, 12)
    a, b = computed.array(one), computed.array(two)
    plain, other = mx.array(one), mx.array(two)
    for found, expected in (
        (a + b, plain + other),
        (a + other, plain + other),
        (plain + b, plain + other),
        (a * 2.5, plain * 2.5),
        (3 * a, 3 * plain),
        (a * other[..., :1], plain * other[..., :1]),
        (a.reshape(1, 2, 3, 4), plain.reshape(1, 2, 3, 4)),
        (a.reshape([2, -1]), plain.reshape([2, -1])),
        (a.transpose(0, 2, 1), plain.transpose(0, 2, 1)),
        (
            a.reshape(1, 2, 3, 4).transpose(0, 2, 1, 3).reshape(6, 4),
            plain.reshape(1, 2, 3, 4).transpose(0, 2, 1, 3).reshape(6, 4),
        ),
    ):
        assert type(found) is Computed
        assert mx.array_equal(found, expected)
        assert np.array_equal(computed.view(found), np.array(expected))
    for left in (a.astype(mx.float16), a + other.astype(mx.float16), a - b, a[..., :3]):
        assert type(left) is mx.array


@pytest.mark.usefixtures("on_cpu")
def test_a_computed_array_that_is_changed_in_place_is_read_as_it_is_now() -> None:
    for change in ("x += 1", "x *= 2", "x -= 1", "x[0] = 5", "x /= 2", "x **= 2"):
        given, plain = computed.array(draw(1, 3, 4)), mx.array(draw(1, 3, 4))
        names = {"x": given}
        exec(change, names)  # noqa: S102
        expected = {"x": plain}
        exec(change, expected)  # noqa: S102
        assert np.array_equal(computed.view(given), np.array(expected["x"])), change
        assert mx.array_equal(given.reshape(4, 3) + 1, expected["x"].reshape(4, 3) + 1), change


@pytest.mark.usefixtures("on_cpu")
def test_large_arrays_are_mlxs_alone() -> None:
    assert type(computed.array(draw(1, 300, 576))) is mx.array


@pytest.mark.usefixtures("cpu_installed")
def test_a_small_attention_keeps_other_threads_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    blas: Any = products._blas

    class NotingBlas:
        cblas_sgemm_batch_strided = blas.cblas_sgemm_batch_strided

        @staticmethod
        def MKL_Set_Num_Threads_Local(threads: int) -> None:  # noqa: N802
            asked.append(threads)
            blas.MKL_Set_Num_Threads_Local(threads)

    monkeypatch.setattr(products, "_blas", NotingBlas)
    for keys in (300, 9000):
        q, kv = draw(1, 1, 9, 1, 64), draw(2, 1, 3, keys, 64)
        products.scaled_dot_product_attention(q, kv, kv, 0.1, None)
    assert asked == [1, 0]


def test_a_rotation_that_one_thread_made_is_used_in_another() -> None:
    """MLX computes an array in the thread that made it: elsewhere it fails, or waits for ever at exit."""
    made: list[Rotation] = []
    make = rotation.__wrapped__
    maker = Thread(target=lambda: made.append(make(16, False, 10_000.0, 1.0, None)))
    maker.start()
    maker.join()
    x = np.ones((1, 2, 3, 16), dtype=np.float32)
    found, expected = made[0](x, 5), make(16, False, 10_000.0, 1.0, None)(x, 5)
    assert found is not None
    assert np.array_equal(found, expected)
