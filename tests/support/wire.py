"""The wires between machines of a test: all that crosses between two of them, held, cut or spoiled at will.

    dialler ──► Front ──► listener      a session (TLS, as bytes), or a sealed stream (chunk by chunk)

Whoever looks on (``Watch``) is told of every stream and of every chunk before it goes on, and says what
becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Literal

from fleetd.p2p.tickets import PREFACE, TICKET_BYTES
from fleetd.sealed.chunks import HEADER_BYTES

_LAST = 1 << 63
_BLOCK = 1 << 16
_AT_ONCE = struct.pack("ii", 1, 0)


class Effect(Enum):
    PASS = "pass"
    # Nothing more passes, in either direction, until it is released.
    HOLD = "hold"
    # Both ends are reset.
    RESET = "reset"
    # One end is reset; the other sees an end like any other.
    RESET_DIALLER = "reset dialler"
    RESET_LISTENER = "reset listener"
    # One bit changes.
    SPOIL = "spoil"


Way = Literal["forth", "back"]
END = "END"
# Whoever sends that way has closed, after END or without one.
GONE = "gone"
# Dialler, listener, which way (None for the stream's beginning), and the chunk's number, END or GONE.
Watch = Callable[[str, str, Way | None, int | str], Effect]


class Link:
    """One connection through a front. ``kind`` is "session" or "stream"."""

    def __init__(self, front: Front, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.front = front
        self.kind = ""
        self.near, self.far = near, far
        self._open = asyncio.Event()
        self._open.set()
        # Ways in which the next block of a session is to be spoiled.
        self.spoil: set[Way] = set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def passes(self) -> None:
        await self._open.wait()

    def reset(self, which: Effect = Effect.RESET) -> None:
        """The ends that are not reset are closed."""
        self.front.wire.broke(self)
        self.release()
        if self.near.is_closing() or self.far.is_closing():
            which = Effect.RESET
        for writer, effect in ((self.near, Effect.RESET_DIALLER), (self.far, Effect.RESET_LISTENER)):
            if which in (Effect.RESET, effect):
                if not writer.is_closing():
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                writer.transport.abort()
            else:
                writer.close()


class Front:
    """Where ``dialler`` finds ``listener``, whose own port is ``port``."""

    def __init__(self, wire: WatchedWire, dialler: str, listener: str, port: int) -> None:
        self.wire, self.dialler, self.listener, self._port = wire, dialler, listener, port
        self.links: set[Link] = set()
        # Ports from which streams have come.
        self.seen: set[int] = set()
        # The listener is gone: whoever calls is refused.
        self.down = False
        # It does not move: whoever calls waits.
        self.held = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        self._server.close()
        for link in list(self.links):
            link.reset()
        await self._server.wait_closed()

    async def _accepted(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        if self.down:
            near.transport.abort()
            return
        try:
            answers, far = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            near.close()
            return
        link = Link(self, near, far)
        self.links.add(link)
        try:
            if self.held:
                link.hold()
            await self._relay(link, reader, answers)
        finally:
            self.links.discard(link)
            for writer in (near, far):
                writer.close()

    async def _relay(self, link: Link, reader: asyncio.StreamReader, answers: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first = await reader.readexactly(len(PREFACE))
            if first != PREFACE:
                link.kind = "session"
                await link.passes()
                link.far.write(first)
                await self._both(
                    link,
                    self._session(link, reader, link.far, "forth"),
                    self._session(link, answers, link.near, "back"),
                )
                return
            link.kind = "stream"
            self.seen.add(link.near.get_extra_info("peername")[1])
            ticket = bytearray(first + await reader.readexactly(len(PREFACE) + TICKET_BYTES - len(first)))
            if self._becomes(link, None, 0) is Effect.SPOIL:
                ticket[-1] ^= 1
            await link.passes()
            link.far.write(ticket)
            await self._both(
                link,
                self._stream(link, reader, link.far, "forth"),
                self._stream(link, answers, link.near, "back"),
            )

    async def _both(
        self, link: Link, forth: Coroutine[Any, Any, None], back: Coroutine[Any, Any, None]
    ) -> None:
        async def pump(work: Coroutine[Any, Any, None]) -> None:
            try:
                await work
            except (OSError, RuntimeError):  # the latter is how uvloop says that a transport is closed
                link.reset()

        async with asyncio.TaskGroup() as group:
            group.create_task(pump(forth))
            group.create_task(pump(back))

    async def _session(
        self, link: Link, reader: asyncio.StreamReader, out: asyncio.StreamWriter, way: Way
    ) -> None:
        while block := bytearray(await reader.read(_BLOCK)):
            await link.passes()
            if way in link.spoil:
                link.spoil.discard(way)
                self.wire.broke(link)
                block[-1] ^= 1
            out.write(block)
            await out.drain()
        await link.passes()
        out.close()

    async def _stream(
        self, link: Link, reader: asyncio.StreamReader, out: asyncio.StreamWriter, way: Way
    ) -> None:
        number = 0
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                try:
                    header = await reader.readexactly(HEADER_BYTES)
                    size, counter = struct.unpack(">IQ", header)
                    chunk = bytearray(header + await reader.readexactly(size))
                except (asyncio.IncompleteReadError, OSError):
                    self.wire.watch(self.dialler, self.listener, way, GONE)
                    raise
                effect = self._becomes(link, way, END if counter & _LAST else number)
                number += 1
                if effect is Effect.SPOIL:
                    chunk[-1] ^= 1
                await link.passes()
                out.write(chunk)
                await out.drain()
        await link.passes()
        if not out.is_closing():
            out.write_eof()

    def _becomes(self, link: Link, way: Way | None, number: int | str) -> Effect:
        effect = self.wire.watch(self.dialler, self.listener, way, number)
        if effect is Effect.HOLD:
            link.hold()
        elif effect not in (Effect.PASS, Effect.SPOIL):
            link.reset(effect)
        return effect


class WatchedWire:
    """All fronts between some machines."""

    def __init__(self) -> None:
        self.fronts: dict[tuple[str, str], Front] = {}
        self.watch: Watch = lambda *_: Effect.PASS
        #: Told of each connection that is about to be reset, and of each session of which a block is spoiled.
        self.broke: Callable[[Link], None] = lambda _link: None

    async def between(self, dialler: str, listener: str, port: int) -> tuple[str, int]:
        """The address that ``dialler`` has to know."""
        front = self.fronts[dialler, listener] = Front(self, dialler, listener, port)
        await front.open()
        return front.address

    def links(self, machine: str, kind: str) -> list[Link]:
        return [link for front in self._of(machine) for link in front.links if link.kind == kind]

    def cut_off(self, machine: str) -> None:
        """It is gone, with everything that was on its way."""
        for front in self._of(machine):
            front.down = True
            for link in list(front.links):
                link.reset()

    def freeze(self, machine: str) -> None:
        """Its daemon does not move: sessions stand still, and nobody is let in."""
        for front in self._of(machine):
            front.held = True
        for link in self.links(machine, "session"):
            link.hold()

    def mend(self) -> None:
        for front in self.fronts.values():
            front.down = front.held = False
            for link in front.links:
                link.release()
                link.spoil.clear()

    def count(self, kind: str) -> int:
        """Connections that are open."""
        return sum(link.kind == kind for front in self.fronts.values() for link in front.links)

    async def close(self) -> None:
        for front in self.fronts.values():
            await front.close()

    def _of(self, machine: str) -> list[Front]:
        return [front for pair, front in self.fronts.items() if machine in pair]
