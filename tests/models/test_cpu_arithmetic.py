"""What a CPU computes with, and what weights take for it."""

from __future__ import annotations

import pytest

from fleetd.models.cpu_arithmetic import CpuArithmetic, CpuSetting, chosen, prepared_bytes, weight_bytes


@pytest.mark.parametrize(
    ("setting", "quantised", "fits", "expected"),
    [
        ("auto", True, True, "int8"),
        ("auto", True, False, "int8"),
        ("auto", False, True, "float32"),
        ("auto", False, False, "int8"),
        ("int8", False, True, "int8"),
        ("int8", True, True, "int8"),
        ("float32", True, False, "float32"),
        ("float32", False, False, "float32"),
    ],
)
def test_quantised_weights_and_those_that_do_not_fit_are_multiplied_in_int8(
    setting: CpuSetting, quantised: bool, fits: bool, expected: CpuArithmetic
) -> None:
    budget = 1000 if fits else 999
    found = [
        chosen(setting, quantised=quantised, available=here, float32_bytes=1000, budget_bytes=budget)
        for here in (True, False)
    ]
    assert found == [expected, "float32"], "without onnxruntime there is float32 alone"


def test_a_packed_matrix_takes_its_integers_and_some_bytes_for_each_block() -> None:
    # Of 4 bits, two blocks to a byte of zero points.
    assert prepared_bytes(64, 4, 32) == 32 + 2 * 12 + 1
    assert prepared_bytes(64, 8, 64) == 64 + 12 + 1
    # And what is added to the weights of a group, if anything is.
    assert prepared_bytes(64, 8, 64, added=2) == 64 + 12 + 1 + 2 * 4
    assert weight_bytes(128, bits=4, group=64) == prepared_bytes(128, 4, 64)
    assert weight_bytes(128, bits=4, group=64, block=32) == prepared_bytes(128, 4, 32)


@pytest.mark.parametrize(("bits", "field"), [(2, 4), (3, 4), (4, 4), (5, 8), (6, 8), (8, 8)])
def test_other_widths_take_the_next_wider_field(bits: int, field: int) -> None:
    assert weight_bytes(4096, bits=bits, group=32) == weight_bytes(4096, bits=field, group=32)
    # Far less than float32, whatever the width.
    assert 4096 * field // 8 < weight_bytes(4096, bits=bits, group=32) < 4096 * 2
