"""The channel on which sockets go to a worker, beside the one for messages: both of its ends.

The daemon dials and accepts; the worker that the bytes are for reads and writes them itself.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from fleetd import limits
from fleetd.engine.protocol import StreamTag
from fleetd.errors import EngineDied, ProtocolError
from fleetd.process.joined_threads import joined
from fleetd.process.used_socket import UsedSocket
from fleetd.sealed import handoff
from fleetd.text.decoding import msgpack_decoder


class SocketSender:
    """The daemon's end."""

    def __init__(self, channel: socket.socket) -> None:
        channel.settimeout(limits.HANDOFF_S)
        self._channel = UsedSocket(channel)
        # One message after the other. Those that wait hold no thread: a worker that stands still would have
        # all of asyncio's, on which the daemon reads its disk.
        self._turn = asyncio.Lock()

    async def give(self, tag: StreamTag, sock: socket.socket) -> None:
        """Hand over a connected socket, which is closed here in any case. Raises EngineDied."""
        # It goes on, and closes the socket, even if no one waits any more.
        if (error := await asyncio.shield(self._in_turn(tag, sock))) is not None:
            raise EngineDied(f"A stream could not be handed to the engine ({error}).", retry_after_s=1)

    async def _in_turn(self, tag: StreamTag, sock: socket.socket) -> OSError | None:
        with sock:
            async with self._turn:
                return await joined(partial(self._give, tag, sock))

    def _give(self, tag: StreamTag, sock: socket.socket) -> OSError | None:
        try:
            with self._channel.used() as channel:
                handoff.send(channel, msgspec.msgpack.encode(tag), sock)
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Idempotent. A hand-over that is under way fails."""
        self._channel.end()


def receive_sockets(channel: socket.socket, taken: Callable[[StreamTag, socket.socket], None]) -> None:
    """The worker's end: call ``taken`` with each stream, until the daemon is gone.

    Raises:
        ProtocolError: what came is no stream.
    """
    decode = msgpack_decoder(StreamTag).decode
    while True:
        try:
            body, sock = handoff.receive(channel)
        except (EOFError, OSError):
            return
        if sock is None:
            raise ProtocolError("A message about a stream came without its socket.")
        try:
            tag = decode(body)
        except msgspec.DecodeError as error:
            sock.close()
            raise ProtocolError(f"A message about a stream cannot be read: {error}.") from None
        taken(tag, sock)


class ChannelThread:
    """Takes what ``receive_sockets`` brings, on a thread of its own, and holds it until ``give_to``."""

    def __init__(self, channel: socket.socket) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[StreamTag, socket.socket]] = []
        self._take: Callable[[StreamTag, socket.socket], None] = self._hold
        threading.Thread(
            target=receive_sockets, args=(channel, self._taken), name="channel", daemon=True
        ).start()

    def give_to(self, take: Callable[[StreamTag, socket.socket], None]) -> None:
        """Call ``take`` with each stream from now on, and with those that came before."""
        with self._lock:
            held, self._held = self._held, []
            for tag, sock in held:
                take(tag, sock)
            self._take = take

    def _hold(self, tag: StreamTag, sock: socket.socket) -> None:
        self._held.append((tag, sock))

    def _taken(self, tag: StreamTag, sock: socket.socket) -> None:
        with self._lock:
            self._take(tag, sock)
