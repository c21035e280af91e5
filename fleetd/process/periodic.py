"""Background tasks that outlive their errors.

A full disk, no free file descriptor, or a bug in one of them must not end the daemon: what it knew stays as
it was, the log says so, and it goes on after a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleetd import limits
from fleetd.process.observe import get_logger

log = get_logger("fleetd")


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until it returns; after an error, again from its beginning.

    The pause doubles with each error that follows another at once, up to ``limits.RESTART_MOST_S``. Errors of
    ``work`` are logged, each kind at most once per ``limits.REPEAT_LOG_S``; cancellation passes through.
    """
    loop = asyncio.get_running_loop()
    pause_s, logged_s = limits.RESTART_S, dict[str, float]()
    while True:
        begun_s = loop.time()
        try:
            await work()
        except Exception as error:
            now_s = loop.time()
            said = f"{type(error).__name__}: {error}"
            if now_s - logged_s.get(said, float("-inf")) >= limits.REPEAT_LOG_S:
                logged_s = {said: now_s}
                log.warning("task.restarts", task=name, error=said, again_in_s=pause_s)
            pause_s = limits.RESTART_S if now_s - begun_s > pause_s * 2 else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.RESTART_MOST_S)
        else:
            return
