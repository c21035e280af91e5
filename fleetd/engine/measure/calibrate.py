"""How fast this device runs this model: measured at load, on contexts of its own that are thrown away.

A few single tokens, then chunks of prompt, each larger than the one before while there is time, alone and
behind a context that was made up. Nothing else computes in this worker meanwhile and nothing of it is kept,
so answers and caches are what they would be without it.

Other programs can only make it slower. So the largest chunks are repeated until the best two runs of each
agree; if they never do, or if other programs had much of the processor, the figures are told as doubtful.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.measure.chunk_size import ALONE_GPU_S
from fleetd.engine.sequence_state.made_up import made_up
from fleetd.hardware.other_load import CpuReading
from fleetd.plan.chip_speeds import compiles_late

DECODE_STEPS = 5
# Share of the time that single tokens may use; chunks have the rest.
DECODE_SHARE = 0.25
# Small ones are slower by the token, large ones take their time: each is expected to take as much longer than
# the one before as it has more tokens, and the first FIRST times as long as a single token, which reads the
# same weights.
CHUNKS = (16, 64, 256)
FIRST = 2
# Of a GPU, which gains from larger chunks until there is work for all of it; a mixture of experts gains until
# there is for each expert. How prompts are cut there is chosen from these. None is measured that would take
# too long to be used.
GPU_CHUNKS = (*CHUNKS, 512, 1024, 2048)
# Contexts to measure behind, the second one only if the first one hardly showed: attention is a small part
# of a large model's work. A chunk behind one is expected to take so many times as long as without.
CONTEXTS = (2048, 8192)
SHOWS = 1.2
BEHIND = 2
# Fewer tokens say more about fixed costs than about attention.
BEHIND_TOKENS = 64
# Runs of one size that agree differ by no more than this factor; so many are tried until the best two do.
AGREE = 1.2
REPEATS = 6
# The share of the processor from which other programs put the figures in doubt.
OTHERS = 0.25
# Why figures by one size of chunk are in doubt: what each chunk costs however short it is cannot be told
# apart, so prompts run faster than they say. Measured again on the same device they say no more.
ONE_SIZE = "there was time for chunks of one size only"
# No more than is kept free for working in.
CONTEXT_BYTES = 256 * limits.MIB


class Measurement(msgspec.Struct, frozen=True):
    """What a calibration has found."""

    # Figures that there was no time to measure are 0. Prefill's are of chunks of ``CHUNKS[-1]``, on the line
    # through the largest two that were measured.
    speed: MeasuredSpeed
    # Seconds of a chunk on an empty context, by its tokens.
    chunk_s: dict[int, float] = {}


def calibrate(model: Any, device: str, vocab_size: int, context_tokens: int) -> Measurement:
    """Measure a whole model on a device of this kind."""
    return calibration(model, device, vocab_size, context_tokens).measured()


def calibration(model: Any, device: str, vocab_size: int, context_tokens: int) -> Calibration:
    """The measurement of a whole model, with the time and the sizes of chunks for a device of this kind."""
    if device == "cpu":
        return Calibration(model, vocab_size, context_tokens, limits.CALIBRATE_S)
    return Calibration(
        model,
        vocab_size,
        context_tokens,
        limits.CALIBRATE_GPU_S,
        GPU_CHUNKS,
        compiles=compiles_late(device),
    )


class Calibration:
    """One measurement, which may be taken in pieces.

    Only the first token is computed without knowing that it fits ``budget_s``. Chunks have ``sizes``.
    ``compiles``: the first run of each kind compiles its kernels; it counts neither as one nor as time.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        context_tokens: int,
        budget_s: float,
        sizes: Sequence[int] = CHUNKS,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], CpuReading | None] = CpuReading.now,
        *,
        compiles: bool = False,
    ) -> None:
        self._sizes, self._compiles = sizes, compiles
        # Tokens of a run and of its context, of those whose kernels are there.
        self._compiled = set[tuple[int, int]]()
        self._model, self._vocab_size, self._context_tokens = model, vocab_size, context_tokens
        self._budget_s, self._clock, self._load = budget_s, clock, load
        self._begun_s, self._load_before = clock(), load()
        # Seconds of each run of a single token, and by size of each chunk on an empty context.
        self._steps: list[float] = []
        self._chunks: dict[int, list[float]] = {}
        self._context_s = 0.0
        # Tells how wide a context's rows are.
        self._short = make_prompt_cache(model)

    def runs(self) -> Iterator[None]:
        """Measure until all is known or the time is up; yields after each run."""
        self._compile(1, 0, self._short)
        while len(self._steps) < DECODE_STEPS and (
            not self._steps or self._fits(self._steps[-1], DECODE_SHARE)
        ):
            self._steps.append(self._run(1, self._short))
            yield
        next_s = FIRST * self._step_s
        for n, after in itertools.pairwise((*self._sizes, 2 * self._sizes[-1])):
            too_long = n > CHUNKS[-1] and next_s > ALONE_GPU_S
            if too_long or n > self._context_tokens or not self._fits(next_s):
                break
            next_s = self._chunk(n) * after / n
            yield
            # Before the next size: if it would take all the time, contexts say more about long prompts.
            if BEHIND_TOKENS <= n <= CHUNKS[-1]:
                yield from self._behind_contexts(n)
        # The first run of a size also finds its memory.
        for n in sorted(self._chunks, reverse=True)[: len(self._sizes) - 1]:
            while self._unsure(n) and self._fits(self._best_s(n)):
                self._chunk(n)
                yield

    def found(self) -> Measurement:
        """What ``runs`` has measured."""
        fixed_s = self._fixed_s()
        speed = MeasuredSpeed(
            prefill_tok_s=self._prefill_tok_s(fixed_s),
            decode_tok_s=1 / max(self._step_s, 1e-6),
            prefill_context_s=self._context_s,
            prefill_fixed_s=fixed_s,
            doubt=self._doubt(),
        )
        return Measurement(speed, {n: min(runs) for n, runs in self._chunks.items()})

    def measured(self) -> Measurement:
        """All runs, one after another."""
        for _ in self.runs():
            pass
        found = self.found()
        self._short = []
        mx.clear_cache()  # nor is its memory kept
        return found

    def _doubt(self) -> str:
        before, after = self._load_before, self._load()
        others = after.others_share(before) if before is not None and after is not None else 0.0
        if others > OTHERS:
            return f"CPU {100 * others:.0f} % busy with other programs when measured"
        if (spread := max(map(_spread, self._chunks.values()), default=1.0)) > AGREE:
            return f"equal chunks took times that differ by {spread - 1:.0%}"
        return ONE_SIZE if len(self._chunks) == 1 and self._context_tokens >= self._sizes[1] else ""

    @property
    def _step_s(self) -> float:
        """Seconds of a single token."""
        return statistics.median(self._steps)

    def _chunk(self, n: int) -> float:
        """Seconds of a chunk on an empty context."""
        self._compile(n, 0)
        took_s = self._run(n, make_prompt_cache(self._model))
        self._chunks.setdefault(n, []).append(took_s)
        return took_s

    def _best_s(self, n: int) -> float:
        return min(self._chunks[n])

    def _unsure(self, n: int) -> bool:
        """True while more runs of this size may tell more."""
        runs = self._chunks[n]
        return len(runs) < 2 or (len(runs) < REPEATS and _spread(runs) > AGREE)

    def _behind_contexts(self, n: int) -> Iterator[None]:
        """Find the seconds per token and token before it, by a chunk of ``n``."""
        for context in CONTEXTS:
            fits = context + n <= self._context_tokens and self._fits(BEHIND * self._best_s(n))
            if fits:
                self._compile(n, context)
            cache = self._behind(context, n) if fits else None
            if cache is None:
                break
            behind_s = self._run(n, cache)
            del cache  # what follows may make up another one
            yield
            if behind_s > SHOWS * self._best_s(n) and self._fits(behind_s):
                # It may have been another program that showed, and each prompt would pay for that.
                again = self._behind(context, n)
                behind_s = min(behind_s, self._run(n, again)) if again is not None else behind_s
                yield
            if context == CONTEXTS[0] and self._fits(self._best_s(n)):
                self._chunk(n)  # as warm as the other
                yield
            found_s = max(0.0, behind_s - self._best_s(n)) / (n * context)
            self._context_s = found_s or self._context_s
            if behind_s > SHOWS * self._best_s(n):
                break

    def _behind(self, context: int, n: int) -> list[Any] | None:
        return made_up(self._short, context, n, CONTEXT_BYTES)

    def _fixed_s(self) -> float:
        """Where the line through the two largest chunks begins."""
        if len(self._chunks) < 2:
            return 0.0
        (few, few_s), (many, many_s) = ((n, self._best_s(n)) for n in sorted(self._chunks)[-2:])
        return min(few_s, max(0.0, (many * few_s - few * many_s) / (many - few)))

    def _prefill_tok_s(self, fixed_s: float) -> float:
        if not self._chunks:
            return 0.0
        size = max(self._chunks)
        took_s = self._best_s(size)
        largest_s = fixed_s + (took_s - fixed_s) * CHUNKS[-1] / size
        return CHUNKS[-1] / max(largest_s, 1e-6)

    def _run(self, n: int, cache: list[Any]) -> float:
        tokens = _tokens(n, self._vocab_size)
        started = self._clock()
        with nullcontext() if n == 1 else unread_logits():
            logits = self._model(tokens, cache=cache)  # (1, n, V); of a prompt they are not computed
        mx.eval([layer.state for layer in cache], *([logits] if n == 1 else []))
        return self._clock() - started

    def _compile(self, n: int, context: int, cache: list[Any] | None = None) -> None:
        """Have the kernels compiled that a run of ``n`` tokens behind ``context`` needs, if they are not."""
        if not self._compiles or (n, context) in self._compiled:
            return
        self._compiled.add((n, context))
        begun_s = self._clock()
        cache = cache or (self._behind(context, n) if context else make_prompt_cache(self._model))
        if cache is not None:
            self._run(n, cache)
        self._begun_s += self._clock() - begun_s

    def _fits(self, expected_s: float, share: float = 1.0) -> bool:
        return self._clock() - self._begun_s + expected_s <= share * self._budget_s


def _spread(runs: Sequence[float]) -> float:
    """How many times as long the second best run took as the best; 1 for a single run."""
    best_s, *others = sorted(runs)
    return others[0] / max(best_s, 1e-9) if others else 1.0


def _tokens(count: int, vocab_size: int) -> mx.array:
    """Different ones: a mixture of experts would send equal tokens all the same way."""
    tokens = mx.array([[(7919 * i + 1) % vocab_size for i in range(count)]])
    mx.eval(tokens)
    return tokens
