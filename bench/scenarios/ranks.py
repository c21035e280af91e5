"""Layers divided between two workers on a core each, beside mlx-lm's own ring of two; what tunnels cost."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import prompts, random_llama
from bench.harness.child import Child
from bench.harness.cores import loopback, starting_on, why_no_cores, worker_on
from bench.harness.daemon import MODEL
from bench.harness.samples import Samples
from bench.scenarios.groups import answered_s
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import STAGE, ServeStage, StreamTag
from fleetd.engine.settings import GroupMember, RingPlace, WorkerSettings
from fleetd.p2p.tunnel import LocalPort
from fleetd.process import observe

_RANKS, _SIZE = (0, 1), 2
_LAYERS = 30
# SmolLM2-135M with eight heads over four pairs of keys and values: its nine over three are not for two ranks.
_SHAPE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "num_hidden_layers": _LAYERS,
}
_TOKENS, _PROMPT_TOKENS = 64, 64
_ROOM_TOKENS = 8192
_KEY_BYTES = 32
_SUM_BYTES, _SUMS = 256 * 1024, 200
_MLX, _PLAIN, _SEALED, _WHOLE = "mlx-lm", "plain", "sealed", "whole"
# A ring whose other rank does not come waits for ever: then all children are killed, and the family fails.
_RUN_S, _LEAST_S = 60.0, 50.0


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two workers cannot have a core each, or if a ring does not form."""
    if why := why_no_cores():
        raise RuntimeError(why)
    observe.configure("warning")
    seen = Samples()
    cores = sorted(os.sched_getaffinity(0))[:_SIZE]
    within_s = _LEAST_S + runs * _RUN_S
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder, _Children(within_s) as children:
        model = Path(folder) / "divided"
        random_llama.build(model, _SHAPE)
        work = _measure_answers(runs, model, cores, children, seen)
        asyncio.run(asyncio.wait_for(work, within_s))
        _measure_sums(runs, cores, children, seen)
    return Measured(_figures(seen), _HOW)


def _figures(seen: Samples) -> list[Figure]:
    formed = [
        ranks - whole for ranks, whole in zip(seen[_SEALED, "first"], seen[_WHOLE, "first"], strict=True)
    ]
    tunnel = "Sum of 256 KiB over a ring of two"
    return [
        Figure(
            "Two ranks of fleetd over two of mlx-lm, both on plain loopback",
            "x",
            seen.ratios((_MLX, "token"), (_PLAIN, "token")),
            at_least(0.95),
        ),
        Figure(
            "Two ranks of fleetd through sealed tunnels over two of mlx-lm on plain loopback",
            "x",
            seen.ratios((_MLX, "token"), (_SEALED, "token")),
        ),
        Figure(
            "Two ranks over the whole model on one core",
            "x",
            seen.ratios((_WHOLE, "token"), (_PLAIN, "token")),
        ),
        Figure(
            "From the start of ranks to a first token, over that of one worker", "s", formed, at_most(3.0)
        ),
        Figure(f"{tunnel}, plain", "ms", [1000 * s for s in seen[_PLAIN, "sum"]]),
        Figure(f"{tunnel}, through sealed tunnels", "ms", [1000 * s for s in seen[_SEALED, "sum"]]),
        Figure(
            f"{tunnel}, sealed over plain", "x", seen.ratios((_SEALED, "sum"), (_PLAIN, "sum")), at_most(1.15)
        ),
    ]


# ---- Answers ---------------------------------------------------------------------------------------------


async def _measure_answers(
    runs: int, model: Path, cores: Sequence[int], children: _Children, seen: Samples
) -> None:
    mlx = await asyncio.to_thread(children.ring_of_mlx_lm, model, cores)
    async with _ranks(model, cores, _plain_places()) as plain:
        await answered_s(plain, prompts.tokens(MODEL, 91, _PROMPT_TOKENS), 8, drafts=False)
        for run in range(runs):
            asked = prompts.tokens(MODEL, 1000 * (400 + run), _PROMPT_TOKENS)
            for side in alternated(run, (_MLX, _PLAIN, _SEALED, _WHOLE)):
                if side == _MLX:
                    found = await asyncio.to_thread(mlx, do="answer", tokens=asked, max_tokens=_TOKENS)
                    seen[side, "token"].append((found["times"][-1] - found["times"][0]) / (_TOKENS - 1))
                elif side == _PLAIN:
                    seen[side, "token"].append(await _token_s(plain, asked))
                else:
                    await _from_the_start(side, model, cores, asked, children, seen)


async def _from_the_start(
    side: str, model: Path, cores: Sequence[int], asked: list[int], children: _Children, seen: Samples
) -> None:
    """Start a side, take its first token, and then what others take."""
    begun = time.perf_counter()
    with ExitStack() as stack:
        if side == _SEALED:
            started: Any = _ranks(model, cores, children.tunnels(stack, cores))
        else:
            started = worker_on(cores[0], model, cpu_arithmetic="float32")
        async with started as engine:
            await answered_s(engine, asked, 2, drafts=False)
            seen[side, "first"].append(time.perf_counter() - begun)
            seen[side, "token"].append(await _token_s(engine, asked))


async def _token_s(engine: EngineProcess, asked: list[int]) -> float:
    return await answered_s(engine, asked, _TOKENS, drafts=False) / _TOKENS


# ---- Sums ------------------------------------------------------------------------------------------------


def _measure_sums(runs: int, cores: Sequence[int], children: _Children, seen: Samples) -> None:
    with ExitStack() as stack:
        sides = {
            side: children.ring(
                stack, cores, "ring_sum", [[msgspec.json.encode(place).decode()] for place in places]
            )
            for side, places in ((_PLAIN, _plain_places()), (_SEALED, children.tunnels(stack, cores)))
        }
        for run in range(runs):
            for side in alternated(run, tuple(sides)):
                found = sides[side](do="sum", bytes=_SUM_BYTES, count=_SUMS)
                seen[side, "sum"].append(median(found["times"]))


# ---- Rings -----------------------------------------------------------------------------------------------


def _plain_places() -> list[RingPlace]:
    """A ring without tunnels. Its ports stay held until this process ends."""
    ports = [LocalPort() for _ in _RANKS]
    _HELD.extend(ports)
    return [RingPlace(rank, _SIZE, ports[rank].port, ports[1 - rank].port) for rank in _RANKS]


_HELD: list[LocalPort] = []


class _Children:
    """Processes of this family, all of which are killed if they are not over in time."""

    def __init__(self, within_s: float) -> None:
        self._all: list[Child] = []
        self._stack = ExitStack()
        self._timer = threading.Timer(within_s, self._kill)
        self._timer.daemon = True

    def __enter__(self) -> _Children:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._stack.close()

    def _kill(self) -> None:
        for child in list(self._all):
            child.kill()

    def ring_of_mlx_lm(self, model: Path, cores: Sequence[int]) -> Any:
        """Asks both ranks of mlx-lm's own, and gives the first one's answer."""
        places = _plain_places()
        hosts = json.dumps([[f"127.0.0.1:{place.port}"] for place in places])
        commands = [[str(place.rank), hosts, str(model)] for place in places]
        return self.ring(self._stack, cores, "mlx_ring", commands)

    def ring(self, stack: ExitStack, cores: Sequence[int], module: str, commands: Sequence[list[str]]) -> Any:
        """What asks both ranks of a ring, which have joined, at once, and gives the first one's answer."""
        ranks = []
        for core, arguments in zip(cores, commands, strict=True):
            with starting_on({core}):
                ranks.append(self._started(stack, module, *arguments))
        aside = stack.enter_context(ThreadPoolExecutor(_SIZE))

        def ask(**question: Any) -> Any:
            # Each waits in its sums for the other one.
            found = [aside.submit(rank.ask, **question) for rank in ranks]
            first, _ = (each.result() for each in found)
            return first

        ask(do="join")
        return ask

    def tunnels(self, stack: ExitStack, cores: Sequence[int]) -> list[RingPlace]:
        """The places of a ring whose bytes go through tunnels, each machine's in a process of its own."""
        daemons = []
        for rank, core in zip(_RANKS, cores, strict=True):
            with starting_on({core}):
                daemons.append(self._started(stack, "ring_daemon", str(rank), str(_SIZE)))
        found = [daemon.ask(do="place") for daemon in daemons]
        with ThreadPoolExecutor(_SIZE) as aside:
            opened = [
                aside.submit(daemon.ask, do="open", next_port=found[1 - rank]["port"])
                for rank, daemon in enumerate(daemons)
            ]
            for each in opened:
                each.result()
        return [msgspec.convert(each["place"], RingPlace) for each in found]

    def _started(self, stack: ExitStack, module: str, *arguments: str) -> Child:
        child = stack.enter_context(Child(module, *arguments))
        self._all.append(child)
        return child


@asynccontextmanager
async def _ranks(
    model: Path, cores: Sequence[int], places: Sequence[RingPlace]
) -> AsyncIterator[EngineProcess]:
    """Rank 0, which answers; each rank is on its core."""
    asked = GroupMember(0, _LAYERS, "member", "the other worker")
    common: dict[str, Any] = {"threads": 1, "prefix_cache_bytes": 1, "path": str(model)}
    front, other = (
        EngineProcess(
            WorkerSettings(
                name=model.name, group=(asked,), group_tokens=_ROOM_TOKENS, ring=places[0], **common
            )
        ),
        EngineProcess(WorkerSettings(name="rank", ring=places[1], **common)),
    )
    job, key = f"rank-{secrets.token_hex(4)}", secrets.token_bytes(_KEY_BYTES)
    async with AsyncExitStack() as stack:
        for engine, core in zip((front, other), cores, strict=True):
            stack.push_async_callback(engine.stop)
            with starting_on({core}):
                await engine.start()
        async for _ in other.loaded():
            pass
        near, far = loopback()
        events = await stack.enter_async_context(
            aclosing(other.serve(ServeStage(job, 0, _LAYERS, _ROOM_TOKENS)))
        )
        # Accepted: there is memory for it.
        await anext(events)
        await other.give_stream(StreamTag(job, STAGE, key, "acceptor"), near)
        await front.give_stream(StreamTag("member", STAGE, key, "connector"), far)
        async for _ in front.loaded():
            pass
        yield front


_HOW = (
    "A llama of SmolLM2-135M's size with eight heads instead of nine, which two ranks cannot divide; random "
    f"weights in f32, in two processes on one core each, greedy, {_TOKENS} tokens behind a prompt of "
    f"{_PROMPT_TOKENS}. mlx-lm: its `shard` and `stream_generate` on an MLX ring, in processes that have "
    "what `mlx.launch` would give them, with the products and attention that fleetd has on a CPU; all in "
    "one run. The first token: of a group that is started with its tunnels, less that of a worker with the "
    f"whole model on one of the cores. Sums: the median of {_SUMS} `all_sum` of f32. A tunnel's ends are in "
    "two processes, each on the core of its rank. A waiting rank uses all of its core, so tunnels cost more "
    "here than beside cores that are free."
)
