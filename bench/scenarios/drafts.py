"""Drafts from another worker: what an exchange takes, and what is left of them behind a slow link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from bench.children.drafter import VOCABULARY, Order
from bench.figures import Figure, Measured, alternated, at_least, at_most, percentile
from bench.harness import prompts
from bench.harness.cores import loopback, starting_on, why_no_cores, worker_on
from bench.harness.daemon import MODEL
from bench.harness.drafting import KEY_BYTES, Drafted, PlayedDrafter, answer
from bench.harness.samples import Samples
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import Context
from fleetd.engine.streams.frames import Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.process import observe

TOKENS = 128
EXCHANGES, WARM_UP = 500, 50
DELAYS_S = (0.0, 0.005, 0.05)
# As a model of a tenth of the size drafts on a machine of its own.
STEP_S, WRONG = 0.004, 0.2
_CROWDED = "crowded"
_WITHIN_S = 30.0
_SPUN_UP_S = 0.5


def measure(runs: int) -> Measured:
    """Raises RuntimeError where the target cannot have a core of its own."""
    if why := why_no_cores():
        raise RuntimeError(why)
    observe.configure("warning")  # the supervisor of the workers is in this process
    with PlayedDrafter() as drafter:
        asleep = [exchanges(drafter) for _ in range(runs)]
        with cores_awake():
            awake = [exchanges(drafter) for _ in range(runs)]
    here, there, *_ = sorted(os.sched_getaffinity(0))
    with PlayedDrafter(there) as apart, PlayedDrafter(here) as crowding, starting_on({there}):
        seen = asyncio.run(_answers(here, apart, crowding, runs))
    return Measured([*_trips(awake, asleep), *_figures(seen)], _HOW)


# ---- an exchange -----------------------------------------------------------------------------------------


def exchanges(drafter: PlayedDrafter) -> float:
    """The median of the seconds from a commit to the draft that goes on from it, in ms."""
    near, far = loopback()
    key = os.urandom(KEY_BYTES)
    drafter.give(far, Order(key, ahead=1, detours=0))
    came = threading.Event()

    def connect(place: Place) -> SocketPipe:
        return SocketPipe(near, key, "connector", place=place, wake=came.set, eager=True)

    text = [1, 2, 3]
    source = RemoteSource(connect, text, VOCABULARY)
    took_s = []
    try:
        _until_drafted(source, text, came)
        for number in range(WARM_UP + EXCHANGES):
            text.append(number)
            begun = time.perf_counter()
            source.committed(text[-1:])
            _until_drafted(source, text, came)
            took_s.append(time.perf_counter() - begun)
    finally:
        source.close()
    return 1000 * percentile(took_s[WARM_UP:], 0.5)


def _until_drafted(source: RemoteSource, text: list[int], came: threading.Event) -> None:
    while True:
        came.clear()
        if source.propose(Context(text, 1)):
            return
        if source.error is not None or not came.wait(_WITHIN_S):
            raise RuntimeError(f"no draft came: {source.error}")


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """While this lasts, no core sleeps: waking one takes longer than a message. Where both ends compute, they
    are awake anyhow. The processes that keep them awake have idle priority and delay no other."""
    spin = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else 0
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(cores)]
    try:
        time.sleep(_SPUN_UP_S)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _trips(awake: list[float], asleep: list[float]) -> list[Figure]:
    title = "Exchange of a commit and a draft, two processes, sealed loopback, p50"
    note = "from the commit to the draft in hand, through all threads of both ends"
    return [
        Figure(title, "ms", awake, at_most(0.25), note=f"{note}; cores awake, as where both compute"),
        Figure(f"{title}, idle machine", "ms", asleep, note="the same; cores sleep between messages"),
    ]


# ---- answers ---------------------------------------------------------------------------------------------


def _figures(seen: Samples) -> list[Figure]:
    beside = seen.ratios("beside", "plain")
    found = [Figure("Decode with drafts of a worker beside it, against none", "x", beside)]
    for delay_s in DELAYS_S:
        title = f"Decode with a drafter {1000 * delay_s:.0f} ms away"
        note = f"{percentile(seen[delay_s, 'accepted'], 0.5):.2f} right drafts per pass"
        if delay_s < 0.01:
            share, bar = seen.ratios(delay_s, "beside"), at_least(0.95)
            found.append(Figure(f"{title}, share of one beside it", "%", share, bar, note=note))
        over = seen.ratios(delay_s, "plain")
        found.append(Figure(f"{title}, against none", "x", over, at_least(0.98), note=note))
    same = "Answers that said the same as without drafts"
    crowded = "Decode with the drafter on the target's own core, 0 ms away, against none"
    return [
        *found,
        Figure(crowded, "x", seen.ratios(_CROWDED, "plain"), note="its threads interrupt the target's"),
        Figure("Decode without drafts", "tok/s", seen["plain"]),
        Figure(same, "%", seen["same"], at_least(1.0), of="worst"),
    ]


async def _answers(here: int, apart: PlayedDrafter, crowding: PlayedDrafter, runs: int) -> Samples:
    """The target computes on core ``here``, as does the drafter ``crowding``; all else is on another."""
    seen = Samples()
    async with worker_on(here) as home:
        for run in range(runs):
            prompt = prompts.encoded(MODEL, prompts.OPENINGS[run % len(prompts.OPENINGS)])
            # What is replayed has to be known; this also warms both sides up.
            for drafter in (apart, crowding):
                await answer(home, prompt, TOKENS, ["drafter"], drafter.playing(STEP_S, 1.0))
            found: dict[str | float, Drafted] = {}
            sides: list[str | float] = ["plain", "beside", *DELAYS_S, _CROWDED]
            for side in alternated(run, sides):
                if side == "plain":
                    found[side] = await answer(home, prompt, TOKENS, [])
                else:
                    delay_s = None if side == "beside" else side if isinstance(side, float) else 0.0
                    drafter = crowding if side == _CROWDED else apart
                    played = drafter.playing(STEP_S, WRONG)
                    found[side] = await answer(home, prompt, TOKENS, ["drafter"], played, delay_s)
                seen[side].append(found[side].rate)
                seen[side, "accepted"].append(found[side].accepted)
            seen.add(same=float(len({one.text for one in found.values()}) == 1))
    return seen


_HOW = (
    f"The default model in a worker on one core, greedy, {TOKENS} tokens, and a drafter in a process of its "
    "own, with the workers' drafter, frames and sealed streams. The drafter stands for another machine, so "
    "the rows with bars keep it, the client and the wire off the target's core, on one that is otherwise "
    "idle: nothing disturbs the target but the drafts themselves. One row without a bar has the drafter on "
    "the target's core too. There is no smaller model with the same "
    f"vocabulary, so the drafter's model is played: it replays the answer, {1000 * STEP_S:.0f} ms per token, "
    f"with every {1 / WRONG:.0f}th token wrong at random, half of them with the truth as the runner-up. "
    "Beside it: over a socket pair; else over TCP on loopback, or a wire that adds the given round trip. "
    "All sides of a run decode the same prompt in turns, with the controller as it is by default."
)
