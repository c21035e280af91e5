"""Starts of forked workers that are cancelled: what they have opened is closed by whoever has it."""

from __future__ import annotations

import asyncio
import os
import socket

from forked_programs import exec_forked

WITHIN_S = 60.0
# More turns of the loop than a start takes once its process id has come.
TURNS = 12
_NONE = (-1).to_bytes(4, "big", signed=True)


async def test_a_start_that_is_cancelled_at_any_turn_leaves_its_numbers_to_others() -> None:
    """asyncio kept the number of a socket that was closed under its transport, and the next socket that had
    it was never read."""
    for turns in range(TURNS):
        channel, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with channel, server:
            starting = asyncio.create_task(exec_forked(channel, "worker", pass_fds=[]))
            await asyncio.sleep(0)
            _, (status, *standard), _, _ = socket.recv_fds(server, 1 << 16, 4)
            # How a process ended that could not be started: none is killed by its id.
            os.write(status, _NONE)
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            for descriptor in (status, *standard):
                os.close(descriptor)
            if not starting.cancelled():
                await starting.result().wait()
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(_is_read(*socket.socketpair()) for _ in range(4)))


async def _is_read(near: socket.socket, far: socket.socket) -> None:
    near.setblocking(False)
    with near, far:
        reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(near, 1))
        await asyncio.sleep(0)
        far.send(b"x")
        assert await reading == b"x"
