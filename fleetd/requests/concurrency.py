"""Two ways of waiting that jobs share: for several things at once, and for one while giving signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fleetd.errors import FleetError

_T = TypeVar("_T")
_END: Any = object()


async def gather_or_cancel(*work: Coroutine[Any, Any, _T]) -> list[_T]:
    """All results in order. The first failure ends the others and is raised as it is."""
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
    """The events, and None whenever none came for so long. The caller closes ``events``."""
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
            pending.cancel()
            await asyncio.wait({pending})


async def _next(events: AsyncGenerator[_T, None]) -> _T:
    found: _T = await anext(events, _END)
    return found
