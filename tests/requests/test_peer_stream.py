"""Reading a request's stream of another machine."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from fleetd.errors import PeerLost
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import next_message

SILENCE_S = 0.5


class SocketStream:
    """A request's stream whose messages come on a socket, each in one piece."""

    def __init__(self, near: socket.socket) -> None:
        self._near = near

    async def receive(self) -> bytes:
        found = await asyncio.get_running_loop().sock_recv(self._near, len(ALIVE) or 1)
        return ALIVE if found == b"." else found


async def test_a_process_that_stood_still_itself_takes_nobody_for_silent() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        stream: Any = SocketStream(near)

        def stand_still() -> None:
            # The other machine goes on meanwhile.
            time.sleep(2 * SILENCE_S)
            far.send(b".!")

        waiting = asyncio.create_task(next_message(stream, silence_s=SILENCE_S))
        asyncio.get_running_loop().call_later(SILENCE_S / 10, stand_still)
        assert await waiting == b"!"


async def test_who_is_silent_is_lost() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        stream: Any = SocketStream(near)
        far.send(b".")
        with pytest.raises(PeerLost, match=r"No sign of life for 0\.5 s"):
            await next_message(stream, silence_s=SILENCE_S)
