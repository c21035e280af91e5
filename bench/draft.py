"""Drafts from another worker: what an exchange takes, and what is left of them behind a slow link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import msgspec

from bench import prompts
from bench.child import ROOT
from bench.draft_child import VOCABULARY, Order
from bench.draft_link import Delayed
from bench.figures import Figure, Measured, alternated, at_least, at_most, percentile, ratios
from bench.shard_core import starting_on
from bench.throwaway import MODEL
from fleetd import observe
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Sampling,
    Speculate,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.streams.frames import Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.engine.supervisor import EngineProcess
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.sealed import handoff

TITLE = "Drafts from another worker"
RUNS, QUICK_RUNS = 3, 1
TOKENS = 128
EXCHANGES, WARM_UP = 500, 50
DELAYS_S = (0.0, 0.005, 0.05)
# As a model of a tenth of the size drafts on a machine of its own.
STEP_S, WRONG = 0.004, 0.2
_KEY_BYTES = 32
_WITHIN_S = 30.0
_SPUN_UP_S = 0.5


def measure(runs: int) -> Measured:
    observe.configure("warning")  # the supervisor of the workers is in this process
    with Drafter() as drafter:
        asleep = [exchanges(drafter) for _ in range(runs)]
        with cores_awake():
            awake = [exchanges(drafter) for _ in range(runs)]
        seen = asyncio.run(_answers(drafter, runs))
    return Measured([*_trips(awake, asleep), *seen.figures()], _HOW)


# ---- the drafter -----------------------------------------------------------------------------------------


class Drafter:
    """``draft_child`` as a process. Use as a context manager."""

    def __enter__(self) -> Drafter:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "bench.draft_child", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._channel.close()
        self._process.wait(_WITHIN_S)

    def give(self, sock: socket.socket, order: Order) -> None:
        """It closes its copy; this one is closed here."""
        with sock:
            handoff.send(self._channel, msgspec.msgpack.encode(order), sock)


def loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


# ---- an exchange -----------------------------------------------------------------------------------------


def exchanges(drafter: Drafter) -> float:
    """The median of the seconds from a commit to the draft that goes on from it, in ms."""
    near, far = loopback()
    key = os.urandom(_KEY_BYTES)
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
        if source.propose(text, 1):
            return
        if source.error is not None or not came.wait(_WITHIN_S):
            raise RuntimeError(f"no draft came: {source.error}")


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """No core goes to sleep, from which it takes longer to wake than a message takes; nobody has to wait for
    what keeps it from that. Where both ends compute they are awake anyhow."""
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


@dataclass
class _Seen:
    """Tokens per second by side, run by run, and whether every side said the same."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    accepted: dict[str, list[float]] = field(default_factory=dict)
    same: list[float] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        plain, local = self.rates["plain"], self.rates["local"]
        found = [
            Figure("Decode with drafts of a worker beside it, against none", "x", ratios(local, plain)),
        ]
        for delay_s in DELAYS_S:
            side = _side(delay_s)
            title = f"Decode with a drafter {1000 * delay_s:.0f} ms away"
            note = f"{percentile(self.accepted[side], 0.5):.2f} right drafts per pass"
            if delay_s < 0.01:
                values, bar = ratios(self.rates[side], local), at_least(0.95)
                found.append(Figure(f"{title}, share of one beside it", "%", values, bar, note=note))
            values = ratios(self.rates[side], plain)
            found.append(Figure(f"{title}, against none", "x", values, at_least(0.98), note=note))
        found.append(Figure("Decode without drafts", "tok/s", plain))
        found.append(
            Figure("Answers that said the same as without drafts", "%", self.same, at_least(1.0), of="worst")
        )
        return found


async def _answers(drafter: Drafter, runs: int) -> _Seen:
    seen = _Seen()
    sides = {"local": None, **{_side(delay_s): delay_s for delay_s in DELAYS_S}}
    core = sorted(os.sched_getaffinity(0))[0]
    async with _worker(core) as home:
        for run in range(runs):
            prompt = prompts.encoded(MODEL, prompts.OPENINGS[run % len(prompts.OPENINGS)])
            # What is replayed has to be known; this also warms both sides up.
            with _ends(None) as ends:
                await _answer(home, prompt, TOKENS, drafter, ends, 1.0)
            said: dict[str, str] = {}
            for side in alternated(run, ("plain", *sides)):
                if side == "plain":
                    text, rate, accepted = await _answer(home, prompt, TOKENS)
                else:
                    with _ends(sides[side]) as ends:
                        text, rate, accepted = await _answer(home, prompt, TOKENS, drafter, ends, WRONG)
                said[side] = text
                seen.rates.setdefault(side, []).append(rate)
                seen.accepted.setdefault(side, []).append(accepted)
            seen.same.append(float(len(set(said.values())) == 1))
    return seen


def _side(delay_s: float) -> str:
    return f"{1000 * delay_s:.0f} ms"


@contextlib.contextmanager
def _ends(delay_s: float | None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a stream; ``delay_s`` None: on one machine."""
    if delay_s is None:
        yield socket.socketpair()
    elif not delay_s:
        yield loopback()
    else:
        # A round trip takes both ways.
        wire = Delayed(delay_s / 2)
        try:
            yield wire.near, wire.far
        finally:
            wire.close()


async def _answer(
    home: EngineProcess,
    prompt: list[int],
    tokens: int,
    drafter: Drafter | None = None,
    ends: tuple[socket.socket, socket.socket] | None = None,
    wrong: float = 0.0,
) -> tuple[str, float, float]:
    """Text, tokens per second of decode, and right drafts per pass."""
    wanted = Speculate(sources=["drafter"]) if drafter is not None else Speculate(enabled=False)
    request = Generate(
        f"bench-{time.monotonic_ns()}",
        TokenPrompt(prompt),
        Sampling(temperature=0.0),
        tokens,
        speculate=wanted,
    )
    text = ""
    async for event in home.stream(request):
        if isinstance(event, Accepted) and drafter is not None and ends is not None:
            near, far = ends
            key = os.urandom(_KEY_BYTES)
            drafter.give(far, Order(key, STEP_S, wrong))
            await home.give_stream(StreamTag(request.id, DRAFTS, key, "connector"), near)
        elif isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Finished):
            told = event.speculation
            per_pass = told.accepted / told.passes if told is not None and told.passes else 0.0
            rate = (event.usage.completion_tokens - 1) / event.timings.decode_s
            return text, rate, per_pass
    raise RuntimeError("an answer ended without its end")


@contextlib.asynccontextmanager
async def _worker(core: int) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(
        WorkerSettings(name=DEFAULT_MODEL, path=str(MODEL), threads=1, prefix_cache_bytes=1)
    )
    with starting_on(core, None, os.getpid()):
        await engine.start()
    try:
        async for _ in engine.loaded():
            pass
        yield engine
    finally:
        await engine.stop()


_HOW = (
    f"The default model in a worker on one core, greedy, {TOKENS} tokens, and a drafter in a process of its "
    "own, with the workers' drafter, frames and sealed streams. There is no smaller model with the same "
    f"vocabulary, so the drafter's model is played: it replays the answer, {1000 * STEP_S:.0f} ms per token, "
    f"with every {1 / WRONG:.0f}th token wrong at random, half of them with the truth as the runner-up. "
    "Beside it: over a socket pair; else over TCP on loopback, or a wire that adds the given round trip. "
    "All sides of a run decode the same prompt in turns, with the controller as it is by default."
)
