"""One loaded model, or some layers of one: the worker or the workers that compute it together.

    loading ──► ready, once all workers are
        └──────────┴──► failed, once one is: the others are ended with it
    stopping: told to end, all workers

Requests go to the first worker; the others work for that one. What they hold of memory counts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from fleetd.control.daemon_status import EngineState, EngineStatus
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Loading
from fleetd.errors import EngineDied


class LoadedModel:
    """Create, ``await start()``, use ``first`` once it is ``ready``, ``await stop()``.

    ``on_exit`` is called once for each worker that is gone, wanted or not.
    """

    def __init__(
        self, workers: Sequence[EngineProcess], on_exit: Callable[[LoadedModel, EngineProcess], None]
    ) -> None:
        self.workers = tuple(workers)
        # The worker that ended unasked, and with which the others were ended.
        self.lost: EngineProcess | None = None
        self._ending: asyncio.Task[None] | None = None
        self._on_exit = on_exit
        for worker in self.workers:
            worker.on_exit = self._exited

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the workers; returns before the model is loaded. None is left if one cannot be started.

        Raises as ``EngineProcess.start``.
        """
        if self._ending is not None:
            raise self.first.error or EngineDied(f"{self.name} was unloaded before it began to load.")
        try:
            for worker in self.workers:
                await worker.start()
                if self.lost is not None:
                    raise self.lost.error or EngineDied(f"An engine for {self.name} ended at once.")
        except BaseException:
            await self.stop()
            raise

    async def loaded(self) -> AsyncGenerator[Loading, None]:
        """Progress until all workers are ready. Raises what the load of one failed with."""
        for worker in self.workers:
            async for progress in worker.loaded():
                yield progress

    async def check(self) -> None:
        """Kill a worker that has work and makes no progress. Called every second or so by the pool."""
        for worker in self.workers:
            await worker.check()

    async def stop(self) -> None:
        """End all workers, as ``EngineProcess.stop`` does; idempotent. If it is cancelled, they end all the
        same."""
        await asyncio.shield(self.ending())

    def ending(self) -> asyncio.Task[None]:
        """Tell all workers to end; over once they have.

        A task of its own: a request may be cancelled twice, at the end of its work and because its machine is
        lost. The second time must not find workers that nobody ends any more.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"end-{self.name}")
        return self._ending

    async def _end(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def _exited(self, worker: EngineProcess) -> None:
        if self._ending is None and self.lost is None:
            self.lost = worker
            for other in self.workers:
                if other is not worker:
                    other.kill(worker.error)
        self._on_exit(self, worker)

    # ---- what it is ------------------------------------------------------------------------------------

    @property
    def first(self) -> EngineProcess:
        """The worker that requests go to."""
        return self.workers[0]

    @property
    def name(self) -> str:
        return self.first.settings.name

    @property
    def state(self) -> EngineState:
        states = {worker.state for worker in self.workers}
        order: tuple[EngineState, ...] = ("failed", "stopping", "loading", "ready")
        return next(state for state in order if state in states)

    @property
    def forms(self) -> bool:
        """True if it waits for the other machines of its group, and has no worker yet."""
        return bool(self.first.settings.group) and self.first.pid is None

    @property
    def waits_for_others(self) -> bool:
        """True if its load is over only once other machines have loaded: members of a group load before its
        worker here starts, and ranks load all at the same time."""
        return self.forms or self.first.settings.ring is not None

    @property
    def busy(self) -> bool:
        return any(worker.busy for worker in self.workers)

    @property
    def status(self) -> EngineStatus:
        """That of its first worker, with the memory of all."""
        found = [worker.status for worker in self.workers]
        return msgspec.structs.replace(
            found[0],
            state=self.state,
            memory_bytes=sum(each.memory_bytes for each in found),
            kv_bytes=sum(each.kv_bytes for each in found),
            prefix_bytes=sum(each.prefix_bytes for each in found),
        )
