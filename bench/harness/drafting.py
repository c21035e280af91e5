"""Answers of one worker with drafts from another process, near or far."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.children.drafter import Order
from bench.harness.child import ROOT
from bench.harness.cores import loopback, starting_on
from bench.harness.daemon import MODEL
from bench.harness.delayed_sockets import Delayed
from bench.harness.samples import Closing
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    DraftFor,
    Finished,
    Generate,
    Sampling,
    Speculate,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import Context
from fleetd.engine.streams.frames import Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import FleetError
from fleetd.sealed import handoff

KEY_BYTES = 32
_WITHIN_S = 30.0
# A text is read before its first guess.
_FIRST_WITHIN_S, _POLL_S = 300.0, 0.05
# Gives a drafter its end of an answer's stream and the key of that stream.
GiveDrafter = Callable[[socket.socket, bytes], Awaitable[None]]


class PlayedDrafter(Closing):
    """``bench.children.drafter`` as a process, on ``core`` alone where one is given."""

    def __init__(self, core: int | None = None) -> None:
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", "bench.children.drafter", str(theirs.fileno())]
        with theirs, starting_on({core}) if core is not None else contextlib.nullcontext():
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)

    def give(self, sock: socket.socket, order: Order) -> None:
        """Hand over a socket with its order; this end's copy is closed."""
        with sock:
            handoff.send(self._channel, msgspec.msgpack.encode(order), sock)

    def playing(self, step_s: float, wrong: float) -> GiveDrafter:
        """A drafter that takes ``step_s`` per token and guesses wrong with the chance ``wrong``."""

        async def give(far: socket.socket, key: bytes) -> None:
            self.give(far, Order(key, step_s, wrong))

        return give

    def close(self) -> None:
        self._channel.close()
        self._process.wait(_WITHIN_S)


@contextlib.contextmanager
def stream_ends(delay_s: float | None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a stream whose round trip takes ``delay_s``; None: a socket pair on one machine."""
    if delay_s is None:
        yield socket.socketpair()
    elif not delay_s:
        yield loopback()
    else:
        # A round trip takes both ways.
        with Delayed(delay_s / 2) as wire:
            yield wire.near, wire.far


@dataclass(frozen=True, slots=True)
class Drafted:
    """An answer: text, tokens per second of decode, tokens per pass, right drafts per verifying pass."""

    text: str
    rate: float
    per_pass: float
    accepted: float


async def answer(
    home: EngineProcess,
    prompt: list[int],
    tokens: int,
    sources: list[str],
    drafter: GiveDrafter | None = None,
    delay_s: float | None = None,
) -> Drafted:
    """A greedy answer with these sources of drafts; none: without drafts."""
    request = Generate(
        f"bench-{time.monotonic_ns()}",
        TokenPrompt(prompt),
        Sampling(temperature=0.0),
        tokens,
        speculate=Speculate(sources=sources) if sources else Speculate(enabled=False),
    )
    text = ""
    with contextlib.ExitStack() as stack:
        async for event in home.stream(request):
            if isinstance(event, Accepted) and drafter is not None:
                near, far = stack.enter_context(stream_ends(delay_s))
                key = os.urandom(KEY_BYTES)
                await drafter(far, key)
                await home.give_stream(StreamTag(request.id, DRAFTS, key, "connector"), near)
            elif isinstance(event, Delta):
                text += event.text
            elif isinstance(event, Finished):
                told, count = event.speculation, event.usage.completion_tokens
                rate = (count - 1) / event.timings.decode_s
                if told is None or not told.passes:
                    return Drafted(text, rate, 1.0, 0.0)
                return Drafted(text, rate, told.tokens / told.passes, told.accepted / told.passes)
    raise RuntimeError("an answer ended without its end")


# ---- A real drafter: the model's own first layers --------------------------------------------------------


@contextlib.asynccontextmanager
async def following(drafter: EngineProcess) -> AsyncIterator[GiveDrafter]:
    """What has a real worker draft for each text that it is given."""
    tasks: list[asyncio.Task[None]] = []

    async def give(far: socket.socket, key: bytes) -> None:
        name, ready = f"draft-{secrets.token_hex(4)}", asyncio.Event()

        async def follow() -> None:
            with contextlib.suppress(FleetError):
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


@dataclass(frozen=True, slots=True)
class Followed:
    """What a drafter did for a text: seconds until its first guess, the share of the text's further tokens
    that it guessed rightly, and the bytes of keys and values that its worker has promised to the text."""

    first_s: float
    right: float
    promised_bytes: int


async def followed(drafter: EngineProcess, text: Sequence[int], further: Sequence[int]) -> Followed:
    """Have a worker draft for a text that nobody writes: it goes on with ``further``, one after the other."""
    loop, moved, key = asyncio.get_running_loop(), asyncio.Event(), os.urandom(KEY_BYTES)

    def connect(place: Place) -> SocketPipe:
        def wake() -> None:
            loop.call_soon_threadsafe(moved.set)

        return SocketPipe(near, key, "connector", place=place, wake=wake)

    async def guess() -> int:
        async with asyncio.timeout(_FIRST_WITHIN_S):
            while not (found := source.propose(Context(so_far, 1))):
                if source.error is not None:
                    raise source.error
                await moved.wait()
                moved.clear()
        return found[0]

    async with following(drafter) as give:
        near, far = loopback()
        await give(far, key)
        begun, so_far, right = time.perf_counter(), list(text), 0
        source = RemoteSource(connect, so_far, _vocabulary(drafter))
        try:
            guessed = await guess()
            first_s = time.perf_counter() - begun
            for token in further:
                right += guessed == token
                so_far.append(token)
                source.committed([token])
                guessed = await guess()
            # A worker tells what it has promised when it beats.
            while not (promised := drafter.status.kv_bytes):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        finally:
            source.close()
    return Followed(first_s, right / max(1, len(further)), promised)


def _vocabulary(drafter: EngineProcess) -> int:
    assert drafter.facts is not None
    return drafter.facts.vocab_size


def first_layers(folder: Path, layers: int, head: npt.NDArray[np.float16] | None = None) -> Path:
    """A copy of the default model that ends after so many layers.

    Args:
        head: (tokens, width), an output head of its own, which takes normed states; None for the model's norm
            and head.
    """
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    for path in MODEL.iterdir():
        if path.name.startswith(("token", "generation")):
            shutil.copyfile(path, folder / path.name)
    config: dict[str, Any] = msgspec.json.decode((MODEL / "config.json").read_bytes())
    config |= {"num_hidden_layers": layers, "tie_word_embeddings": head is None}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    kept = {}
    for path in MODEL.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            number = name.partition("layers.")[2].partition(".")[0]
            if not number or int(number) < layers:
                kept[name] = tensor
    if head is not None:
        kept["lm_head.weight"] = head
        kept["model.norm.weight"] = np.ones_like(kept["model.norm.weight"])
    save_file(kept, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder
