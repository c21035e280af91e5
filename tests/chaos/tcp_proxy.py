"""A TCP proxy between two machines that can be a bad network: cut, slow, late, silent, half closed, wrong.

Each connection is passed on at its own source address, by which the other side knows where to call back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]
_PIECE_BYTES = 1 << 16


@dataclass
class ProxyWeather:
    """How the network is now. ``bytes_per_s`` 0: as fast as it can be."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    silent: bool = False
    refuses: bool = False
    #: Pieces of which a bit is still to be turned.
    flips: int = 0


class Proxies:
    """Proxies by name, on a thread of their own. Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: dict[str, set[asyncio.StreamWriter]] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.weather: dict[str, ProxyWeather] = {}

    def __enter__(self) -> Proxies:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        async def close() -> None:
            for server in self._servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, name: str, listen: Address, target: Address, source: str) -> None:
        """Pass connections to ``listen`` on to ``target``, as coming from ``source``."""
        self.weather[name], self._writers[name] = ProxyWeather(), set()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await self._pass_on(name, reader, writer, target, source)

        async def begin() -> None:
            self._servers.append(await asyncio.start_server(accepted, *listen))

        self._run(begin())

    def cut(self, name: str) -> None:
        """Reset every connection."""
        self._each(name, lambda writer: writer.transport.abort())

    def half_close(self, name: str) -> None:
        """Say to one side of every connection that the other side sends no more."""

        def close(writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

        self._each(name, close, half=True)

    def _each(self, name: str, act: Callable[[asyncio.StreamWriter], None], *, half: bool = False) -> None:
        async def all_of_them() -> None:
            for number, writer in enumerate(list(self._writers[name])):
                if not half or number % 2 == 0:
                    act(writer)

        self._run(all_of_them())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _pass_on(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target: Address,
        source: str,
    ) -> None:
        if self.weather[name].refuses:
            writer.transport.abort()
            return
        try:
            there, thither = await asyncio.open_connection(*target, local_addr=(source, 0))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, thither}
        self._writers[name] |= both
        try:
            await asyncio.gather(self._pump(name, reader, thither), self._pump(name, there, writer))
        except (OSError, RuntimeError):  # closed, or half closed, by what is played here
            pass
        finally:
            self._writers[name] -= both
            for each in both:
                each.transport.abort()

    async def _pump(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        weather = self.weather[name]
        while piece := await reader.read(_PIECE_BYTES):
            while weather.silent:  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(0.02)
            if weather.flips > 0:
                weather.flips -= 1
                place = random.randrange(len(piece))
                piece = piece[:place] + bytes([piece[place] ^ 1]) + piece[place + 1 :]
            pause_s = weather.delay_s + (len(piece) / weather.bytes_per_s if weather.bytes_per_s else 0.0)
            if pause_s:
                await asyncio.sleep(min(pause_s, 5.0))
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
