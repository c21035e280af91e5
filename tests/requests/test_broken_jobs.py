"""Jobs whose session breaks without a goodbye leave nothing behind, at either end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

import pytest
from fleet_nodes import introduce, running, settings, together
from kept_objects import KeptObjects, without_collector

from fleetd.engine.protocol import Accepted, Delta, Event, Generate, Loading, TextPrompt
from fleetd.errors import FleetError
from fleetd.p2p.node import Node
from fleetd.requests.job import Job, Planned
from fleetd.requests.remote import messages
from fleetd.requests.remote.remote import JobServer, RemoteJob

JOBS = 10
PROMPT = "x" * 100_000


async def answer(job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
    yield Accepted(job.request.id, 10)
    yield Delta(job.request.id, "a word")
    await asyncio.Event().wait()


async def read_to_the_end(job: RemoteJob, begun: asyncio.Queue[None]) -> None:
    try:
        async for event in job.events():
            if isinstance(event, Delta):
                begun.put_nowait(None)
    except FleetError:
        return


async def break_in_mid_answer(here: Node, there: Node) -> None:
    begun = asyncio.Queue[None]()
    jobs = [
        RemoteJob(
            lambda method, body: here.request(there.node_id, method, body),
            Job("m", Generate(f"r{n}", TextPrompt(PROMPT)), "socket", "chat"),
            "m",
            "",
            Planned("remote", (there.node_id,), "exact"),
        )
        for n in range(JOBS)
    ]
    readers = [asyncio.create_task(read_to_the_end(job, begun)) for job in jobs]
    async with asyncio.timeout(30):
        for _ in jobs:
            await begun.get()
    connections = list(here._connections.values())
    for connection in connections:
        assert connection._transport is not None
        connection._transport.abort()
    await asyncio.gather(*readers)
    for connection in connections:
        await connection.gone.wait()


async def few(kept: KeptObjects) -> None:
    """Those of the session that is up now, and of the one that was broken last, whose end may be due."""
    await kept.until_few(2 * JOBS)
    assert kept.n_bytes < 3 * JOBS * len(PROMPT), kept.n_bytes


@pytest.mark.one_loop
@pytest.mark.parametrize("sessions", [5, pytest.param(50, marks=pytest.mark.long)])
async def test_jobs_of_broken_sessions_are_freed_without_the_garbage_collector(
    tmp_path: Path, sessions: int
) -> None:
    here, there = Node(settings(tmp_path, "here")), Node(settings(tmp_path, "there"))
    there.handle(messages.RUN, JobServer(answer, lambda digest: True))
    async with running(here, there):
        await introduce(here, there)
        await together([here, there])
        await break_in_mid_answer(here, there)
        await together([here, there])
        with without_collector() as kept:
            for _ in range(sessions):
                await break_in_mid_answer(here, there)
                await together([here, there])
            await few(kept)
