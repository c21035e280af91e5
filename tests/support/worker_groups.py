"""A model over several workers: real processes, real sockets; only the daemons are played here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from request_events import RequestEvents
from sharing import LAYERS, tcp_pair, worker_settings, workers

from fleetd import limits
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import HOP_IN, HOP_OUT, STAGE, Accepted, Generate, ServeStage, StreamTag
from fleetd.engine.settings import GroupMember
from fleetd.errors import FleetError

TOKENS = 4096
LABEL = "0" * limits.CACHE_ORIGIN_CHARS


class CountedStream:
    """Both ends of a stream, whose bytes pass through here. ``carried``: bytes each way, the first end's
    first."""

    def __init__(self) -> None:
        self.carried = [0, 0]
        self.near, near = tcp_pair()
        far, self.far = tcp_pair()
        self._inner = near, far
        self._held = threading.Event()
        self._threads = [
            threading.Thread(target=self._carry, args=(0, near, far), daemon=True),
            threading.Thread(target=self._carry, args=(1, far, near), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _carry(self, way: int, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._held.is_set():
                    continue
                self.carried[way] += len(data)
                target.sendall(data)
        if not self._held.is_set():
            self.cut()

    def hold(self) -> None:
        """As when a cable is pulled: nothing more arrives, and neither end is told."""
        self._held.set()

    def cut(self) -> None:
        """Both ends are told that it broke."""
        for sock in self._inner:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def ended(self) -> bool:
        """True once both ends have closed it."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in self._inner:
            sock.close()


@dataclass
class GroupStreams:
    """``to``: from the worker that answers, one for each member; ``hops``: those between two members."""

    to: list[CountedStream] = field(default_factory=list)
    hops: list[CountedStream] = field(default_factory=list)


@asynccontextmanager
async def group(
    path: Path, *cuts: int, direct: bool = True, streams: GroupStreams | None = None, **settings: Any
) -> AsyncIterator[tuple[EngineProcess, ...]]:
    """The worker that answers and the members, which have only their own layers.

    ``direct``: members have streams to each other. ``streams`` gets all streams.
    """
    ends = [*cuts, LAYERS]
    parts = list(zip(cuts, ends[1:], strict=True))
    found = streams or GroupStreams()
    async with AsyncExitStack() as stack:
        members = []
        for first, last in parts:
            made = await stack.enter_async_context(
                workers(path, 1, first_layer=first, last_layer=last, part_of="tiny", **settings)
            )
            members += made
        carried = stack.enter_context(ExitStack())

        def stream(kept: list[CountedStream]) -> CountedStream:
            kept.append(CountedStream())
            carried.callback(kept[-1].close)
            return kept[-1]

        given = []
        for number, (member, (first, last)) in enumerate(zip(members, parts, strict=True)):
            events = member.serve(ServeStage(f"job{number}", first, last, TOKENS, "asker", LABEL))
            await stack.enter_async_context(aclosing(events))
            assert isinstance(await anext(events), Accepted)
            key, ends_of = os.urandom(32), stream(found.to)
            await member.give_stream(StreamTag(f"job{number}", STAGE, key, "acceptor"), ends_of.far)
            given.append((StreamTag(f"member{number}", STAGE, key, "connector"), ends_of.near))
        for number, (before, behind) in enumerate(pairwise(members) if direct else ()):
            key, ends_of = os.urandom(32), stream(found.hops)
            await behind.give_stream(StreamTag(f"job{number + 1}", HOP_IN, key, "acceptor"), ends_of.far)
            await before.give_stream(StreamTag(f"job{number}", HOP_OUT, key, "connector"), ends_of.near)
        asked = tuple(
            GroupMember(
                *part, f"member{n}", f"machine {n}", how_it_computes(member), direct, kind_of_device(member)
            )
            for n, (part, member) in enumerate(zip(parts, members, strict=True))
        )
        front = await stack.enter_async_context(_front(path, asked, given, **settings))
        yield front, *members


@asynccontextmanager
async def _front(
    path: Path, members: tuple[GroupMember, ...], streams: Sequence[tuple[StreamTag, Any]], **settings: Any
) -> AsyncIterator[EngineProcess]:
    front = EngineProcess(worker_settings(path, group=members, group_tokens=TOKENS, **settings))
    try:
        await front.start()
        for tag, sock in streams:
            await front.give_stream(tag, sock)
        async for _ in front.loaded():
            pass
        yield front
    finally:
        await front.stop()


def how_it_computes(member: EngineProcess) -> str:
    assert member.facts is not None
    assert member.facts.arithmetic is not None
    return member.facts.arithmetic.text


def kind_of_device(member: EngineProcess) -> str:
    assert member.facts is not None
    assert member.facts.arithmetic is not None
    return member.facts.arithmetic.kind


async def answered(engine: EngineProcess, request: Generate) -> RequestEvents:
    told = RequestEvents()
    try:
        async for event in engine.stream(request):
            told.events.append(event)
    except FleetError as error:
        told.error = error
    return told
