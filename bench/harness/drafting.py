"""Answers of one worker with drafts from another process, near or far."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec

from bench.children.drafter import Order
from bench.harness.child import ROOT
from bench.harness.cores import loopback, starting_on
from bench.harness.delayed_sockets import Delayed
from bench.harness.samples import Closing
from fleetd.engine.daemon_side.supervisor import EngineProcess
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
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.sealed import handoff

KEY_BYTES = 32
_WITHIN_S = 30.0
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
