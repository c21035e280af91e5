"""A model over two processes on a core each, by fleetd and by mlx-lm's ranks, in both ways of dividing it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least
from bench.harness import prompts, random_llama
from bench.harness.child import Child
from bench.harness.cores import loopback, starting_on, why_no_cores, worker_on
from bench.harness.daemon import MODEL
from bench.harness.samples import Samples
from bench.scenarios.groups import group_on, several
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import STAGE, ServeStage, StreamTag
from fleetd.engine.settings import GroupMember, RingPlace, WorkerSettings
from fleetd.process import observe

_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
# The head costs as much as four layers: the worker that answers has fewer.
_CUT = 6
_TOKENS, _PROMPT_TOKENS, _STREAMS = 48, 64, 4
_ROOM_TOKENS, _KEY_BYTES = 4096, 32
_SPLITS = ("pipeline", "tensors")


def measure(runs: int) -> Measured:
    """Raises RuntimeError if two processes cannot have a core each."""
    if why := why_no_cores():
        raise RuntimeError(why)
    observe.configure("warning")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "random-qwen2"
        random_llama.build(model, _SHAPE, qwen=True)
        return asyncio.run(_measure(model, runs))


async def _measure(model: Path, runs: int) -> Measured:
    seen = Samples()
    here, there, *_ = sorted(os.sched_getaffinity(0))
    layers = _SHAPE["num_hidden_layers"]
    with ExitStack() as children:
        theirs = {
            split: [children.enter_context(rank) for rank in _mlx_ranks(model, split, (here, there))]
            for split in _SPLITS
        }
        async with (
            worker_on(here, model, cpu_arithmetic="float32") as whole,
            group_on(here, there, model, _CUT, layers, cpu_arithmetic="float32") as pipeline,
            _ranks_on(here, there, model) as tensors,
        ):
            ours = {"whole": whole, "pipeline": pipeline, "tensors": tensors}
            for run in range(-1, runs):
                for side in alternated(run, (*ours, *(f"mlx-lm {split}" for split in theirs))):
                    for streams in (1, _STREAMS):
                        engine = ours.get(side)
                        if engine is not None:
                            took_s = await several(engine, 700 + run, streams, _TOKENS)
                        else:
                            took_s = await _theirs_s(theirs[side.removeprefix("mlx-lm ")], run, streams)
                        # The first round warms up.
                        if run >= 0:
                            seen[side, str(streams)].append(took_s)
    return Measured(_figures(seen), _HOW)


def _figures(seen: Samples) -> list[Figure]:
    one, four = "1", str(_STREAMS)
    rows = []
    for split, least in (("pipeline", 1.0), ("tensors", 0.95)):
        ours, theirs = split, f"mlx-lm {split}"
        rows += [
            Figure(
                f"{split}: one stream, over mlx-lm's",
                "x",
                seen.ratios((theirs, one), (ours, one)),
                at_least(least),
            ),
            Figure(
                f"{split}: {_STREAMS} streams, over mlx-lm's",
                "x",
                seen.ratios((theirs, four), (ours, four)),
                at_least(least),
            ),
            Figure(
                f"{split}: one stream, over the whole model in one process on one core",
                "x",
                seen.ratios(("whole", one), (ours, one)),
            ),
        ]
    return rows


async def _theirs_s(ranks: list[Child], run: int, streams: int) -> float:
    """Seconds of ``_TOKENS`` tokens of each stream, from the first token of any on."""
    asked = [prompts.tokens(MODEL, 1000 * (700 + run) + n, _PROMPT_TOKENS) for n in range(streams)]
    question: Mapping[str, Any] = {"batch": asked, "max_tokens": _TOKENS}
    told = await asyncio.gather(*(asyncio.to_thread(rank.ask, **question) for rank in ranks))
    return streams * _TOKENS / min(float(each["tok_s"]) for each in told)


def _mlx_ranks(model: Path, split: str, cores: tuple[int, int]) -> list[Child]:
    """mlx-lm's ranks. Neither is ready before both are."""
    ports = [_free_port() for _ in cores]
    hosts = model.parent / f"hosts-{split}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))

    def start(rank: int) -> Child:
        return Child("mlx_ring", str(rank), str(hosts), str(model), split, str(cores[rank]))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(start, range(len(cores))))


def _free_port() -> int:
    near, far = loopback()
    with near, far:
        port: int = far.getsockname()[1]
    return port


@asynccontextmanager
async def _ranks_on(here: int, there: int, model: Path) -> AsyncIterator[EngineProcess]:
    """Rank 0, which answers, on ``here``; without tunnels, as both are on this machine."""
    ports = [_free_port(), _free_port()]
    layers, key = _SHAPE["num_hidden_layers"], secrets.token_bytes(_KEY_BYTES)
    settings: dict[str, Any] = {"path": str(model), "threads": 1, "cpu_arithmetic": "float32"}
    settings |= {"prefix_cache_bytes": 1, "group_tokens": _ROOM_TOKENS}
    asked = (GroupMember(0, layers, "member", "the other worker"),)
    front = EngineProcess(
        WorkerSettings(name=model.name, group=asked, ring=RingPlace(0, 2, *ports), **settings)
    )
    other = EngineProcess(WorkerSettings(name="rank1", ring=RingPlace(1, 2, *ports[::-1]), **settings))
    async with AsyncExitStack() as stack:
        for engine, core in ((front, here), (other, there)):
            stack.push_async_callback(engine.stop)
            with starting_on({core}):
                await engine.start()
        await _loaded(other)
        events = await stack.enter_async_context(
            aclosing(other.serve(ServeStage("job", 0, layers, _ROOM_TOKENS)))
        )
        # Accepted: there is memory for it.
        await anext(events)
        near, far = loopback()
        await other.give_stream(StreamTag("job", STAGE, key, "acceptor"), near)
        await front.give_stream(StreamTag("member", STAGE, key, "connector"), far)
        await _loaded(front)
        yield front


async def _loaded(engine: EngineProcess) -> None:
    async for _ in engine.loaded():
        pass


_HOW = (
    f"A Qwen 2 of random weights ({_SHAPE['num_hidden_layers']} layers, {_SHAPE['hidden_size']} wide, "
    "float32), which mlx-lm cuts in both ways. fleetd: two workers on one core each, without daemons; "
    f"cut by layers, the one that answers has {_CUT} and the head, and their stream is sealed; by tensors, a "
    "ring without tunnels. mlx-lm: two ranks on the same cores, by its `pipeline()` and `shard()`, with its "
    "BatchGenerator in both, as its server has under `mlx.launch`, and the same BLAS. Greedy, "
    f"{_TOKENS} tokens; seconds from the first token on."
)
