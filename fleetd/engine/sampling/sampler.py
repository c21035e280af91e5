"""Seeded sampling: the same seed gives the same answer, alone or in a batch.

A token is drawn as ``argmax(processed / temperature + Gumbel(key))`` with a key that depends only on the
request's seed and the token's index in the answer (the Gumbel-max trick). Nothing is drawn from a shared
generator, so neighbours in a batch cannot shift it, and speculative verification can redraw the same noise.

Several rows are drawn in one go (``drawn``), with the noise and the arithmetic that each would have alone.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)

from fleetd.engine.sampling.parameters import Sampling, SamplingDefaults

# (n, V) logits or log-probabilities → (n,) tokens.
Sampler = Callable[[mx.array], mx.array]
# (the tokens so far, prompt included, int32; the next token's logits (1, V)) -> (1, V). It is a pure function
# of both: it is called for drafts that are refused later, and for the same tokens again. What has a state, as
# a grammar has, is masked before (``masked``).
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_U64 = (1 << 64) - 1

# Tokens that penalties look back on: all of them (mlx-lm's default is the last 20).
PENALTY_CONTEXT = 1 << 20
# Below these a distribution is its best token in all but name, and f32 can no longer tell.
GREEDY_TEMPERATURE = 1e-5
GREEDY_TOP_P = 1e-6


def masked(logits: mx.array, allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> mx.array:
    """Logits (n, V), -inf where ``allowed`` (n, v) is False, and for the tokens that it does not tell of."""
    beyond = logits.shape[-1] - allowed.shape[-1]
    if beyond > 0:
        allowed = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, beyond)])
    # A sum with 0 and -inf, whose bits are made here: on a CPU it takes a fifth of the time of mx.where.
    whole, infinity = _MINUS_INFINITY[logits.dtype]
    bits = allowed.astype(whole)
    # In place: memory for another of them takes longer than the arithmetic.
    np.subtract(bits, whole(1), out=bits)
    np.bitwise_and(bits, whole(infinity), out=bits)
    return logits + mx.array(bits).view(logits.dtype)


# By the type of logits: the integer of its size, and the bits of -inf.
_MINUS_INFINITY: dict[mx.Dtype, tuple[Any, int]] = {
    mx.float32: (np.uint32, 0xFF800000),
    mx.float16: (np.uint16, 0xFC00),
    mx.bfloat16: (np.uint16, 0xFF80),
}


def _noise_key(seed: int, index: int) -> list[int]:
    """The random key of token ``index``: splitmix64 of the pair (Steele et al., OOPSLA 2014).

    Any token's noise can be had without drawing those before it.
    """
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    z ^= z >> 31
    return [z >> 32, z & 0xFFFFFFFF]


class SeededSampler:
    """Draws token ``index`` of one answer from (1, V) log-probabilities, and goes on to the next.

    A caller that draws tokens out of order, or anew, sets ``index`` first.

    Temperature comes before the filters, as OpenAI's and vLLM's users expect (mlx-lm filters first).
    """

    def __init__(self, choice: SamplingDefaults, seed: int | None) -> None:
        self.filters = _Filters(choice.top_k, choice.top_p, choice.min_p)
        self.scale = 1.0 / choice.temperature
        # A request without a seed gets a fresh one, so there is one code path.
        self._seed = secrets.randbits(64) if seed is None else seed & _U64
        self.index = 0

    def next_key(self) -> list[int]:
        """The key of the token that is drawn now."""
        key = _noise_key(self._seed, self.index)
        self.index += 1
        return key

    def __call__(self, logprobs: mx.array) -> mx.array:  # (1, V) -> (1,)
        return drawn(logprobs, [self])


class _Filters(msgspec.Struct, frozen=True):
    """Which tokens can be drawn: the parameters with ``alike`` in the table."""

    top_k: int
    top_p: float
    min_p: float

    def __call__(self, logprobs: mx.array) -> mx.array:  # (n, V) -> (n, V)
        # Only top_p needs shares of the whole; the others compare tokens with each other.
        if self.top_p < 1.0:
            logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        if self.top_p < 1.0:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0.0:
            logprobs = apply_min_p(logprobs, self.min_p)
        return logprobs


def drawn(logprobs: mx.array, rows: Sequence[SeededSampler | None]) -> mx.array:  # (n, V) -> (n,)
    """A token of each row by its sampler; None takes the most probable one.

    The ``filters`` of all samplers must be equal.
    """
    scales = mx.array([[1.0 if row is None else row.scale] for row in rows])
    keys = [[0, 0] if row is None else row.next_key() for row in rows]
    filters = next(row.filters for row in rows if row is not None)
    found = mx.argmax(filters(logprobs * scales) + _noise(keys, logprobs.shape[-1]), axis=-1)
    if None in rows:
        found = mx.where(mx.array([row is None for row in rows]), mx.argmax(logprobs, axis=-1), found)
    return found


def _noise(keys: list[list[int]], width: int) -> mx.array:  # (n, width)
    """Gumbel noise, a key's in each row. The bits belong to the key, however many rows are drawn."""
    if len(keys) == 1:
        return mx.random.gumbel((1, width), key=mx.array(keys[0], dtype=mx.uint32))
    each = mx.vmap(lambda key: mx.random.gumbel((width,), key=key))
    found: mx.array = each(mx.array(keys, dtype=mx.uint32))
    return found


class BatchSampler:
    """The sampler of every row of an mlx-lm batch. mlx-lm draws all rows in one call if theirs is one object,
    but does not say which rows a call is for: ``expect`` says it before each step.
    """

    def __init__(self) -> None:
        self._due: deque[Sequence[Sampler]] = deque()

    def expect(self, *calls: Sequence[Sampler]) -> None:
        """The samplers of the rows of each call to come, in order; none is made for no rows."""
        self._due = deque(rows for rows in calls if rows)

    @property
    def drew_all(self) -> bool:
        """True if every call that was expected has been made."""
        return not self._due

    def __call__(self, logprobs: mx.array) -> mx.array:  # (n, V) -> (n,)
        rows = self._due.popleft()
        if len(rows) != logprobs.shape[0]:
            raise RuntimeError(f"{logprobs.shape[0]} rows are to be drawn where {len(rows)} were expected")
        seeded = [row if isinstance(row, SeededSampler) else None for row in rows]
        filters = {row.filters for row in seeded if row is not None}
        if not filters:
            return greedy_sampler(logprobs)  # type: ignore[no-any-return]
        if len(filters) == 1:
            return drawn(logprobs, seeded)
        return mx.concatenate([row(logprobs[i : i + 1]) for i, row in enumerate(rows)])


_NEUTRAL = SamplingDefaults()


def make_sampler(sampling: Sampling, defaults: SamplingDefaults = _NEUTRAL) -> Sampler:
    """The sampler of one answer. All greedy requests share one function."""
    choice = defaults.asked(sampling)
    if choice.temperature < GREEDY_TEMPERATURE or choice.top_p < GREEDY_TOP_P or choice.top_k == 1:
        shared: Sampler = greedy_sampler
        return shared
    return SeededSampler(choice, sampling.seed)


def without_ends(ends: Collection[int], min_tokens: int, prompt_tokens: int) -> LogitsProcessor:
    """A processor that keeps end tokens from being chosen until the answer has ``min_tokens`` tokens."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        # A folder may name ends that its model has no logits for: to write behind a row ends the process.
        columns = [end for end in ends if 0 <= end < logits.shape[-1]]
        if tokens.size - prompt_tokens >= min_tokens or not columns:
            return logits
        return mx.put_along_axis(logits, mx.array([columns]), mx.array(-mx.inf, logits.dtype), axis=-1)

    return processor


def make_processors(
    sampling: Sampling, defaults: SamplingDefaults = _NEUTRAL, prompt_tokens: int = 0
) -> list[LogitsProcessor]:
    """Logit bias and penalties; empty when none is asked for.

    As OpenAI and vLLM have it, the repetition penalty looks at the prompt and the answer, the presence and
    frequency penalties at the answer only: a long prompt must not forbid its own words.
    """
    repetition = defaults.asked(sampling).repetition_penalty
    on_all: list[LogitsProcessor] = make_logits_processors(
        logit_bias=sampling.logit_bias or None,
        repetition_penalty=repetition if repetition != 1.0 else None,
        repetition_context_size=PENALTY_CONTEXT,
    )
    on_answer: list[LogitsProcessor] = make_logits_processors(
        presence_penalty=sampling.presence_penalty or None,
        presence_context_size=PENALTY_CONTEXT,
        frequency_penalty=sampling.frequency_penalty or None,
        frequency_context_size=PENALTY_CONTEXT,
    )

    def after_prompt(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(tokens[prompt_tokens:], logits)

    return on_all + [after_prompt(processor) for processor in on_answer]
