"""Ways to wait: for several coroutines at once, with heartbeats, for cancelled tasks to end. And tasks that
no request waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from fleetd.errors import FleetError

_T = TypeVar("_T")
_END: Any = object()


async def gather_or_cancel(*work: Coroutine[Any, Any, _T]) -> list[_T]:
    """All results in order. The first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        known = [error for error in failures.exceptions if isinstance(error, FleetError)]
        raise (known or failures.exceptions)[0] from None
    return [task.result() for task in tasks]


async def with_heartbeats(
    events: AsyncGenerator[_T, None], every_s: float
) -> AsyncGenerator[_T | None, None]:
    """The events, and None after each ``every_s`` seconds without one. The caller closes ``events``."""
    pending: asyncio.Task[_T] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({pending}, timeout=every_s)
            if not done:
                yield None
                continue
            event, pending = pending.result(), None
            if event is _END:
                return
            yield event
    finally:
        if pending is not None:
            await cancel_all([pending])


async def with_beats(work: Coroutine[Any, Any, _T], every_s: float, beat: Callable[[], None]) -> _T:
    """The result of the work; meanwhile ``beat`` is called every ``every_s`` seconds. Cancelling, and what
    ``beat`` raises, cancel the work."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=every_s))[0]:
            beat()
        return task.result()
    finally:
        await cancel_all([task])


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait until all of them have ended. What they raise is left in them.

    Whoever waits may be cancelled meanwhile: a request is, when its machine leaves it and is then lost. That
    is raised once they have ended, as what they use is closed next.
    """
    ending = set(tasks)
    for task in ending:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while ending:
        try:
            _, ending = await asyncio.wait(ending)
        except asyncio.CancelledError as error:
            cancelled, ending = error, {task for task in ending if not task.done()}
    if cancelled is not None:
        raise cancelled


class BackgroundTasks:
    """Tasks that no request waits for, held until they have ended: the event loop itself holds none."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task."""
        return self.hold(asyncio.create_task(work))

    def hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Hold a task that was started elsewhere."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all, and wait until they have ended."""
        await cancel_all(self._tasks)


async def _next(events: AsyncGenerator[_T, None]) -> _T:
    found: _T = await anext(events, _END)
    return found
