"""Work on threads that a cancelled caller waits for.

A thread cannot be cancelled: ``asyncio.to_thread`` leaves it running. What it uses is closed next, and its
number given to something else; what it writes is written again next, and the older version may come last.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


def _unstopped() -> None:
    """It ends by itself."""


async def joined(
    work: Callable[[], T], *, stop: Callable[[], object] = _unstopped, threads: Executor | None = None
) -> T:
    """What ``work`` returns or raises, as ``asyncio.to_thread`` gives it. If this is cancelled, once or more
    often, CancelledError is raised when the thread is done.

    Args:
        stop: called when this is cancelled, so that the thread is done soon.
        threads: runs the work; None is asyncio's own.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    # Not a task: a loop that ends would cancel that.
    thread = loop.run_in_executor(threads, context.run, work)
    cancelled: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    if cancelled is None:
        return thread.result()
    thread.exception()  # nobody hears of it
    raise cancelled
