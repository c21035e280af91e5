"""Scoring a prompt: what it costs against prefill, how it divides among machines, and what it finds."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

from bench.figures import Bar, Figure, Measured, at_least
from bench.harness import prompts
from bench.harness.daemon import MODEL
from fleetd.compression.token_scores import SegmentScores, merge
from fleetd.engine.pool import EnginePool, PoolOptions
from fleetd.engine.protocol import Generate, Prefill, Profile, Sampling, Score, Scored, TokenPrompt
from fleetd.models.folder import ModelFolder

QUICK_RUNS = 1
TOKENS, NEEDLE_TOKENS = 8000, 1000
CASES, QUICK_CASES = 40, 10
SEGMENTS = (1, 2, 4)
# Of all tokens, the share that is kept: the middle one of the needle's must be among them.
KEPT = 0.1
# A normal interval of 95 %, by Wilson's formula.
_Z = 1.96
_THINGS = ("archive", "vault", "greenhouse", "lighthouse", "observatory", "workshop", "library", "foundry")


@dataclass(frozen=True)
class Case:
    """``text`` with a needle in characters [start, end), and what asks for it behind ``asked``."""

    text: str
    start: int
    end: int
    asked: int


def measure(runs: int) -> Measured:
    return asyncio.run(_measure(runs))


async def _measure(runs: int) -> Measured:
    folder = _folder()
    pools = [await _pinned(folder, core) for core in (0, 1)]
    try:
        profile, profile_s = await _profile(pools[0], folder)
        figures = await _times(pools, folder, profile, runs)
        figures.append(Figure("Finding the profile, once per model", "s", [profile_s]))
        cases = CASES if runs > QUICK_RUNS else QUICK_CASES
        figures += await _recalls(pools, folder, profile, cases)
    finally:
        for pool in pools:
            await pool.close()
    return Measured(
        figures,
        f"SmolLM2-135M scores with {len(profile.heads)} heads in the first {profile.exit_layer} of its 30 "
        "layers, which the worker found by itself. Two workers, one core each. Prompts of "
        f"{TOKENS:,} tokens of made-up prose, each its own. Four scorers are modelled: the slowest quarter "
        "of the prompt on one of the workers, the other one idle. Recall: a sentence at a random depth in "
        f"{NEEDLE_TOKENS:,} tokens is found if the middle one of its tokens ranks in the best {KEPT:.0%}; "
        "the notes give 95 % intervals. An earlier exit than the profile's asks fewer of its heads.",
    )


async def _times(
    pools: Sequence[EnginePool], folder: ModelFolder, profile: Profile, runs: int
) -> list[Figure]:
    share: list[float] = []
    two: list[float] = []
    four: list[float] = []
    for run in range(runs):
        case = _case(7000 + run, TOKENS)
        one_s = await _score_s(pools[0], folder, case, profile, (0, 0))
        halves = list(pairwise(_edges(case, 2)))
        begun = time.perf_counter()
        await asyncio.gather(
            *(_score_s(pool, folder, case, profile, half) for pool, half in zip(pools, halves, strict=True))
        )
        two.append(one_s / (time.perf_counter() - begun))
        quarters = [
            await _score_s(pools[0], folder, case, profile, part) for part in pairwise(_edges(case, 4))
        ]
        four.append(one_s / max(quarters))
        if not share:
            # Minutes on one core, and no bar: once.
            share.append(one_s / await _prefill_s(pools[0], folder, prompts.encoded(MODEL, case.text)))
    return [
        Figure("Scoring, of the time of prefill by the same model", "%", share),
        Figure("Two scorers against one", "x", two, at_least(1.8)),
        Figure("Four scorers against one, modelled", "x", four, at_least(3.2)),
    ]


async def _recalls(
    pools: Sequence[EnginePool], folder: ModelFolder, profile: Profile, count: int
) -> list[Figure]:
    figures = []
    for segments in SEGMENTS:
        found = await _found(pools, folder, profile, count, segments, 0)
        title = f"Needles found, scored in {segments} segment{'s' if segments > 1 else ''}"
        bar = Bar(at_least=True, value=0.97) if segments == 1 else None
        figures.append(Figure(title, "%", [found / count], bar, note=_interval(found, count)))
    for exit_layer in sorted({layer + 1 for layer, _ in profile.heads})[:-1]:
        found = await _found(pools, folder, profile, count, 1, exit_layer)
        title = f"Needles found, exit after layer {exit_layer}"
        figures.append(Figure(title, "%", [found / count], note=_interval(found, count)))
    return figures


async def _found(
    pools: Sequence[EnginePool],
    folder: ModelFolder,
    profile: Profile,
    count: int,
    segments: int,
    exit_layer: int,
) -> int:
    async def of(pool: EnginePool, numbers: range) -> int:
        found = 0
        for number in numbers:
            case = _case(number, NEEDLE_TOKENS)
            parts = [
                await _scored(pool, folder, case, profile, part, exit_layer)
                for part in pairwise(_edges(case, segments))
            ]
            found += _ranks(case, parts)
        return found

    return sum(await asyncio.gather(*(of(pool, range(n, count, len(pools))) for n, pool in enumerate(pools))))


def _ranks(case: Case, parts: Sequence[Scored]) -> bool:
    tokens = merge([SegmentScores.unpack(part.scores) for part in parts])
    order = (-tokens.values).argsort(kind="stable")
    ranks = order.argsort()
    needle = sorted(ranks[(tokens.starts < case.end) & (tokens.ends > case.start)])
    return bool(needle[len(needle) // 2] < KEPT * len(ranks))


async def _profile(pool: EnginePool, folder: ModelFolder) -> tuple[Profile, float]:
    scored = await _scored(pool, folder, _case(1, 300), None, (0, 0), 0)
    return scored.profile, scored.profile_s


async def _score_s(
    pool: EnginePool, folder: ModelFolder, case: Case, profile: Profile, segment: tuple[int, int]
) -> float:
    begun = time.perf_counter()
    await _scored(pool, folder, case, profile, segment, 0)
    return time.perf_counter() - begun


async def _scored(
    pool: EnginePool,
    folder: ModelFolder,
    case: Case,
    profile: Profile | None,
    segment: tuple[int, int],
    exit_layer: int,
) -> Scored:
    questions = [(case.asked, len(case.text))]
    score = Score("bench", case.text, questions, segment, exit_layer=exit_layer, profile=profile)
    async with aclosing(pool.score(folder, score)) as events:
        async for event in events:
            if isinstance(event, Scored):
                return event
    raise RuntimeError("the worker ended without scores")


async def _prefill_s(pool: EnginePool, folder: ModelFolder, ids: list[int]) -> float:
    """From the request to the end of its prefill."""
    begun = time.perf_counter()
    request = Generate("dense", TokenPrompt(ids), Sampling(temperature=0.0), max_tokens=1)
    done = begun
    async for event in pool.stream(folder, request):
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
    share, z = found / count, _Z**2 / count
    middle, half = share + z / 2, _Z * math.sqrt(share * (1 - share) / count + z / (4 * count))
    return f"{count} prompts, {(middle - half) / (1 + z):.0%} to {min(1.0, (middle + half) / (1 + z)):.0%}"


async def _pinned(folder: ModelFolder, core: int) -> EnginePool:
    """A pool whose worker runs on one core, as a machine of its own would."""
    pool = EnginePool(PoolOptions(device="cpu", threads=1))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core} & before or before)
    try:
        await pool.load(folder)
    finally:
        os.sched_setaffinity(0, before)
    return pool


def _folder() -> ModelFolder:
    weights = sum(file.stat().st_size for file in MODEL.glob("*.safetensors"))
    return ModelFolder(
        name=MODEL.name,
        path=MODEL,
        source="folder",
        revision=None,
        config={"model_type": "llama"},
        weights_bytes=weights,
        created_s=0.0,
    )
