"""What a drafter on another machine adds to the drafts that a worker has anyway: lookup and suffix."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import Figure, Measured, alternated
from bench.harness import prompts, repetitive_prompts
from bench.harness.cores import why_no_cores, worker_on
from bench.harness.daemon import MODEL
from bench.harness.drafting import Drafted, GiveDrafter, PlayedDrafter, answer
from bench.harness.samples import Samples
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Accepted, DraftFor, StreamTag
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.errors import FleetError
from fleetd.process import observe

QUICK_RUNS = 1
TOKENS = 64
DELAYS_S = (0.0, 0.005, 0.05)
ACCEPTANCES = (0.5, 0.7, 0.9)
# A tenth of the target's step on this core, as for a model of a tenth of its size.
STEP_S = 0.008
# Layers of the truncated models, of 30.
CUT_LAYERS = (6, 24)
LOCAL = ["suffix", "lookup"]
_CODE = "rewrite this code with one change"
WORK = {"free text": prompts.OPENINGS[1], _CODE: repetitive_prompts.REPETITIVE[_CODE]}


@dataclass(frozen=True, slots=True)
class Side:
    """A drafter besides the local sources. ``acceptance``: of a played one."""

    title: str
    delay_s: float = 0.0
    acceptance: float = 0.0


def measure(runs: int) -> Measured:
    if why := why_no_cores():
        raise RuntimeError(why)
    observe.configure("warning")  # the supervisor of the workers is in this process
    quick = runs <= QUICK_RUNS
    here, there, *_ = sorted(os.sched_getaffinity(0))
    with PlayedDrafter(there) as drafter, tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(runs, quick, here, there, drafter, Path(folder)))


async def _measure(
    runs: int, quick: bool, here: int, there: int, drafter: PlayedDrafter, folder: Path
) -> Measured:
    sides = [
        Side(f"played drafter of {acceptance:.0%}, {1000 * delay_s:.0f} ms away", delay_s, acceptance)
        for acceptance in (ACCEPTANCES[1:2] if quick else ACCEPTANCES)
        for delay_s in (DELAYS_S[:1] if quick else DELAYS_S)
    ]
    truncated = {
        Side(f"drafter of the model's first {layers} layers"): layers
        for layers in (CUT_LAYERS[1:] if quick else CUT_LAYERS)
    }
    seen = Samples()

    def play(side: Side) -> GiveDrafter:
        return drafter.playing(STEP_S, 1 - side.acceptance)

    async with worker_on(here) as home:
        for run in range(runs):
            for work, prompt in _prompts(run):
                # The drafter learns the answer; this also warms both sides up.
                await answer(home, prompt, TOKENS, ["drafter"], drafter.playing(0.0, 1.0))
                await _sides(seen, run, work, home, prompt, sides, play)
        for side, layers in truncated.items():
            async with worker_on(there, _first_layers(folder / f"first-{layers}", layers)) as other:
                for run in range(runs):
                    for work, prompt in _prompts(run):
                        async with _following(other) as give:
                            await _sides(seen, run, work, home, prompt, [side], partial(_same, give))
    figures = [_figures(seen, work, side) for side in (*sides, *truncated) for work in WORK]
    same = Figure("Answers equal with and without the drafter", "%", seen["same"], of="worst")
    return Measured([*(figure for pair in figures for figure in pair), same], _HOW)


def _same(give: GiveDrafter, side: Side) -> GiveDrafter:
    """A real drafter is the same for every side."""
    del side
    return give


def _prompts(run: int) -> Iterator[tuple[str, list[int]]]:
    """Each kind of work and its prompt: free text begins in another way in every run."""
    for work, words in WORK.items():
        yield work, prompts.encoded(MODEL, f"{run + 1}. {words}" if work == "free text" else words)


async def _sides(
    seen: Samples,
    run: int,
    work: str,
    home: EngineProcess,
    prompt: list[int],
    sides: list[Side],
    drafter: Callable[[Side], GiveDrafter],
) -> None:
    """The local sources alone, and each side with the drafter too, in turns."""
    found: dict[Side | None, Drafted] = {}
    for side in alternated(run, [None, *sides]):
        if side is None:
            found[side] = await answer(home, prompt, TOKENS, LOCAL)
        else:
            found[side] = await answer(home, prompt, TOKENS, [*LOCAL, "drafter"], drafter(side), side.delay_s)
    local = found.pop(None)
    for side, both in found.items():
        seen[work, side, "times"].append(both.rate / local.rate)
        seen[work, side, "passes"].append(both.per_pass / local.per_pass)
        seen[work, side, "local"].append(local.per_pass)
        seen[work, side, "both"].append(both.per_pass)
        seen["same"].append(float(local.text == both.text))


def _figures(seen: Samples, work: str, side: Side) -> tuple[Figure, Figure]:
    local, both = (sum(seen[work, side, name]) / len(seen[work, side, name]) for name in ("local", "both"))
    note = f"{local:.2f} tokens per pass with local drafts, {both:.2f} with the drafter too"
    title = f"{work}, {side.title}, over local drafts"
    return (
        Figure(f"Tokens per pass, {title}", "x", seen[work, side, "passes"], note=note),
        Figure(f"Decode, {title}", "x", seen[work, side, "times"]),
    )


# ---- A real drafter: the model's own first layers --------------------------------------------------------


@asynccontextmanager
async def _following(drafter: EngineProcess) -> AsyncIterator[GiveDrafter]:
    """What has a real worker draft for each text that it is given."""
    tasks: list[asyncio.Task[None]] = []

    async def give(far: socket.socket, key: bytes) -> None:
        name, ready = f"draft-{secrets.token_hex(4)}", asyncio.Event()

        async def follow() -> None:
            with suppress(FleetError):
                async for event in drafter.follow(DraftFor(name)):
                    if isinstance(event, Accepted):
                        ready.set()

        tasks.append(asyncio.create_task(follow()))
        await ready.wait()
        await drafter.give_stream(StreamTag(name, DRAFTS, key, "acceptor"), far)

    try:
        yield give
    finally:
        for task in tasks:
            await task


def _first_layers(folder: Path, layers: int) -> Path:
    """A copy of the default model that ends after so many layers."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    for path in MODEL.iterdir():
        if path.name.startswith(("token", "generation")):
            shutil.copyfile(path, folder / path.name)
    config: dict[str, Any] = msgspec.json.decode((MODEL / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode(config | {"num_hidden_layers": layers}))
    kept = {}
    for path in MODEL.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            number = name.partition("layers.")[2].partition(".")[0]
            if not number or int(number) < layers:
                kept[name] = tensor
    save_file(kept, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


_HOW = (
    f"The default model in a worker on one core, greedy, {TOKENS} tokens; the drafter on the other core. All "
    "sides of a run answer the same prompt in turns: one with drafts of the local sources alone (prompt "
    "lookup and the suffix automaton), the others with those and the drafter's. The played drafter uses the "
    "workers' drafter, frames and sealed streams over a wire with the given round trip; its model replays "
    f"the answer, {1000 * STEP_S:.0f} ms per token, and each token is right with the given chance; half of "
    "the mistakes have the truth as the runner-up. No second model with this vocabulary is at hand; the "
    "truncated drafters are real, but were never trained to end there. Tokens per pass are counted, not "
    "timed; but the controller looks at measured times, so they vary by a few passes."
)
