"""What is measured with a model that is loaded in this process, each within a share of the time.

mlx-lm decodes and prefills on the same weights and, on a CPU, with the same products (``cpu/products.py``).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from fleetd import limits
from fleetd.control.hardware_proof import ChunkProof, SharedProof, SpeedProof, WidthProof
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT
from fleetd.engine.protocol import Accepted
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.speculation.exactness_probe import KERNEL_CONTEXTS, KERNEL_STEPS, ProbePlan, probe
from fleetd.errors import EngineError
from fleetd.plan.prefill.split import KINDS, Split, SplitKind, halved
from fleetd.proof.local_worker import LocalWorker, TimedAnswer

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)
# Of each size, the best of so many.
CHUNK_RUNS = 2
# Tokens of an answer, and runs of each engine, by turns.
ANSWER_TOKENS, RUNS = 64, 3
PREFILL_TOKENS = (256, 4096)
# Of one prefill: what the figure is worth, not more.
PREFILL_S = 8.0
SHARE_CHUNK, SHARE_CHUNKS = 128, 4
# Fewer say nothing of a speed.
LEAST_TOKENS = 16
# How many texts are tried for an answer of so many.
TEXTS = 8


def widths(worker: LocalWorker, within_s: float) -> Iterator[WidthProof]:
    """Every width at every context at which kernels change, the short contexts first."""
    ends = time.monotonic() + within_s
    for context in KERNEL_CONTEXTS:
        if context + limits.SPEC_WIDTH > worker.facts.shape.context_tokens:
            return
        for width in range(2, limits.SPEC_WIDTH + 1):
            if time.monotonic() > ends:
                return
            found = probe(
                worker.loaded.model,
                vocab_size=worker.facts.vocab_size,
                context_tokens=worker.facts.shape.context_tokens,
                plan=ProbePlan((context,), (width,), KERNEL_STEPS, every=False),
            )
            if not found.seconds:
                return  # no room for this context, or for any
            rows = int(getattr(found, "rows", 1))
            yield WidthProof(context, width, found.exact, found.seconds.get(width, 0.0), rows)


def chunks(worker: LocalWorker, within_s: float) -> Iterator[ChunkProof]:
    """The speed of prefill by the size of its chunks, while there is time for the next one."""
    ends, took_s = time.monotonic() + within_s, 0.0
    for size in CHUNKS:
        if size > worker.facts.shape.context_tokens or time.monotonic() + 2 * CHUNK_RUNS * took_s > ends:
            return
        mx.reset_peak_memory()
        took_s = min(_prefill_s(worker, size) for _ in range(CHUNK_RUNS))
        yield ChunkProof(size, size / took_s, int(mx.get_peak_memory()))


def _prefill_s(worker: LocalWorker, size: int) -> float:
    model = worker.loaded.model
    prefiller = Prefiller(model, _drawn(worker, size + 1), make_prompt_cache(model))
    begun = time.perf_counter()
    prefiller.step(size)
    return time.perf_counter() - begun


def prefill(worker: LocalWorker, within_s: float) -> Iterator[SpeedProof]:
    """Time to the first token of a prompt that neither has seen, as tokens per second."""
    least, most = PREFILL_TOKENS
    fitting = int(worker.facts.speed.prefill_tok_s * min(PREFILL_S, within_s / (2 * RUNS + 2)))
    tokens = max(least, min(most, fitting, worker.facts.shape.context_tokens - LEAST_TOKENS))

    def ours() -> float:
        return tokens / worker.ask(_drawn(worker, tokens), 1).first_s

    def theirs() -> float:
        return tokens / _mlx_lm(worker, _drawn(worker, tokens), 1).first_s

    yield _by_turns("prefill", tokens, ours, theirs, within_s)


def decode(worker: LocalWorker, within_s: float) -> Iterator[SpeedProof]:
    """Tokens per second after the first one: greedy, sampled, and with drafts as the settings have them."""
    modes = (("greedy", 0.0, False), ("temperature 0.8", 0.8, False), ("greedy, drafts", 0.0, True))
    each_s = within_s / len(modes)
    # Of the warm-up of each engine, and of all runs.
    fitting = int(worker.facts.speed.decode_tok_s * each_s / (2 * RUNS + 1))
    tokens = max(LEAST_TOKENS, min(ANSWER_TOKENS, fitting))
    for mode, temperature, drafts in modes:

        def ours(temperature: float = temperature, drafts: bool = drafts) -> float:
            return _rate(
                lambda: worker.ask(_counting(worker), tokens, temperature=temperature, drafts=drafts)
            )

        def theirs(temperature: float = temperature) -> float:
            return _rate(lambda: _mlx_lm(worker, _counting(worker), tokens, temperature))

        yield _by_turns(mode, tokens, ours, theirs, each_s)


def _by_turns(
    mode: str, tokens: int, ours: Callable[[], float], theirs: Callable[[], float], within_s: float
) -> SpeedProof:
    """Medians of alternating runs. The first of each compiles kernels: neither it nor its time counts."""
    ours(), theirs()
    ends = time.monotonic() + within_s
    rates = [(ours(), theirs())]
    while len(rates) < RUNS and time.monotonic() < ends:
        rates.append((ours(), theirs()))
    medians = [statistics.median(column) for column in zip(*rates, strict=True)]
    return SpeedProof(mode, tokens, len(rates), *medians)


def _mlx_lm(worker: LocalWorker, tokens: list[int], max_tokens: int, temperature: float = 0.0) -> TimedAnswer:
    mx.random.seed(1)
    begun = time.perf_counter()
    answer = stream_generate(
        worker.loaded.model,
        worker.loaded.tokenizer,
        tokens,
        max_tokens=max_tokens,
        sampler=make_sampler(temp=temperature),
    )
    times = [time.perf_counter() for _ in answer]
    # The last of them may be a second one without a token of its own.
    count = min(len(times), max_tokens)
    rate = (count - 1) / (times[count - 1] - times[0]) if count > 1 else 0.0
    return TimedAnswer(times[0] - begun, count, rate)


def _rate(ask: Callable[[], TimedAnswer]) -> float:
    """Tokens per second of an answer that is long enough: a model may end one early, whatever the text."""
    for _ in range(TEXTS):
        if (answer := ask()).tokens >= LEAST_TOKENS:
            return answer.tok_s
    raise EngineError(f"The model ended each of {TEXTS} answers before {LEAST_TOKENS} tokens.")


def shared(worker: LocalWorker, within_s: float) -> Iterator[SharedProof]:
    """A prompt by layers and by tokens, and the bytes of its keys and values against a local prefill."""
    del within_s  # bounded by the size of the prompt
    layers, count = worker.facts.last_layer, SHARE_CHUNK * SHARE_CHUNKS
    for kind in KINDS:
        tokens = _drawn(worker, count + 1)
        worker.share(tokens, partial(in_two, kind, layers))
        hit = worker.compute.prefix.fetch(tokens, DENSE, EQUIVALENT)
        same = _same(hit.cache, _local(worker, tokens)) if hit.tokens == count else None
        yield SharedProof(kind, count, same)


def in_two(kind: SplitKind, layers: int, accepted: Accepted) -> Split:
    """The first half for the helper.

    Of a small vocabulary a drawn prompt may begin as an earlier one did: that much is cached then, and chunks
    are counted from there.
    """
    return halved(kind, layers, range(accepted.cached, accepted.prompt_tokens - 1), SHARE_CHUNK)


def _local(worker: LocalWorker, tokens: list[int]) -> list[Any]:
    model = worker.loaded.model
    alone = Prefiller(model, tokens, make_prompt_cache(model))
    while alone.remaining:
        alone.step(SHARE_CHUNK)
    return alone.cache


def _same(mine: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(_kept(mine), _kept(theirs), strict=True)
    return all(np.array_equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _kept(cache: list[Any]) -> list[mx.array]:
    """All keys, values and running states."""
    return [array for part in all_parts(cache) for array in kind_of(part).kept(part) if array is not None]


def _bytes(array: mx.array) -> Any:
    return np.array(mx.contiguous(array).view(mx.uint8), copy=False)


_random = random.Random(20)  # noqa: S311 — prompts, not secrets


def _drawn(worker: LocalWorker, count: int) -> list[int]:
    """Tokens of which no cache has seen more than the first few."""
    return [_random.randrange(worker.facts.vocab_size) for _ in range(count)]


def _counting(worker: LocalWorker) -> list[int]:
    """A text that models go on with for long, each time another one."""
    first = _random.randrange(100, 900)
    text = ", ".join(str(number) for number in range(first, first + 40)) + ","
    return list(worker.loaded.tokenizer.encode(text))
