"""Each way to split a prompt, whether or not it would be chosen: two workers, without daemons around them.

What is left is what the split itself gives on this machine: the workers' streams are loopback TCP, as between
daemons, and the planner only says where to cut.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import prompts
from bench.harness.cores import loopback, worker_on
from bench.harness.daemon import MODEL
from bench.harness.machines import CHUNK_TOKENS
from bench.harness.samples import Samples
from bench.scenarios.prefill_ceiling import pipeline
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    Accepted,
    AssistPrefill,
    Delta,
    Generate,
    PrefillReport,
    PrefillWithHelpers,
    Ready,
    Sampling,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.shared_prefill.frame_schedule import HOME, IN, OUT, helper_name, home_streams
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.prefill.choice import HelperSpec, LinkSpeed, PrefillOption, PrefillSize, options
from fleetd.plan.prefill.schedule import LAST_LAYER
from fleetd.plan.prefill.split import Split
from fleetd.process import observe

_LENGTHS = (2000, 4000)
_KINDS = ("tokens", "layers")
_RUNS = 3
# Loopback, as far as a plan cares.
_LINK = LinkSpeed(1e9, 0.0001)
_KEY_BYTES = 32


def measure(runs: int, *, quick: bool) -> Measured:
    observe.configure("warning")  # the supervisor of the workers is in this process
    return asyncio.run(_measure(runs if quick else _RUNS, _LENGTHS[:1] if quick else _LENGTHS))


async def _measure(runs: int, lengths: tuple[int, ...]) -> Measured:
    seen, cut = Samples(), dict[tuple[str, int], str]()
    here, there, *_ = sorted(os.sched_getaffinity(0))
    async with (
        worker_on(here, prefill_chunk_tokens=CHUNK_TOKENS) as home,
        worker_on(there, prefill_chunk_tokens=CHUNK_TOKENS) as helper,
    ):
        for engine in (home, helper):
            await _alone(engine, prompts.tokens(MODEL, 77, 500))
        for run in range(runs):
            for length in lengths:
                await _one(home, helper, run, length, seen, cut)
    return Measured(
        [f for length in lengths for kind in _KINDS for f in _figures(kind, length, seen, cut)], _HOW
    )


async def _one(
    home: EngineProcess,
    helper: EngineProcess,
    run: int,
    length: int,
    seen: Samples,
    cut: dict[tuple[str, int], str],
) -> None:
    """Alone, and split in every way; the order turns from run to run."""
    tokens = prompts.tokens(MODEL, 38_000 + 10 * run + length, length)
    took_s: dict[str, float] = {}
    plans: dict[str, PrefillOption] = {}
    for kind in alternated(run, ("", *_KINDS)):
        if kind:
            plans[kind] = _plan(home.facts, helper.facts, kind, length - 1)
            took_s[kind] = await _split(home, helper, tokens, plans[kind])
        else:
            took_s[kind] = await _alone(home, tokens)
    for kind, option in plans.items():
        split = option.split
        assert split is not None
        steps = split.layers if kind == "tokens" else len(split.chunks_of(0))
        gained = took_s[""] / took_s[kind]
        seen[kind, length, "gained"].append(gained)
        seen[kind, length, "of_ceiling"].append(gained / pipeline(2, steps))
        seen[kind, length, "off"].append(abs(option.predicted_s / took_s[kind] - 1))
        cut[kind, length] = f"cut at {split.cuts[1]:,}, chunks of {split.chunk}"


def _plan(home: Ready | None, helper: Ready | None, kind: str, tokens: int) -> PrefillOption:
    assert home is not None
    assert helper is not None
    prompt = PrefillSize(
        home.shape,
        tokens=tokens,
        cached=0,
        chunk=256,
        last_layer=LAST_LAYER,
    )
    home_speed, helper_speed = (
        PrefillSpeed.measured(facts.speed.prefill_tok_s, facts.speed.prefill_context_s)
        for facts in (home, helper)
    )
    here = HelperSpec("home", "home", home_speed)
    there = HelperSpec("helper", "helper", helper_speed, _LINK)
    found = [o for o in options(prompt, here, [there]) if o.kind == kind and o.split is not None]
    if not found:
        raise RuntimeError(f"no split of {kind}: {options(prompt, here, [there])}")
    return min(found, key=lambda option: option.predicted_s)


# ---- One prompt ------------------------------------------------------------------------------------------


async def _alone(engine: EngineProcess, tokens: list[int]) -> float:
    """Seconds to the first token."""
    begun = time.perf_counter()
    async for event in engine.stream(_request("alone", tokens, shared=False)):
        if isinstance(event, Delta):
            took_s = time.perf_counter() - begun
    return took_s


async def _split(
    home: EngineProcess, helper: EngineProcess, tokens: list[int], option: PrefillOption
) -> float:
    """Seconds to the first token. Raises RuntimeError if it did not go as planned."""
    split = option.split
    assert split is not None
    job = f"split-{secrets.token_hex(4)}"
    agreed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assisting = asyncio.create_task(_assist(helper, AssistPrefill(job, split, 0), agreed))
    await asyncio.wait({agreed, assisting}, return_when=asyncio.FIRST_COMPLETED)
    if not agreed.done():
        await assisting
    begun, took_s = time.perf_counter(), 0.0
    async for event in home.stream(_request(job, tokens, shared=True)):
        match event:
            case Accepted():
                for here, there in _streams(split):
                    await _connect(home, helper, job, here, there)
                home.share(PrefillWithHelpers(job, split, option.predicted_s, exact=True))
            case PrefillReport(code=code, reason=reason) if code:
                raise RuntimeError(f"{split} was given up: {reason}")
            case Delta() if not took_s:
                took_s = time.perf_counter() - begun
    await assisting
    return took_s


async def _assist(engine: EngineProcess, assist: AssistPrefill, agreed: asyncio.Future[None]) -> None:
    async for event in engine.assist(assist):
        if isinstance(event, Accepted):
            agreed.set_result(None)


def _streams(split: Split) -> Iterator[tuple[str, str]]:
    yield helper_name(0), HOME
    if IN in home_streams(split):
        yield IN, OUT


async def _connect(home: EngineProcess, helper: EngineProcess, job: str, here: str, there: str) -> None:
    key = secrets.token_bytes(_KEY_BYTES)
    ours, theirs = loopback()
    await helper.give_stream(StreamTag(job, there, key, "connector"), theirs)
    await home.give_stream(StreamTag(job, here, key, "acceptor"), ours)


def _request(name: str, tokens: list[int], *, shared: bool) -> Generate:
    return Generate(name, TokenPrompt(tokens), Sampling(temperature=0.0), max_tokens=1, shared=shared)


def _figures(kind: str, length: int, seen: Samples, cut: dict[tuple[str, int], str]) -> list[Figure]:
    title = f"{length:,} tokens split by {kind}"
    gained, of_ceiling, off = (seen[kind, length, name] for name in ("gained", "of_ceiling", "off"))
    return [
        Figure(f"Workers alone, {title}", "x", gained, note=cut[kind, length]),
        Figure(f"Share of its ceiling, {title}", "%", of_ceiling, at_least(0.92)),
        Figure(f"Predicted off actual, {title}", "%", off, at_most(0.25)),
    ]


_HOW = (
    "Workers alone: two workers on one core each, without daemons, each kind of split as the planner would "
    "cut it, whether or not it would choose it; TTFT of one worker over TTFT with the other's help, agreed "
    "on before. Their streams are sealed, over loopback TCP."
)
