"""Threads on which the daemon reads models' files.

A network disk may never answer. Then only these threads wait, and their number is bounded. Work on asyncio's
own threads goes on, and the process can end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from fleetd import limits
from fleetd.errors import Draining

P = ParamSpec("P")
T = TypeVar("T")


class FileThreads:
    """A pool of at most ``most`` threads, each started when it is first needed. They end with the process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``work``, as ``asyncio.to_thread`` gives it. Raises Draining after ``abandon``."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()
        self._jobs.put((result, functools.partial(context.run, work, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            # Python joins all threads but these before it ends.
            threading.Thread(target=self._work, name=f"files-{self._started}", daemon=True).start()
        self._awaited.add(result)
        try:
            return await result
        finally:
            self._awaited.discard(result)

    def abandon(self) -> None:
        """End every ``run`` that still waits, with Draining."""
        for result in self._awaited:
            if not result.done():
                result.set_exception(Draining("The daemon stopped before the model's files were read."))

    def _work(self) -> None:
        while True:
            result, work = self._jobs.get()
            if not result.done():
                value, error = None, None
                try:
                    value = work()
                except BaseException as raised:  # the caller gets it, as of a function that it calls
                    error = raised
                # A loop that was closed waits for nothing.
                with suppress(RuntimeError):
                    result.get_loop().call_soon_threadsafe(_settle, result, value, error)
                del value, error
            del result, work
            self._idle.release()


def _settle(result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if result.done():  # cancelled or abandoned meanwhile
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


class _Threads:
    """The threads of this process: two pools, because a look takes a moment and hashing minutes."""

    def __init__(self) -> None:
        self.looks = FileThreads(limits.FILE_LOOKS)
        self.hashes = FileThreads(limits.FILE_HASHES)


_own = _Threads()


async def look(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work that reads names, sizes and small files. Raises Draining after ``abandon``."""
    return await _own.looks.run(work, *args, **kwargs)


async def read_whole(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work that may hash whole models. Raises Draining after ``abandon``."""
    return await _own.hashes.run(work, *args, **kwargs)


def abandon() -> None:
    """End all work that still waits for files, with Draining: the daemon stops."""
    _own.looks.abandon()
    _own.hashes.abandon()


def _renew() -> None:
    global _own
    _own = _Threads()


# Threads do not follow into a child process.
os.register_at_fork(after_in_child=_renew)
