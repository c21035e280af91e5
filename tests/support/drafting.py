"""Engine workers that draft for each other on one box: the part of a daemon that introduces them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sharing import Told, settle

from bench.draft_link import Delayed
from fleetd.engine.protocol import Accepted, Delta, DraftFor, Generate, StreamTag
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.drafter import DraftWriter, Guesser
from fleetd.engine.speculation.lookahead import Lookahead
from fleetd.engine.streams.frames import FrameHeader, Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.engine.supervisor import EngineProcess
from fleetd.errors import FleetError

# A dozen frames of drafts.
DRAFTED_BYTES = 1500
# What a frame becomes on its way: other frames, or none.
Tamper = Callable[[FrameHeader, bytes], list[tuple[FrameHeader, bytes]]]


async def answer(home: EngineProcess, request: Generate) -> Told:
    """Without drafts of others."""
    told = Told()
    async for event in home.stream(request):
        told.events.append(event)
    return told


@asynccontextmanager
async def following(
    drafter: EngineProcess, follow: DraftFor
) -> AsyncIterator[tuple[Told, asyncio.Task[None]]]:
    """A follow that is accepted, or has failed."""
    told, ready = Told(), asyncio.Event()

    async def run() -> None:
        try:
            async for event in drafter.follow(follow):
                told.events.append(event)
                ready.set()
        except FleetError as error:
            told.error = error
        ready.set()

    task = asyncio.create_task(run())
    try:
        await ready.wait()
        yield told, task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def drafted(
    home: EngineProcess,
    drafter: EngineProcess,
    request: Generate,
    *,
    delay_s: float = 0.0,
    begun: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
    leave: bool = False,
) -> tuple[Told, Told]:
    """The answer with drafts from another worker, and that one's own account.

    The prompt of a ``shared`` request is kept waiting until there are drafts: tiny models are quick.

    Args:
        delay_s: of the wire between both.
        begun: called when the answer's first text comes; ``ended``: when all of it is there.
        leave: the daemon gives the drafter up when the first text comes.
    """
    told, follow, wire = Told(), DraftFor(f"{request.id}.drafts"), Delayed(delay_s)
    try:
        async with following(drafter, follow) as (followed, task):
            assert followed.error is None, followed.error
            async for event in home.stream(request):
                if isinstance(event, Delta) and not told.of(Delta):
                    begun()
                    if leave:
                        task.cancel()
                told.events.append(event)
                if isinstance(event, Accepted):
                    key = os.urandom(32)
                    await home.give_stream(StreamTag(request.id, DRAFTS, key, "connector"), wire.near)
                    await drafter.give_stream(StreamTag(follow.id, DRAFTS, key, "acceptor"), wire.far)
                    if event.waits:
                        await settle(lambda: wire.came > DRAFTED_BYTES)
                        home.alone(request.id)
            ended()
            if drafter.state == "ready" and not leave:
                await asyncio.wait({task}, timeout=20)
                assert followed.error is not None or followed.events[1:], "it did not see the stream end"
        return told, followed
    finally:
        wire.close()


class _Tampering:
    """A pipe whose frames are changed before they are sent."""

    def __init__(self, pipe: SocketPipe, tamper: Tamper) -> None:
        self._pipe, self._tamper = pipe, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, head: FrameHeader, *payload: memoryview) -> None:
        for changed, data in self._tamper(head, b"".join(payload)):
            self._pipe.send(changed, memoryview(data))


async def drafted_by_hand(
    home: EngineProcess,
    model: Guesser,
    request: Generate,
    tamper: Tamper = lambda head, payload: [(head, payload)],
    turn: Callable[[DraftWriter], None] = lambda drafter: drafter.step(64),
) -> tuple[Told, Exception | None]:
    """The answer with drafts from this very process, and what its drafter failed with.

    ``turn``: what the drafter does whenever it can.
    """
    told, moved = Told(), asyncio.Event()
    loop, near_far = asyncio.get_running_loop(), socket.socketpair()
    key = os.urandom(32)

    def connect(place: Place) -> Any:
        def wake() -> None:
            loop.call_soon_threadsafe(moved.set)

        return _Tampering(SocketPipe(near_far[1], key, "acceptor", place=place, wake=wake), tamper)

    drafter = DraftWriter(model, connect, Lookahead(), context_tokens=4096, vocab_size=512)

    async def draft() -> Exception | None:
        while True:
            try:
                if drafter.ready:
                    turn(drafter)
                    await asyncio.sleep(0)
                else:
                    await moved.wait()
                    moved.clear()
            except FleetError as error:
                drafter.close()
                return error

    task = asyncio.create_task(draft())
    try:
        async for event in home.stream(request):
            told.events.append(event)
            if isinstance(event, Accepted):
                await home.give_stream(StreamTag(request.id, DRAFTS, key, "connector"), near_far[0])
                if event.waits:
                    # Not only made, but sent.
                    await settle(
                        lambda: (
                            task.done()
                            or (drafter.drafted > 0 and not drafter.ready and drafter._pipe.backlog == 0)
                        )
                    )
                    home.alone(request.id)
        done, _ = await asyncio.wait({task}, timeout=20)
        return told, task.result() if done else None
    finally:
        task.cancel()
        await asyncio.wait({task})
        drafter.close()
        for sock in near_far:
            sock.close()
