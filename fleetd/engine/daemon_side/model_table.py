"""The models that this machine has loaded: who uses them, and what they hold of the device's memory.

A model enters the table before its workers start, and leaves it before they end. Until they are gone, their
memory counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import structlog

from fleetd.control.daemon_status import EngineStatus
from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.limits import MIB

log = structlog.get_logger(__name__)

_HELD_STEP_BYTES = 256 * MIB


class ModelTable:
    """Loaded models by name. ``ended`` is told the id of each worker's process once that has ended."""

    def __init__(self, ended: Callable[[int], None] = lambda pid: None) -> None:
        self.models: dict[str, LoadedModel] = {}
        # Models that have left the table and whose workers still hold memory.
        self._ending: list[LoadedModel] = []
        # By name: the uses that keep a model from being unloaded, those that wait for its load included.
        self.claims: dict[str, int] = {}
        # Set when a claim on a model ends.
        self.claim_ended = asyncio.Event()
        # Why models are loaded once more for answers that go on.
        self.again: dict[str, str] = {}
        # Seconds of idleness after which a model is unloaded, where a client has said so.
        self.stays_s: dict[str, float] = {}
        # How often the workers of a model have died.
        self.deaths: dict[str, int] = {}
        # By model: the figures with which its last worker ended, those before it included.
        self._earlier: dict[str, EngineStatus] = {}
        self._worker_ended = ended

    # ---- who is in it ----------------------------------------------------------------------------------

    def place(self, model: LoadedModel) -> None:
        """A model enters the table, or takes the place of the one of its name."""
        self.models[model.name] = model

    def remove(self, model: LoadedModel) -> None:
        """A model leaves the table, if it is still there."""
        if self.models.get(model.name) is model:
            del self.models[model.name]

    async def unload(self, name: str) -> bool:
        """End a model's workers; their running requests fail with ModelUnloaded. False if none runs."""
        self.stays_s.pop(name, None)
        parts = [other for other, model in self.models.items() if model.first.settings.part_of == name]
        found = [model for n in (name, *parts) if (model := self.models.pop(n, None)) is not None]
        await self.end(*found)
        return bool(found)

    async def evict_idle(
        self, reason: str, *, besides: str = "", idle_s: float = 0.0, kept: Collection[str] = ()
    ) -> bool:
        """Unload the model that has been idle longest, at least for ``idle_s``. False if there is none."""
        idle = [
            (model.first.idle_s, n)
            for n, model in self.models.items()
            if n != besides
            and n not in kept
            and model.state == "ready"
            and not self.in_use(n)
            and model.first.idle_s >= idle_s
        ]
        if not idle:
            return False
        _, name = max(idle)
        log.info("engine.unload", model=name, reason=reason, for_model=besides)
        return await self.unload(name)

    async def end(self, *models: LoadedModel) -> None:
        """Stop models that have left the table; until their workers are gone, their memory is counted. If it
        is cancelled, they end all the same."""
        for model in models:
            self._ending.append(model)
            model.ending().add_done_callback(partial(self._ended, model))
        await asyncio.gather(*(model.stop() for model in models))

    def _ended(self, model: LoadedModel, _ending: asyncio.Task[None]) -> None:
        self._ending.remove(model)

    def exited(self, model: LoadedModel, worker: EngineProcess) -> None:
        """A worker is gone, wanted or not (``LoadedModel.on_exit``)."""
        name = model.name
        if worker is model.first:
            self._earlier[name] = self.with_earlier(model.status)
        if worker.pid is not None:
            self._worker_ended(worker.pid)
        # Unwanted deaths only, and one for all workers that end with the one that died.
        if self.models.get(name) is model and worker is model.lost and worker.facts is not None:
            self.deaths[name] = self.deaths.get(name, 0) + 1

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(self.unload(name) for name in list(self.models)))
        # Of those whose requests were cancelled before their workers had ended.
        await asyncio.gather(*(model.stop() for model in self._ending))

    # ---- what they are ---------------------------------------------------------------------------------

    def ready(self, name: str) -> EngineProcess | None:
        """The worker that has the whole model, if it is ready."""
        model = self.models.get(name)
        return model.first if model is not None and model.state == "ready" else None

    def loading_or_ready(self, name: str) -> EngineProcess | None:
        """The worker that has the whole model, or is about to."""
        model = self.models.get(name)
        return model.first if model is not None and model.state in ("loading", "ready") else None

    @property
    def busy(self) -> bool:
        """True while a worker loads, or computes for anybody."""
        return any(model.busy or model.state == "loading" for model in self.models.values())

    def with_earlier(self, status: EngineStatus) -> EngineStatus:
        """A model's status, whose figures that only grow include those of its workers before this one."""
        if (earlier := self._earlier.get(status.model)) is None:
            return status
        return msgspec.structs.replace(
            status,
            disk_written_bytes=earlier.disk_written_bytes + status.disk_written_bytes,
            disk_dropped=earlier.disk_dropped + status.disk_dropped,
        )

    # ---- who uses them ---------------------------------------------------------------------------------

    @contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Meanwhile the model is not unloaded to make room for others."""
        self.claims[name] = self.claims.get(name, 0) + 1
        try:
            yield
        finally:
            self.claims[name] -= 1
            if not self.claims[name]:
                self.again.pop(name, None)
            self.claim_ended.set()

    def in_use(self, name: str) -> bool:
        """True while a claim on the model lasts."""
        return self.claims.get(name, 0) > 0

    # ---- their workers ---------------------------------------------------------------------------------

    def workers(self) -> list[EngineProcess]:
        """Those of all models of the table."""
        return [worker for model in self.models.values() for worker in model.workers]

    @property
    def held_bytes(self) -> int:
        """What all workers hold of the device's memory, rounded up: it changes a little with each token."""
        return self.held_besides(None)

    def held_besides(self, besides: EngineProcess | None) -> int:
        """The same without one worker, or of all."""
        ending = [worker for model in self._ending for worker in model.workers]
        held = sum(worker.claimed_bytes for worker in self.workers() + ending if worker is not besides)
        return -(-held // _HELD_STEP_BYTES) * _HELD_STEP_BYTES

    def end_idle_time(self) -> None:
        """Tell workers that use idle time that it is over."""
        for model in self.models.values():
            if model.first.scoring.left:
                model.first.give_idle_time(0.0)

    def tell_of_prompts(self) -> None:
        """Tell workers that make vectors whether a worker here reads a chat's prompt: that goes first."""
        reading = any(worker.reads_prompts for worker in self.workers())
        for worker in self.workers():
            if worker.settings.purpose != "chat":
                worker.prompts_read(reading)
