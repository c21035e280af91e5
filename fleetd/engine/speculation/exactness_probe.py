"""The exactness probe: does a block of tokens give the bytes of single steps on this device? Run at load.

    canonical    batch of one, a token per pass, as answers are decoded without drafts
    block        the same tokens, n per pass, on a cache of its own, as drafts are verified

Compared are the raw bytes of the logits and of all keys and values, at contexts where kernels change. Other
machines of a group send a hash of what they keep. GPU kernels are chosen by the number of rows, so there
every width is tried, and the verdict holds for contexts up to the largest one that was probed. Where the
arithmetic is exact by construction (``cpu.py``, with MKL) a few widths stand for all, and so do the contexts
at which its own sums are cut.

If even blocks of two tokens have other bytes, and every width was tried, single steps are tried two rows
wide (``canonical_width``): if blocks have the bytes of those, and they cost next to nothing, answers are
decoded so.

The passes are timed as well: they are the first points of the cost curve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Meta

from fleetd import limits
from fleetd.engine.cpu import products
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.sequence_state import batches, rollback
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.sequence_state.made_up import can_repeat, repeat_rows
from fleetd.engine.sequence_state.parts import kept_from
from fleetd.engine.speculation.canonical_width import DEAREST, ROWS, WideSteps, can_widen
from fleetd.plan.chip_speeds import compiles_late

# So that two steps lie on both sides of where sums over keys change their shape in cpu.py: fewer than COLUMNS
# keys, and more than PIECE.
EXACT_CONTEXTS = (products.COLUMNS - 2, products.PIECE - 1)
EXACT_WIDTHS = (4, limits.SPEC_WIDTH)
EXACT_STEPS = 2
# What they take together, in single steps of a model that reads its weights most of the time.
EXACT_COST = 10
# Metal's attention changes kernels at these (MLX 0.32: two passes from 1024 or 4096 keys on, then other block
# counts), CUDA's at 256; a block that starts a little before them straddles them.
KERNEL_CONTEXTS = (250, 1020, 4090, 8186, 16378, 32762, 65530)
KERNEL_STEPS = 16
# Tokens of context that are computed, if need be; longer contexts are made up: a prompt of 64k tokens would
# take minutes, and what it says does not matter.
COMPUTED, COMPUTED_MOST = 32, 256
MADE_UP_BYTES = 512 * limits.MIB
# Steps of one row and of two that are timed in turn; the quickest of each are held against each other.
PRICED_STEPS = 16
# Rows by which mlx-lm's caches grow.
_GROWTH = 256
# Raised when a verdict of before would not be one any more: other comparisons, other arithmetic.
PROBE_VERSION = 6


class ProbePlan(msgspec.Struct, frozen=True):
    """What to try."""

    # Tokens in the cache before the steps and blocks that are compared.
    contexts: tuple[int, ...]
    # Tokens of one block.
    widths: tuple[int, ...]
    # Single steps at each context.
    steps: int
    # True if the verdict holds at any context.
    every: bool
    # True if what is computed for the first time compiles kernels first: then all is computed twice at each
    # context, and the first time counts neither as a price nor as time.
    compiles: bool = False

    @classmethod
    def of(cls, device: str, step_s: float) -> ProbePlan:
        """The plan for a device. ``step_s``: what a single step takes; a slow model is probed with less."""
        if device == "cpu" and products.exact():
            if step_s * EXACT_COST > limits.SPEC_PROBE_S:
                return cls(EXACT_CONTEXTS[:1], EXACT_WIDTHS[-1:], EXACT_STEPS, every=True)
            return cls(EXACT_CONTEXTS, EXACT_WIDTHS, EXACT_STEPS, every=True)
        widths = tuple(range(2, limits.SPEC_WIDTH + 1))
        return cls(KERNEL_CONTEXTS, widths, KERNEL_STEPS, every=False, compiles=compiles_late(device))


class ExactnessVerdict(msgspec.Struct, frozen=True):
    """What the probe has found of a model on this device."""

    # Most tokens of a pass that has the bytes of single steps; 1 if blocks have other bytes.
    width: Annotated[int, Meta(ge=1, le=limits.SPEC_WIDTH)] = 1
    # The text may have so many tokens for that.
    context: Annotated[int, Meta(ge=0)] = 0
    # The verdict for people: "exact: …" or "declined: …".
    text: str = ""
    # Seconds of a pass by its width, for widths that were probed.
    seconds: dict[Annotated[int, Meta(ge=1)], Annotated[float, Meta(gt=0)]] = {}
    # Rows of a single step within ``context``; more than one if that is what makes blocks exact.
    rows: Annotated[int, Meta(ge=1, le=ROWS)] = 1
    # True if a wrong draft undoes its whole pass (``rollback.mark``): what was right is computed again.
    again: bool = False

    @property
    def exact(self) -> bool:
        return self.width > 1

    def at_pace(self, step_s: float) -> ExactnessVerdict:
        """This verdict with the seconds scaled to a single step of ``step_s``."""
        if not (before_s := self.seconds.get(1)):
            return self
        return msgspec.structs.replace(
            self, seconds={n: s * step_s / before_s for n, s in self.seconds.items()}
        )


def most_context(tokens: int) -> int:
    """The longest text of a probe that keeps no more rows than those of ``tokens``: what is behind a context
    is there once, and twice more with room to grow."""
    return (tokens - 2 * _GROWTH) // 3


def probe(
    model: Any,
    *,
    vocab_size: int,
    context_tokens: int,
    plan: ProbePlan,
    clock: Callable[[], float] = time.monotonic,
) -> ExactnessVerdict:
    """Compare blocks with single steps. Contexts that do not fit the model, or its memory, are left out."""
    empty = make_prompt_cache(model)
    if why := rollback.declined(empty):
        return ExactnessVerdict(text=f"declined: {why}")
    window = rollback.room(empty)
    most = min(context_tokens, window)
    verdict = _Probing(model, vocab_size, plan, clock).all(most)
    # A few widths stand for all only if single rows are exact by construction.
    if not verdict.exact and not plan.every and can_widen(empty):
        wide = _Probing(WideSteps(model, ANY), vocab_size, plan, clock, narrow=model).all(most)
        also = wide.text.partition(": ")[2]
        verdict = (
            wide
            if wide.exact
            else msgspec.structs.replace(verdict, text=f"{verdict.text}; two rows wide, {also}")
        )
    mx.clear_cache()
    if verdict.exact and window < ANY:
        # A window that is full loses a row with every token, and cannot have it back.
        text = f"{verdict.text}; only while the text fits {window} tokens"
        verdict = msgspec.structs.replace(verdict, text=text, context=min(verdict.context, window))
    return verdict


class _Probing:
    """``narrow``: the model whose steps are one row wide, if ``model``'s are wider: those are priced."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        plan: ProbePlan,
        clock: Callable[[], float],
        narrow: Any = None,
    ) -> None:
        self._model, self._vocab_size, self._plan, self._clock = model, vocab_size, plan, clock
        self._narrow = narrow
        # The highest price that was accepted.
        self._price = 0.0
        self._again = rollback.needs_mark(make_prompt_cache(model))
        self._width = max(plan.widths)
        self._context = 0
        self._seconds: dict[int, float] = {}
        self._why = ""

    def all(self, most: int) -> ExactnessVerdict:
        spent_s = 0.0
        for context in self._plan.contexts:
            late = spent_s > limits.SPEC_PROBE_KERNELS_S
            if self._context and (late or context + self._width > most):
                break
            context = max(1, min(context, most - self._width))
            begun = self._clock()
            if (base := self._base(context)) is None:
                break
            if self._plan.compiles:
                self._at(context, base)
                begun = self._clock()
            if dear := self._too_dear(context, base):
                self._why = dear
                if self._context:
                    break
                return ExactnessVerdict(text=f"declined: {dear}", seconds=self._seconds)
            self._at(context, base)
            if self._width < 2:
                return ExactnessVerdict(text=f"declined: {self._why}", seconds=self._seconds)
            self._context = context
            spent_s += self._clock() - begun
        if not self._context:
            return ExactnessVerdict(text="declined: there was no room to probe it", seconds=self._seconds)
        text = f"exact: blocks of up to {self._width} tokens"
        if not self._plan.every:
            text += f", contexts of up to {self._context}"
        if self._narrow is not None:
            text += f"; single tokens are computed as {ROWS} rows, {self._price:.2f} times as long as one"
        if self._again:
            text += "; what was right beside a wrong draft is computed again"
        if self._why:
            text += f"; {self._why}"
        until = ANY if self._plan.every else self._context + self._plan.steps
        rows = 1 if self._narrow is None else ROWS
        return ExactnessVerdict(self._width, until, text, self._seconds, rows, self._again)

    def _too_dear(self, context: int, base: list[Any]) -> str:
        """What a wide step costs behind ``base``, if it is more than it may cost; else ""."""
        if self._narrow is None:
            return ""
        sides = [(self._narrow, copy_on_write(base)), (self._model, copy_on_write(base))]
        took_s = [math.inf, math.inf]
        for n in range(1 + PRICED_STEPS):
            for side, (model, cache) in enumerate(sides):
                token = mx.array([[n % self._vocab_size]])
                begun = self._clock()
                mx.eval(model(token, cache=cache), [layer.state for layer in cache])
                # The first step makes room in the cache.
                if n:
                    took_s[side] = min(took_s[side], self._clock() - begun)
                rollback.take_back(cache, 1)
        price = took_s[1] / max(took_s[0], 1e-9)
        if price > DEAREST:
            return f"a step takes {price:.2f} times as long as one row at {context} tokens of context"
        self._price = max(self._price, price)
        return ""

    def _at(self, context: int, base: list[Any]) -> None:
        tokens = [(7919 * i + 3) % self._vocab_size for i in range(max(self._width, self._plan.steps))]
        logits, kept = self._single_steps(base, context, tokens[: self._plan.steps])
        exact = [1]
        # A single step outside of a batch, too: answers without drafts are decoded so while they are alone.
        for width in (1, *sorted(w for w in self._plan.widths if w <= self._width)):
            found, found_kept = self._blocks(base, context, tokens, width)
            count = min(len(found), len(logits))
            if not _same(found[:count], logits[:count]):
                self._why = f"blocks of {width} tokens give other logits at {context} tokens of context"
                break
            if not _same(found_kept, kept):
                what = "keys, values or states"
                self._why = f"blocks of {width} tokens give other {what} at {context} tokens of context"
                break
            exact.append(width)
        self._width = exact[-1]

    def _single_steps(
        self, base: list[Any], context: int, tokens: Sequence[int]
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Logits (V,) of each step and what the steps left behind, as a batch computes them."""
        batched = batches.can_merge(base)
        cache = copy_on_write(base)
        if batched:
            cache = batches.merged([cache])
        logits = [self._pass(cache, [token])[0] for token in tokens]
        if batched:
            cache = batches.extracted(cache, 0)
        return logits, self._kept(cache, context)

    def _blocks(
        self, base: list[Any], context: int, tokens: Sequence[int], width: int
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Logits (V,) of at least as many tokens, ``width`` per pass, and what the passes left behind."""
        cache = copy_on_write(base)
        logits: list[mx.array] = []
        while len(logits) < self._plan.steps:
            at = len(logits)
            mark = rollback.mark(cache)
            rows = self._pass(cache, tokens[at : at + width])
            # What a rejected draft leaves behind must not matter to the next block.
            undone = len(rows) - min(len(rows), self._plan.steps - at)
            logits += rows[: len(rows) - undone]
            if not self._again:
                rollback.take_back(cache, undone)
            elif undone:
                rollback.return_to(cache, mark, len(rows))
                self._pass(cache, tokens[at : at + len(rows) - undone])
        return logits, self._kept(cache, context)

    def _kept(self, cache: list[Any], first: int) -> list[mx.array]:
        """All that is kept of tokens from ``first`` on; of what other machines keep, a hash. ``cache`` cannot
        be used after that."""
        hashes = getattr(self._model, "kept_hashes", None)
        return [*kept_from(cache, first), *(hashes(cache, first) if hashes else ())]

    def _pass(self, cache: list[Any], tokens: Sequence[int]) -> list[mx.array]:
        inputs = mx.array([list(tokens)])
        begun = self._clock()
        logits = self._model(inputs, cache=cache)  # (1, n, V)
        mx.eval(logits, [layer.state for layer in cache])
        took_s = self._clock() - begun
        n = len(tokens)
        self._seconds[n] = min(took_s, self._seconds.get(n, took_s))
        return [logits[0, i] for i in range(n)]

    def _base(self, context: int) -> list[Any] | None:
        """A cache with ``context`` tokens, computed if short, else made up; None if it would be too large."""
        cache: list[Any] = make_prompt_cache(self._model)
        can = can_repeat(cache)
        computed = min(context, COMPUTED if can else COMPUTED_MOST)
        prompt = mx.array([[(31 * i + 7) % self._vocab_size for i in range(computed)]])
        with unread_logits():
            self._model(prompt, cache=cache)
        mx.eval([layer.state for layer in cache])
        if computed == context:
            return cache
        if not can:
            return None
        return cache if repeat_rows(cache, context, MADE_UP_BYTES) else None


def _same(a: Sequence[mx.array], b: Sequence[mx.array]) -> bool:
    """True if all arrays have the same bytes: -0.0 is not 0.0 here, and a NaN equals itself."""
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and bool(np.array_equal(_bytes(x), _bytes(y)))
        for x, y in zip(a, b, strict=True)
    )


def _bytes(array: mx.array) -> Any:
    return np.array(mx.contiguous(array).view(mx.uint8), copy=False)
