"""Machines that outlast one test."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import uvloop

# Of machines that are over; they may be what a failed test has left of them.
_ENDED_S = 120.0


@dataclass
class KeptMachines:
    """Machines, the loop that is theirs, the answer to expect, and what is here of them at rest."""

    machines: Any
    runner: asyncio.Runner
    expected: Any
    before: dict[str, int]


FormedMachines = contextlib.AbstractContextManager[KeptMachines]


@contextlib.contextmanager
def kept_machines(
    entered: contextlib.AbstractAsyncContextManager[Any], warmed: Callable[[Any], Awaitable[Any]]
) -> Iterator[KeptMachines]:
    """Machines, until this is left.

    ``warmed`` uses them for the first time, so that what is made once and kept is there. It returns the
    answer to expect.
    """
    with _logging_restored(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        made: asyncio.Future[tuple[Any, Any]] = loop.create_future()
        over = asyncio.Event()

        async def keep() -> None:
            async with entered as found:
                made.set_result((found, await warmed(found)))
                await over.wait()

        async def begin() -> asyncio.Task[None]:
            keeper = loop.create_task(keep())
            await asyncio.wait({keeper, made}, return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                await keeper
            return keeper

        async def at_rest() -> Any:
            return made.result()[0].own()

        async def end(keeper: asyncio.Task[None]) -> None:
            over.set()
            async with asyncio.timeout(_ENDED_S):
                await keeper

        keeper = runner.run(begin())
        found, expected = made.result()
        try:
            yield KeptMachines(found, runner, expected, runner.run(at_rest()))
        finally:
            runner.run(end(keeper))


@contextlib.contextmanager
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()


class LastingMachines:
    """Machines of the tests of a module. A test that fails may leave anything: the next one has others."""

    def __init__(self, form: Callable[[], FormedMachines]) -> None:
        self._form, self._stack = form, contextlib.ExitStack()
        self._formed: KeptMachines | None = None

    def lent(self, session: pytest.Session) -> Iterator[KeptMachines]:
        """The body of a fixture of one test."""
        failed = session.testsfailed
        if self._formed is None:
            self._formed = self._stack.enter_context(self._form())
        yield self._formed
        if session.testsfailed > failed:
            self.end()

    def end(self) -> None:
        self._formed = None
        self._stack.close()
