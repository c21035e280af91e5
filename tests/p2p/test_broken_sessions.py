"""A session that breaks leaves nothing behind: no message waits for the next full garbage collection."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from fleet_nodes import WITHIN_S, introduce, running, settings, together

from fleetd.errors import FleetError
from fleetd.p2p.node import Node
from fleetd.p2p.session.session import Session
from fleetd.p2p.session.stream import SessionStream
from fleetd.p2p.session.transport import PeerConnection, PeerStream

STREAMS = 3
KINDS = (PeerConnection, PeerStream, Session, SessionStream)


def alive() -> int:
    return sum(isinstance(each, KINDS) for each in gc.get_objects())


async def read_to_the_end(stream: PeerStream) -> None:
    try:
        while await stream.receive() is not None:
            pass
    except FleetError:
        return


async def echo(_peer: str, _body: bytes, stream: PeerStream) -> None:
    while (message := await stream.receive()) is not None:
        stream.send(message)


@pytest.mark.parametrize("sessions", [8, pytest.param(50, marks=pytest.mark.long)])
async def test_broken_sessions_are_freed_without_the_garbage_collector(tmp_path: Path, sessions: int) -> None:
    here, there = Node(settings(tmp_path, "here")), Node(settings(tmp_path, "there"))
    there.handle("echo", echo)
    async with running(here, there):
        await introduce(here, there)
        await together([here, there])
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for _ in range(sessions):
                await together([here, there])
                await break_in_mid_message(here, there)
            await together([here, there])
            # Those of the session that is up now, and of the one that was broken last, whose end may be due.
            async with asyncio.timeout(WITHIN_S):
                while alive() > before + 2 * len(KINDS) + 2 * STREAMS:  # noqa: ASYNC110  (nothing tells)
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def break_in_mid_message(here: Node, there: Node) -> None:
    streams = [here.request(there.node_id, "echo", b"") for _ in range(STREAMS)]
    for stream in streams:
        stream.send(b"x" * 100_000)
        await stream.receive()
        stream.send(b"x" * 300_000)
    readers = [asyncio.create_task(read_to_the_end(stream)) for stream in streams]
    ends = {id(stream.connection): stream.connection for stream in streams}.values()
    for connection in ends:
        assert connection._transport is not None
        connection._transport.abort()
    await asyncio.gather(*readers)
    for connection in ends:
        await connection.gone.wait()
