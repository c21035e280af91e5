"""A model whose layers are divided between real workers; only the daemons are played here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from sharing import LAYERS, start, tcp_pair, worker_settings

from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import STAGE, Accepted, ServeStage, StreamTag
from fleetd.engine.settings import GroupMember, RingPlace
from fleetd.p2p.tunnel import LocalPort

TOKENS = 4096


_HELD: list[LocalPort] = []


def free_ports(count: int) -> list[int]:
    """Held until this process ends, so that no other one gets them. MLX binds them beside that."""
    made = [LocalPort() for _ in range(count)]
    _HELD.extend(made)
    return [each.port for each in made]


def places(size: int) -> list[RingPlace]:
    """A ring without tunnels."""
    ports = free_ports(size)
    return [RingPlace(rank, size, ports[rank], ports[(rank + 1) % size]) for rank in range(size)]


@asynccontextmanager
async def ranks(
    path: Path, size: int, *, layers: int = LAYERS, made: type[EngineProcess] = EngineProcess, **settings: Any
) -> AsyncIterator[list[EngineProcess]]:
    """Workers that have divided a model; the first answers."""
    settings = {"cpu_arithmetic": "float32", **settings}
    ring = places(size)
    asked = tuple(GroupMember(0, layers, f"member{rank}", f"machine {rank}") for rank in range(1, size))
    front = made(worker_settings(path, group=asked, group_tokens=TOKENS, ring=ring[0], **settings))
    others = [
        made(worker_settings(path, name=f"rank{place.rank}", ring=place, **settings)) for place in ring[1:]
    ]
    async with AsyncExitStack() as stack:
        for engine in (front, *others):
            stack.push_async_callback(engine.stop)
        await front.start()
        await asyncio.gather(*(start(engine) for engine in others))
        for rank, engine in enumerate(others, 1):
            near, far = tcp_pair()
            events = engine.serve(ServeStage(f"job{rank}", 0, layers, TOKENS))
            await stack.enter_async_context(aclosing(events))
            assert isinstance(await anext(events), Accepted)
            key = os.urandom(32)
            await engine.give_stream(StreamTag(f"job{rank}", STAGE, key, "acceptor"), near)
            await front.give_stream(StreamTag(f"member{rank}", STAGE, key, "connector"), far)
        async for _ in front.loaded():
            pass
        yield [front, *others]
