"""Turns of prefill are bounded in time."""

from __future__ import annotations

import pytest

from fleetd.engine.chunk_size import ALONE_S, CPU_LARGEST, FIXED, SHARED_S, STEP, FixedChunks, PacedChunks


@pytest.mark.parametrize(
    ("rate", "alone", "shared"), [(10.0, 64, 64), (500.0, 128, 64), (3000.0, 1024, 256), (1e6, 2048, 2048)]
)
def test_fixed_sizes_keep_to_the_bounds_where_they_can(rate: float, alone: int, shared: int) -> None:
    chunks = FixedChunks.of_rate(rate)
    assert (chunks.size(shared=False), chunks.size(shared=True)) == (alone, shared)
    for size, bound in ((alone, ALONE_S), (shared, SHARED_S)):
        assert size / rate <= bound or size == FIXED[0]


def test_fixed_sizes_never_move() -> None:
    chunks = FixedChunks.of_rate(3000.0)
    before = chunks.size(shared=False)
    chunks.took(1024, 60.0)
    assert chunks.size(shared=False) == before


def test_paced_sizes_follow_a_speed_that_falls_with_the_context() -> None:
    chunks = PacedChunks()
    sizes = []
    for tokens_per_s in (500, 300, 200, 100, 50, 20):
        size = chunks.size(shared=False)
        chunks.took(size, size / tokens_per_s)
        sizes.append(chunks.size(shared=False))
        assert sizes[-1] / tokens_per_s <= ALONE_S or sizes[-1] == STEP
        assert chunks.size(shared=True) / tokens_per_s <= SHARED_S or chunks.size(shared=True) == STEP
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= CPU_LARGEST


def test_a_prompts_last_few_tokens_do_not_set_the_pace() -> None:
    chunks = PacedChunks()
    before = chunks.size(shared=False)
    chunks.took(3, 1.0)
    assert chunks.size(shared=False) == before
