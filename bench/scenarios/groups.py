"""A model over two workers on a core each, against the whole model in one worker on one of them; and over
three workers, whose hidden states go from member to member, or through the one that answers."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import prompts
from bench.harness.cores import loopback, starting_on, why_no_cores, worker_on
from bench.harness.daemon import MODEL
from bench.harness.repetitive_prompts import REPETITIVE
from bench.harness.samples import Samples
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    HOP_IN,
    HOP_OUT,
    STAGE,
    Delta,
    Finished,
    Generate,
    Sampling,
    ServeStage,
    Speculate,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.settings import GroupMember, WorkerSettings
from fleetd.process import observe

# The head costs as much as eight layers: the worker that answers has fewer.
_LAYERS, _CUT = 30, 11
_THIRDS = (6, 18)
_TOKENS, _PROMPT_TOKENS = 96, 64
_STREAMS = 4
_ROOM_TOKENS = 8192
_KEY_BYTES = 32
_WHOLE, _GROUP, _ONE_BLOCK = "whole", "group", "one block"
_THREE, _RELAYED = "three", "three, relayed"
# That a step makes; through the machine that answers it is one more.
_HOPS = {_GROUP: 2, _THREE: 3, _RELAYED: 4}


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two workers cannot have a core each."""
    if why := why_no_cores():
        raise RuntimeError(why)
    observe.configure("warning")
    return asyncio.run(_measure(runs))


async def _measure(runs: int) -> Measured:
    seen = Samples()
    here, there, *_ = sorted(os.sched_getaffinity(0))
    async with (
        worker_on(here) as whole,
        _group((here, there), (_CUT,)) as group,
        _group((here, there), (_CUT,), blocks_ahead=False) as one_block,
    ):
        await _alternate({_WHOLE: whole, _GROUP: group, _ONE_BLOCK: one_block}, runs, seen)
    # By themselves: workers that only wait take time of those that compute.
    async with (
        # While one answer is written, one of them computes at a time: two may have one core.
        _group((here, there, here), _THIRDS) as three,
        _group((here, there, here), _THIRDS, direct=False) as relayed,
    ):
        await _alternate({_THREE: three, _RELAYED: relayed}, runs, seen)
    return Measured(_figures(seen), _HOW)


async def _alternate(sides: Mapping[str, EngineProcess], runs: int, seen: Samples) -> None:
    for engine in sides.values():
        await _several(engine, 91, _STREAMS, 24)
    for run in range(runs):
        for side in alternated(run, tuple(sides)):
            await _ask(sides[side], side, run, seen)


async def _ask(engine: EngineProcess, side: str, run: int, seen: Samples) -> None:
    if side != _ONE_BLOCK:
        asked = prompts.tokens(MODEL, 1000 * (400 + run), _PROMPT_TOKENS)
        took_s = await answered_s(engine, asked, _TOKENS, drafts=False, ways_s=seen[side, "way"])
        seen[side, "one"].append(took_s / _TOKENS)
    if side in (_THREE, _RELAYED):
        return
    if side != _ONE_BLOCK:
        seen[side, "several"].append(
            (await _several(engine, 500 + run, _STREAMS, _TOKENS)) / _TOKENS / _STREAMS
        )
    for name, text in REPETITIVE.items():
        tokens = prompts.encoded(MODEL, text)
        seen[side, name].append(await answered_s(engine, tokens, _TOKENS, drafts=True) / _TOKENS)


def _figures(seen: Samples) -> list[Figure]:
    hops = {side: [1000 * way_s / count for way_s in seen[side, "way"]] for side, count in _HOPS.items()}
    return [
        Figure(
            "One stream over two machines, over the whole model on one",
            "x",
            seen.ratios((_WHOLE, "one"), (_GROUP, "one")),
            at_least(0.9),
        ),
        Figure(
            f"{_STREAMS} streams over two machines, over one stream there",
            "x",
            seen.ratios((_GROUP, "one"), (_GROUP, "several")),
            at_least(1.7),
        ),
        Figure(
            f"{_STREAMS} streams on the whole model, over one stream there",
            "x",
            seen.ratios((_WHOLE, "one"), (_WHOLE, "several")),
        ),
        *(
            Figure(
                f"Blocks ahead over one at a time: {name}",
                "x",
                seen.ratios((_ONE_BLOCK, name), (_GROUP, name)),
                at_least(1.3),
            )
            for name in REPETITIVE
        ),
        *(
            Figure(
                f"Two machines over the whole model on one, both with drafts: {name}",
                "x",
                seen.ratios((_WHOLE, name), (_GROUP, name)),
            )
            for name in REPETITIVE
        ),
        Figure("A hop, over the layers' own time", "ms", hops[_GROUP], at_most(0.3)),
        Figure("A hop of three machines, from member to member", "ms", hops[_THREE], at_most(0.3)),
        Figure("A hop of three machines, through the one that answers", "ms", hops[_RELAYED]),
        Figure(
            "One stream over three machines: through the one that answers, over member to member",
            "x",
            seen.ratios((_RELAYED, "one"), (_THREE, "one")),
        ),
    ]


# ---- Answers ---------------------------------------------------------------------------------------------


async def _several(engine: EngineProcess, seed: int, streams: int, count: int) -> float:
    """Seconds that all of them take together, from the last one's first token on."""
    asked = [prompts.tokens(MODEL, 1000 * seed + n, _PROMPT_TOKENS) for n in range(streams)]
    if streams == 1:
        return await answered_s(engine, asked[0], count, drafts=False)
    begun = time.perf_counter()
    await asyncio.gather(*(answered_s(engine, tokens, count, drafts=False) for tokens in asked))
    return time.perf_counter() - begun


async def answered_s(
    engine: EngineProcess, tokens: list[int], count: int, *, drafts: bool, ways_s: list[float] | None = None
) -> float:
    """Seconds from the first token to the last, for as many tokens as there are. ``ways_s`` gets what
    a step's way through all machines took, without their layers."""
    request = Generate(
        f"answer-{secrets.token_hex(4)}",
        TokenPrompt(tokens),
        Sampling(temperature=0.0),
        max_tokens=count,
        ignore_eos=True,
        # Without sources there are no drafts, and answers may still be computed beside each other.
        speculate=None if drafts else Speculate(sources=[]),
    )
    first_s = 0.0
    async for event in engine.stream(request):
        if isinstance(event, Delta):
            first_s = first_s or time.perf_counter()
        elif isinstance(event, Finished) and ways_s is not None:
            ways_s.append(sum(stage.way_s for stage in event.stages))
    return (time.perf_counter() - first_s) * count / (count - 1)


# ---- Several workers with one model ----------------------------------------------------------------------


@asynccontextmanager
async def _group(
    cores: Sequence[int], cuts: Sequence[int], *, direct: bool = True, **settings: Any
) -> AsyncIterator[EngineProcess]:
    """The worker that answers, on the first of ``cores``; those with the layers behind ``cuts`` are on the
    others. ``direct``: they have streams to each other."""
    parts = list(zip(cuts, [*cuts[1:], _LAYERS], strict=True))
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(
                worker_on(core, first_layer=first, last_layer=last, part_of=MODEL.name)
            )
            for core, (first, last) in zip(cores[1:], parts, strict=True)
        ]
        jobs = [f"stage-{secrets.token_hex(4)}" for _ in members]
        given = []
        for member, job, (first, last) in zip(members, jobs, parts, strict=True):
            events = await stack.enter_async_context(
                aclosing(member.serve(ServeStage(job, first, last, _ROOM_TOKENS)))
            )
            # Accepted: there is memory for it.
            await anext(events)
            key, (near, far) = secrets.token_bytes(_KEY_BYTES), loopback()
            await member.give_stream(StreamTag(job, STAGE, key, "acceptor"), near)
            given.append((StreamTag(job, STAGE, key, "connector"), far))
        for number in range(1, len(members) if direct else 0):
            key, (near, far) = secrets.token_bytes(_KEY_BYTES), loopback()
            await members[number].give_stream(StreamTag(jobs[number], HOP_IN, key, "acceptor"), near)
            await members[number - 1].give_stream(StreamTag(jobs[number - 1], HOP_OUT, key, "connector"), far)
        asked = tuple(
            GroupMember(*part, job, f"worker {number}", direct=direct)
            for number, (job, part) in enumerate(zip(jobs, parts, strict=True), 1)
        )
        front = EngineProcess(
            WorkerSettings(
                name=MODEL.name,
                path=str(MODEL),
                threads=1,
                prefix_cache_bytes=1,
                group=asked,
                group_tokens=_ROOM_TOKENS,
                **settings,
            )
        )
        with starting_on({cores[0]}):
            await front.start()
        try:
            for tag, sock in given:
                await front.give_stream(tag, sock)
            async for _ in front.loaded():
                pass
            yield front
        finally:
            await front.stop()


_HOW = (
    f"Two workers on one core each, without daemons; the one that answers has {_CUT} of {_LAYERS} layers "
    "and the head. Their stream is sealed, over loopback TCP. Beside them the whole model in one worker on "
    f"one of the two cores. Greedy, {_TOKENS} tokens; the answers are the same bytes. A hop is the median "
    "time from when a step's hidden state is sent until the last one is back, without the members' layers, "
    "by the number of hops: two with two workers, three with three, and four if hidden states pass through "
    "the one that answers. Two of three workers share a core: only one of them computes at a time."
)
