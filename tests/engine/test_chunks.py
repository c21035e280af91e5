"""Turns of prefill are bounded in time."""

from __future__ import annotations

import pytest

from fleetd.engine.measure.chunk_size import (
    ALONE_GPU_S,
    ALONE_S,
    CPU_LARGEST,
    FLAT,
    KNEE,
    SHARED_S,
    SMALLEST,
    STEP,
    MeasuredChunks,
    PacedChunks,
)

SIZES = (16, 64, 256, 512, 1024, 2048)


def line(fixed_s: float, tokens_per_s: float) -> dict[int, float]:
    return {n: fixed_s + n / tokens_per_s for n in SIZES}


@pytest.mark.parametrize(
    ("seconds", "alone", "shared"),
    [
        # All weights are read for each chunk, as a mixture of experts does: far to the right.
        (line(0.3, 4000.0), 2048, 512),
        # A chunk of 64 is nearly as fast as any.
        (line(0.001, 3000.0), 64, 64),
        (line(0.01, 3000.0), 512, 256),
        # Slow, and 512 would gain too little.
        (line(0.05, 300.0), 256, 64),
        # Slow, and larger chunks would take longer than two seconds.
        (line(0.5, 500.0), 512, 64),
        # Only the small sizes were measured.
        ({16: 0.1, 64: 0.3}, 64, 64),
        ({}, SMALLEST, SMALLEST),
    ],
)
def test_sizes_are_at_the_knee_of_what_was_measured(
    seconds: dict[int, float], alone: int, shared: int
) -> None:
    chunks = MeasuredChunks(seconds)
    assert (chunks.size(shared=False), chunks.size(shared=True)) == (alone, shared)


@pytest.mark.parametrize("fixed_s", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("rate", [10.0, 300.0, 3000.0, 1e6])
@pytest.mark.parametrize("shared", [False, True])
def test_measured_sizes_keep_to_the_bounds_and_are_nearly_the_best(
    fixed_s: float, rate: float, *, shared: bool
) -> None:
    seconds = line(fixed_s, rate)
    size = MeasuredChunks(seconds).size(shared=shared)
    bound = max(SHARED_S, FLAT * seconds[SMALLEST]) if shared else ALONE_GPU_S
    assert seconds[size] <= bound or size == SMALLEST
    allowed = [n for n in SIZES if n >= SMALLEST and seconds[n] <= bound]
    assert all(size / seconds[size] >= KNEE * n / seconds[n] for n in allowed)


def test_sizes_fall_with_the_place_in_the_prompt_and_with_nothing_else() -> None:
    chunks = MeasuredChunks(line(0.1, 4000.0), context_s=1e-8)
    sizes = [chunks.size(shared=False, context=context) for context in range(0, 200_000, 10_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    chunks.learn(1024, 60.0)
    assert [chunks.size(shared=False, context=context) for context in range(0, 200_000, 10_000)] == sizes


def test_paced_sizes_follow_a_speed_that_falls_with_the_context() -> None:
    chunks = PacedChunks()
    sizes = []
    for tokens_per_s in (500, 300, 200, 100, 50, 20):
        size = chunks.size(shared=False)
        chunks.learn(size, size / tokens_per_s)
        sizes.append(chunks.size(shared=False))
        assert sizes[-1] / tokens_per_s <= ALONE_S or sizes[-1] == STEP
        assert chunks.size(shared=True) / tokens_per_s <= SHARED_S or chunks.size(shared=True) == STEP
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= CPU_LARGEST


def test_a_prompts_last_few_tokens_do_not_set_the_pace() -> None:
    chunks = PacedChunks()
    before = chunks.size(shared=False)
    chunks.learn(3, 1.0)
    assert chunks.size(shared=False) == before
