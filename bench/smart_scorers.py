"""One text scored by one machine, and by two side by side: workers with a core each, and no daemons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence

from bench import prompts
from bench.figures import Figure, at_least
from bench.shard_core import starting_on, why_no_cores
from bench.throwaway import MODEL
from fleetd import observe
from fleetd.engine.protocol import Profile, Score, Scored
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.supervisor import EngineProcess
from fleetd.jobs.smart.scoring import cut
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.plan.costs import Speed
from fleetd.plan.smart import AROUND_TOKENS, Scorer, Segments

_QUESTION = "\n\nWhat did the clockmaker carry across the bridge?"
_NOBODY = Scorer("", "this", Speed(1.0))


def measure(runs: int, length: int) -> list[Figure]:
    """Nothing where there are no two cores."""
    if why_no_cores():
        return []
    observe.configure("warning")  # the supervisor of the workers is in this process
    return asyncio.run(_measure(runs, length))


async def _measure(runs: int, length: int) -> list[Figure]:
    cores = sorted(os.sched_getaffinity(0))
    two, four = [], []
    async with _worker(cores[0]) as first, _worker(cores[1]) as second:
        profile = (await _score(first, _text(1, 600), (0, 0), None))[1].profile
        for run in range(runs):
            text = _text(500 + run, length)
            halves = [cut(text, Segments(_NOBODY, share, share + 0.5))[0] for share in (0.0, 0.5)]
            whole_s = (await _score(first, text, (0, 0), profile))[0]
            begun = time.perf_counter()
            await asyncio.gather(
                *(
                    _score(engine, text, half, profile)
                    for engine, half in zip((first, second), halves, strict=True)
                )
            )
            half_s = time.perf_counter() - begun
            two.append(whole_s / half_s)
            four.append(whole_s / _quarter_s(length, whole_s, half_s))
    return [
        Figure(f"two scorers against one, {length} tokens, a core each", "x", two, at_least(1.8)),
        Figure("four scorers against one, modelled from these", "x", four, at_least(3.2)),
    ]


def _quarter_s(length: int, whole_s: float, half_s: float) -> float:
    """From T(n) = a n + b n^2 through two lengths, with what is put around a segment."""
    n, m, k = (length / parts + AROUND_TOKENS for parts in (1, 2, 4))
    b = max(0.0, (whole_s / n - half_s / m) / (n - m))
    a = half_s / m - b * m
    return a * k + b * k**2


def _text(seed: int, length: int) -> str:
    return prompts.text(MODEL, seed, length) + _QUESTION


async def _score(
    engine: EngineProcess, text: str, segment: Sequence[int], profile: Profile | None
) -> tuple[float, Scored]:
    asked = [(len(text) - len(_QUESTION), len(text))]
    score = Score(f"s{time.perf_counter_ns()}", text, asked, (segment[0], segment[1]), profile=profile)
    begun = time.perf_counter()
    async with contextlib.aclosing(engine.score(score)) as events:
        async for event in events:
            if isinstance(event, Scored):
                return time.perf_counter() - begun, event
    raise RuntimeError("the engine ended without scores")


@contextlib.asynccontextmanager
async def _worker(core: int) -> AsyncIterator[EngineProcess]:
    settings = WorkerSettings(name=DEFAULT_MODEL, path=str(MODEL), threads=1, prefix_cache_bytes=1)
    engine = EngineProcess(settings)
    with starting_on(core, None, os.getpid()):
        await engine.start()
    try:
        async for _ in engine.loaded():
            pass
        yield engine
    finally:
        await engine.stop()
