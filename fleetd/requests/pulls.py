"""One download per model, however many wait for it.

The first to ask starts it, later ones join and see the same progress, and it is cancelled when the last of
them has gone. So two first requests to a fresh daemon fetch the model once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fleetd.errors import Draining
from fleetd.models.model_store import ModelStore
from fleetd.models.pull_lines import PullProgress
from fleetd.requests.concurrency import cancel_all
from fleetd.requests.model_copies import ModelCopies

# Where downloads come from: the model's own source, or first of all other machines.
ModelSource = ModelStore | ModelCopies


class _Pull:
    def __init__(self) -> None:
        self.watchers = 0
        self.latest: PullProgress | None = None
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None]

    def tell(self) -> None:
        """Wake every watcher once; the next wait is on a new event."""
        self.changed.set()
        self.changed = asyncio.Event()


class Pulls:
    """The downloads under way."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._pulls: dict[str, _Pull] = {}
        self._closed = False

    @property
    def running(self) -> dict[str, PullProgress | None]:
        """How far each download is, by model; None before its first step."""
        return {ref: pull.latest for ref, pull in self._pulls.items()}

    async def watch(self, ref: str) -> AsyncGenerator[PullProgress, None]:
        """Start or join the download of ``ref``; ends when it is complete.

        Raises:
            FleetError: what the download raised, to every watcher.
            Draining: the daemon is stopping.
        """
        while (pull := self._pulls.get(ref)) is not None and pull.watchers == 0:
            # It is being cancelled; its files must be closed before they are written again.
            await asyncio.wait([pull.task])
        if self._closed:
            raise Draining("The daemon is stopping.")
        if pull is None:
            pull = self._pulls[ref] = _Pull()
            # A task of its own: a download outlives the request that started it while others wait for it.
            pull.task = asyncio.create_task(self._run(ref, pull), name=f"pull {ref}")
            # Not in the task: one that is cancelled before its first step does nothing at its end.
            pull.task.add_done_callback(partial(self._ended, ref, pull))
        pull.watchers += 1
        try:
            seen: PullProgress | None = None
            while True:
                changed = pull.changed
                if pull.latest is not None and pull.latest is not seen:
                    seen = pull.latest
                    yield seen
                elif self._pulls.get(ref) is not pull:
                    if pull.task.cancelled():
                        raise Draining("The download stopped because the daemon is stopping.")
                    pull.task.result()
                    return
                else:
                    await changed.wait()
        finally:
            pull.watchers -= 1
            if pull.watchers == 0 and not pull.task.done():
                await cancel_all([pull.task])

    async def close(self) -> None:
        """Cancel every download; its watchers get Draining."""
        self._closed = True
        await cancel_all(pull.task for pull in self._pulls.values())

    async def _run(self, ref: str, pull: _Pull) -> None:
        async with aclosing(self._source.pull(ref)) as steps:
            async for step in steps:
                pull.latest = step
                pull.tell()

    def _ended(self, ref: str, pull: _Pull, _task: asyncio.Task[None]) -> None:
        del self._pulls[ref]
        pull.tell()
