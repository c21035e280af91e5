"""How fast this device runs this model: measured at load, on contexts of its own that are thrown away.

A few single tokens, then chunks of prompt, each larger than the one before while there is time. Nothing else
computes meanwhile and nothing of it is kept, so answers and caches are what they would be without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

DECODE_STEPS = 5
# Share of the time that single tokens may use; chunks have the rest.
DECODE_SHARE = 0.25
# Small ones are slower by the token, large ones take their time: each is expected to take GROWTH times as
# long as the one before, and the first FIRST times as long as a single token, which reads the same weights.
CHUNKS = (16, 64, 256)
FIRST, GROWTH = 2, 4


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of one request alone on a short context; 0 where there was no time to measure."""

    prefill_tok_s: float
    decode_tok_s: float


def calibrate(
    model: Any,
    *,
    vocab_size: int,
    context_tokens: int,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Speeds:
    """Measure. Only the first token is computed without knowing that it fits ``budget_s``.

    The model's kernels have to be compiled: one prefill and one token must have been computed before.
    """
    begun = clock()

    def run(tokens: mx.array, cache: list[Any]) -> float:
        started = clock()
        logits = model(tokens, cache=cache)  # (1, n, V); of a prompt they are not computed
        mx.eval([layer.state for layer in cache], *([logits] if tokens.size == 1 else []))
        return clock() - started

    def fits(expected_s: float, share: float = 1.0) -> bool:
        return clock() - begun + expected_s <= share * budget_s

    cache = make_prompt_cache(model)
    steps: list[float] = []
    while len(steps) < DECODE_STEPS and (not steps or fits(steps[-1], DECODE_SHARE)):
        steps.append(run(_tokens(1, vocab_size), cache))
    step_s = statistics.median(steps)

    size, best_s, next_s = 0, step_s, FIRST * step_s
    for n in CHUNKS:
        if n > context_tokens or not fits(next_s):
            break
        size, best_s = n, run(_tokens(n, vocab_size), make_prompt_cache(model))
        next_s = GROWTH * best_s
    # The first run of a size also finds its memory.
    if size and fits(best_s):
        best_s = min(best_s, run(_tokens(size, vocab_size), make_prompt_cache(model)))
    del cache
    mx.clear_cache()  # nor is its memory kept
    return Speeds(size / max(best_s, 1e-6), 1 / max(step_s, 1e-6))


def _tokens(count: int, vocab_size: int) -> mx.array:
    """Different ones: a mixture of experts would send equal tokens all the same way."""
    tokens = mx.array([[(7919 * i + 1) % vocab_size for i in range(count)]])
    mx.eval(tokens)
    return tokens
