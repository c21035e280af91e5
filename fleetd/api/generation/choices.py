"""Runs several answers at once: their event streams become one, each event with the index of its choice.

A few run at a time; the others wait for their turn. The queue between is short, so a slow reader slows the
streams instead of filling memory. Leaving the context cancels every stream that still runs and waits until
each is closed, which frees the slots of a client that has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from fleetd import limits
from fleetd.engine.protocol import Event, Loading
from fleetd.requests.concurrency import cancel_all
from fleetd.requests.job import Planned

Source = Callable[[], AsyncGenerator[Planned | Loading | Event, None]]

_QUEUED = 32


class Choices:
    """``async with Choices(sources) as choices: await choices.next(timeout_s)``."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._slots = asyncio.Semaphore(limits.CHOICES_AT_ONCE)
        self._queue: asyncio.Queue[tuple[int, Planned | Loading | Event | Exception | None]] = asyncio.Queue(
            _QUEUED
        )
        self._running = len(sources)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pump(i, source)) for i, source in enumerate(self._sources)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancel_all(self._tasks)

    async def next(self, timeout_s: float | None) -> tuple[int, Planned | Loading | Event] | None:
        """The next event of any choice; None when all have ended.

        Raises:
            TimeoutError: nothing came in time; ask again.
            Exception: what a choice raised. The others are still running until the context is left.
        """
        while self._running:
            if self._queue.empty():
                async with asyncio.timeout(timeout_s):
                    index, event = await self._queue.get()
            else:
                index, event = self._queue.get_nowait()
            if event is None:
                self._running -= 1
            elif isinstance(event, Exception):
                raise event
            else:
                return index, event
        return None

    async def _pump(self, index: int, source: Source) -> None:
        end: Exception | None = None
        try:
            async with self._slots, aclosing(source()) as events:
                async for event in events:
                    await self._queue.put((index, event))
        except Exception as exc:  # the task's boundary: ``next`` raises it again
            end = exc
        await self._queue.put((index, end))
