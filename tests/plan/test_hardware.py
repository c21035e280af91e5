"""Modelled speeds: every chip that is sold is found by its name, and their order is that of the real ones."""

from __future__ import annotations

import pytest

from fleetd.limits import GIB
from fleetd.plan import chip_speeds
from fleetd.plan.chip_speeds import (
    ANY_CUDA,
    ANY_METAL,
    APPLE,
    CUDA,
    GB10,
    Hardware,
    compiles_late,
    hardware_of,
    most_of,
)


@pytest.mark.parametrize(
    ("chip", "expected"),
    [
        ("Apple M1", (1, "")),
        ("Apple M2 Pro", (2, "Pro")),
        ("Apple M3 Max", (3, "Max")),
        ("Apple M3 Ultra", (3, "Ultra")),
        ("Apple M5", (5, "")),
        # Newer than the table, and variants that were skipped: the forerunner.
        ("Apple M4 Ultra", (3, "Ultra")),
        ("Apple M9 Max", (5, "Max")),
        ("Apple M12 Ultra", (3, "Ultra")),
        ("Apple processor", (1, "")),
        ("VM of nobody knows what", (1, "")),
        ("", (1, "")),
    ],
)
def test_apple_chips_are_known_by_their_names(chip: str, expected: tuple[int, str]) -> None:
    assert hardware_of(chip, "metal", 10) == APPLE[expected]


def test_other_machines() -> None:
    assert hardware_of("NVIDIA GB10", "cuda", 20) == GB10
    assert hardware_of("NVIDIA GeForce RTX 3060", "cuda", 20) == CUDA
    small, large = hardware_of("x", "cpu", 2), hardware_of("x", "cpu", 8)
    assert large.flops == 4 * small.flops
    assert large.bytes_per_s == small.bytes_per_s
    assert hardware_of("x", "cpu", 0) == hardware_of("x", "", 1)
    assert hardware_of("x", "cpu", 10**6) == hardware_of("x", "cpu", chip_speeds.CPU_CORES)


def test_a_cpu_that_computes_with_packed_weights_is_faster_at_products_and_not_at_attention() -> None:
    wide, packed = (hardware_of("x", "cpu", 8, each) for each in ("float32", "int8"))
    weights = 2 * GIB
    assert packed.decode_tok_s(weights) > 4 * wide.decode_tok_s(weights)
    assert packed.prefill_tok_s(weights) == 2.5 * wide.prefill_tok_s(weights)
    assert packed.prefill_context_s(36, 2560) == wide.prefill_context_s(36, 2560)
    assert hardware_of("x", "cpu", 8) == hardware_of("x", "cpu", 8, "a word of a newer daemon") == wide
    # GPUs have one arithmetic.
    assert hardware_of("Apple M4", "metal", 8, "int8") == APPLE[4, ""]
    most = chip_speeds.most_of("x", "cpu", 8, "int8")
    assert most.flops > chip_speeds.most_of("x", "cpu", 8).flops > packed.flops


def test_within_a_generation_more_is_more() -> None:
    for generation in range(1, 6):
        family = [APPLE[generation, v] for v in ("", "Pro", "Max", "Ultra") if (generation, v) in APPLE]
        assert family == sorted(family, key=lambda h: h.bytes_per_s) == sorted(family, key=lambda h: h.flops)


def test_what_each_machine_is_good_at() -> None:
    """A Spark reads prompts faster than the largest Mac, which writes answers faster."""
    spark, studio, weights = hardware_of("NVIDIA GB10", "cuda", 20), APPLE[3, "Ultra"], 40 * GIB
    assert spark.prefill_tok_s(weights) > 3 * studio.prefill_tok_s(weights)
    assert studio.decode_tok_s(weights) > 2 * spark.decode_tok_s(weights)


EIGHT_BILLION = int(8.03e9 * chip_speeds.BITS_PER_WEIGHT / 8)


@pytest.mark.parametrize(
    ("modelled", "published"),
    [
        # Llama-3.1-8B, a prompt of 8,192 tokens: 1.47 s on a Spark, 5.57 s on an M3 Ultra (exo's blog).
        (GB10.prefill_tok_s(EIGHT_BILLION), 8192 / 1.47),
        (APPLE[3, "Ultra"].prefill_tok_s(EIGHT_BILLION), 8192 / 5.57),
        # The same answer in 2.87 s and 0.85 s.
        (APPLE[3, "Ultra"].decode_tok_s(1 << 34) / GB10.decode_tok_s(1 << 34), 2.87 / 0.85),
        # Llama-3.2-3B in 4 bits on an M4 Max (vllm-mlx).
        (APPLE[4, "Max"].decode_tok_s(int(3.2e9 * chip_speeds.BITS_PER_WEIGHT / 8)), 206),
    ],
)
def test_modelled_speeds_are_within_a_factor_of_two_of_published_ones(
    modelled: float, published: float
) -> None:
    assert published / 2 < modelled < published * 2


def test_loading_takes_longer_for_larger_models_and_never_nothing() -> None:
    assert chip_speeds.load_s(0) == chip_speeds.ENGINE_START_S
    assert chip_speeds.load_s(40 * GIB) > 20


def test_a_model_of_no_size_has_a_finite_speed() -> None:
    assert 0 < GB10.decode_tok_s(0) < float("inf")
    assert 0 < GB10.prefill_tok_s(0) < float("inf")


@pytest.mark.parametrize(
    ("chip", "accelerator", "cores", "arithmetic", "most"),
    [
        ("Apple M2 Max", "metal", 12, "", APPLE[2, "Max"]),
        ("Apple M1", "metal", 8, "", APPLE[1, ""]),
        ("Apple M9 Max", "metal", 12, "", ANY_METAL),
        ("something", "metal", 12, "", ANY_METAL),
        ("NVIDIA GB10", "cuda", 20, "", GB10),
        ("NVIDIA B200", "cuda", 20, "", ANY_CUDA),
        ("GB10", "cpu", 4, "int8", Hardware(400e9, 4 * 600e9)),
        ("x", "cpu", 0, "", Hardware(400e9, 200e9)),
        ("x", "cpu", 9999, "float32", Hardware(400e9, 256 * 200e9)),
        ("x", "another", 4, "", ANY_CUDA),
    ],
)
def test_what_a_card_may_claim_of_a_machine_at_most(
    chip: str, accelerator: str, cores: int, arithmetic: str, most: Hardware
) -> None:
    assert most_of(chip, accelerator, cores, arithmetic) == most


def test_speeds_by_hand() -> None:
    """Eight billion weights of 4.5 bits, with 32 layers 4096 wide, at 100 GB/s and 10 TFLOPS."""
    chip = Hardware(100e9, 10e12)
    assert chip.decode_tok_s(4_500_000_000) == pytest.approx(0.6 * 100 / 4.5)
    assert chip.prefill_tok_s(4_500_000_000) == pytest.approx(0.6 * 10e12 / (2 * 8e9))
    assert chip.prefill_context_s(32, 4096) == pytest.approx(4 * 32 * 4096 / (0.6 * 0.5 * 10e12))
    halved = Hardware(100e9, 10e12, 5e12)
    assert halved.prefill_context_s(32, 4096) == pytest.approx(2 * chip.prefill_context_s(32, 4096))
    assert compiles_late("cuda")
    assert not compiles_late("metal")
