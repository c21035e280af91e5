"""Scoring a prompt: what it costs against prefill, how it divides among machines, and what it finds."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from bench.figures import Bar, Figure, Measured, at_least, wilson
from bench.harness import prompts
from bench.harness.cores import worker_on
from bench.harness.daemon import MODEL
from bench.harness.samples import Samples
from fleetd.compression.token_scores import SegmentScores, merge
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Generate, Prefill, Profile, Sampling, Score, Scored, TokenPrompt
from fleetd.process import observe

QUICK_RUNS = 1
TOKENS, NEEDLE_TOKENS = 8000, 1000
CASES, QUICK_CASES = 40, 10
SEGMENTS = (1, 2, 4)
# Of all tokens, the share that is kept: the middle one of the needle's must be among them.
KEPT = 0.1
_THINGS = ("archive", "vault", "greenhouse", "lighthouse", "observatory", "workshop", "library", "foundry")


@dataclass(frozen=True)
class Case:
    """``text`` with a needle in characters [start, end), and what asks for it behind ``asked``."""

    text: str
    start: int
    end: int
    asked: int


# Scores of one segment of a case; 0: to the profile's last layer.
Scorer = Callable[[Case, tuple[int, int], int], Awaitable[Scored]]


def measure(runs: int) -> Measured:
    observe.configure("warning")  # the supervisor of the workers is in this process
    return asyncio.run(_measure(runs))


async def _measure(runs: int) -> Measured:
    async with AsyncExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))[:2]
        engines = [await stack.enter_async_context(worker_on(core, prefix_cache_bytes=0)) for core in cores]
        profile = (await _scored(engines[0], None, _case(1, 300), (0, 0), 0)).profile
        scorers = [partial(_scored, engine, profile) for engine in engines]
        seen = Samples()
        for run in range(runs):
            await _times(engines[0], scorers, _case(7000 + run, TOKENS), seen)
        figures = [
            Figure("Scoring, of the time of prefill by the same model", "%", seen["share"]),
            Figure("Two scorers against one", "x", seen["two"], at_least(1.8)),
            Figure("Four scorers against one, modelled", "x", seen["four"], at_least(3.2)),
        ]
        figures += await _recalls(scorers, profile, CASES if runs > QUICK_RUNS else QUICK_CASES)
    return Measured(
        figures,
        f"SmolLM2-135M scores with {len(profile.heads)} heads in the first {profile.exit_layer} of its 30 "
        "layers, as its shipped profile says. Two workers, one core each. Prompts of "
        f"{TOKENS:,} tokens of made-up prose, each its own. Four scorers are modelled: the slowest quarter "
        "of the prompt on one of the workers, the other one idle. Recall: a sentence at a random depth in "
        f"{NEEDLE_TOKENS:,} tokens is found if the middle one of its tokens ranks in the best {KEPT:.0%}; "
        "the notes give 95 % intervals. An earlier exit than the profile's asks fewer of its heads.",
    )


async def _times(engine: EngineProcess, scorers: Sequence[Scorer], case: Case, seen: Samples) -> None:
    one_s = await _seconds(scorers[0](case, (0, 0), 0))
    halves = zip(scorers, pairwise(_edges(case, 2)), strict=True)
    two_s = await _seconds(asyncio.gather(*(scorer(case, half, 0) for scorer, half in halves)))
    quarters = [await _seconds(scorers[0](case, part, 0)) for part in pairwise(_edges(case, 4))]
    seen.add(two=one_s / two_s, four=one_s / max(quarters))
    if not seen["share"]:
        # Minutes on one core, and no bar: once.
        seen.add(share=one_s / await _prefill_s(engine, prompts.encoded(MODEL, case.text)))


async def _seconds(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def _recalls(scorers: Sequence[Scorer], profile: Profile, count: int) -> list[Figure]:
    figures = []
    for segments in SEGMENTS:
        found = await _found(scorers, count, segments, 0)
        title = f"Needles found, scored in {segments} segment{'s' if segments > 1 else ''}"
        bar = Bar(at_least=True, value=0.97) if segments == 1 else None
        figures.append(Figure(title, "%", [found / count], bar, note=_interval(found, count)))
    for exit_layer in sorted({layer + 1 for layer, _ in profile.heads})[:-1]:
        found = await _found(scorers, count, 1, exit_layer)
        title = f"Needles found, exit after layer {exit_layer}"
        figures.append(Figure(title, "%", [found / count], note=_interval(found, count)))
    return figures


async def _found(scorers: Sequence[Scorer], count: int, segments: int, exit_layer: int) -> int:
    async def of(scorer: Scorer, numbers: range) -> int:
        found = 0
        for number in numbers:
            case = _case(number, NEEDLE_TOKENS)
            parts = [await scorer(case, part, exit_layer) for part in pairwise(_edges(case, segments))]
            found += _ranks(case, parts)
        return found

    shares = (of(scorer, range(n, count, len(scorers))) for n, scorer in enumerate(scorers))
    return sum(await asyncio.gather(*shares))


def _ranks(case: Case, parts: Sequence[Scored]) -> bool:
    tokens = merge([SegmentScores.unpack(part.scores) for part in parts])
    order = (-tokens.values).argsort(kind="stable")
    ranks = order.argsort()
    needle = sorted(ranks[(tokens.starts < case.end) & (tokens.ends > case.start)])
    return bool(needle[len(needle) // 2] < KEPT * len(ranks))


async def _scored(
    engine: EngineProcess, profile: Profile | None, case: Case, segment: tuple[int, int], exit_layer: int
) -> Scored:
    questions = [(case.asked, len(case.text))]
    score = Score("bench", case.text, questions, segment, exit_layer=exit_layer, profile=profile)
    return await engine.ask(score)


async def _prefill_s(engine: EngineProcess, ids: list[int]) -> float:
    """From the request to the end of its prefill."""
    begun = time.perf_counter()
    request = Generate("dense", TokenPrompt(ids), Sampling(temperature=0.0), max_tokens=1)
    done = begun
    async for event in engine.stream(request):
        if isinstance(event, Prefill):
            done = time.perf_counter()
    return done - begun


def _case(seed: int, tokens: int) -> Case:
    """Prose of about ``tokens`` tokens with one sentence that the question at its end asks for."""
    chance = random.Random(seed)
    thing = chance.choice(_THINGS)
    needle = f"The code of the {thing} is {chance.randrange(10_000, 100_000)}."
    said = prompts.text(MODEL, seed, tokens - 40).split(". ")
    at = chance.randrange(len(said))
    before = ". ".join(said[:at]) + ". " if at else ""
    text = before + needle + " " + ". ".join(said[at:])
    question = f"\n\nWhat is the code of the {thing}?"
    return Case(text + question, len(before), len(before) + len(needle), len(text))


def _edges(case: Case, count: int) -> list[int]:
    edges = [case.asked * n // count for n in range(count)]
    return [*(case.text.rfind(" ", 0, edge) + 1 if edge else 0 for edge in edges), len(case.text)]


def _interval(found: int, count: int) -> str:
    low, high = wilson(found, count)
    return f"{count} prompts, {low:.0%} to {high:.0%}"
