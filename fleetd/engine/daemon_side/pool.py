"""The models that this machine has loaded: their workers are started when needed, and ended when idle or in
the way.

A model that does not fit can still help others: then its worker has some of its layers only, and answers
nothing itself.

    pool
    lent_workers   turn_taking   group_recut   idle_measuring
    model_loader
    worker_maker
    model_table   wanted_layers

Each of these modules uses those below it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import TypeVar

import msgspec
import structlog

from fleetd import limits
from fleetd.control.daemon_status import EngineStatus, Pressure
from fleetd.control.model_change import Split
from fleetd.engine.cpu import openmp_file
from fleetd.engine.daemon_side.group_front import GroupFront
from fleetd.engine.daemon_side.group_recut import GroupRecut
from fleetd.engine.daemon_side.idle_measuring import IdleMeasuring
from fleetd.engine.daemon_side.lent_workers import LentWorkers
from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.daemon_side.model_loader import ModelLoader
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.replay import Replay
from fleetd.engine.daemon_side.supervisor import EngineProcess, no_progress
from fleetd.engine.daemon_side.turn_taking import TurnTaking
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import EmbedTexts, Event, Generate, Loading, Prefill, Question, Ready, RerankTexts
from fleetd.errors import EngineDied, FleetError, GroupLost, NoMachine, OutOfMemory
from fleetd.models.folder import ModelFolder

log = structlog.get_logger(__name__)

A = TypeVar("A")


class EnginePool:
    """What requests use of the loaded models. One request or several may wait for the same load.

    Args:
        idle_unload_s: seconds after which an idle model is unloaded; 0 keeps it.
        pressure: how short the system is of memory.
        pinned: models that stay loaded unless the system is critically short of memory.
        ended: told the id of each worker's process once that has ended.
    """

    def __init__(
        self,
        maker: WorkerMaker | None = None,
        *,
        idle_unload_s: float = 1800.0,
        pressure: Callable[[], Pressure] = lambda: "",
        pinned: Callable[[], Collection[str]] = frozenset,
        ended: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self.maker = maker or WorkerMaker()
        self.pressure, self.pinned = pressure, pinned
        self.table = ModelTable(ended)
        self.loader = ModelLoader(self.table, self.maker, pinned)
        self.lent = LentWorkers(self.table, self.loader)
        self.turn_taking = TurnTaking(self.table, self.loader, pinned)
        self.recut = GroupRecut(self.table, self.loader)
        self.measuring = IdleMeasuring(self.table, self.loader)
        self._idle_unload_s = idle_unload_s
        # When memory was given back last because the system was short of it; 0 if it is not.
        self._relieved_at = 0.0

    async def run(self) -> None:
        """Watch for stalls and idleness until cancelled."""
        # Of workers that were killed together with the daemon before this one.
        openmp_file.sweep()
        while True:
            await asyncio.sleep(limits.POOL_CHECK_S)
            self.measuring.use_idle_time()
            self.recut.use_idle_time()
            self.share_memory()
            await self.relieve(self.pressure())
            for name, model in list(self.table.models.items()):
                await model.check()
                overdue = model.first.idle_s > self.stays_s(name)
                if overdue and model.state == "ready" and not self.table.in_use(name):
                    log.info("engine.unload", model=name, reason="idle", idle_s=round(model.first.idle_s))
                    await self.unload(name)

    def keep(self, name: str, idle_s: float) -> bool:
        """Unload a model after so many seconds of idleness, until it is unloaded; infinite is never.

        False for a model that is not loaded, of which nothing is noted.
        """
        loaded = name in self.table.models
        if loaded:
            self.table.stays_s[name] = idle_s
        return loaded

    def stays_s(self, name: str) -> float:
        """After so many seconds of idleness a model is unloaded; infinite if it stays."""
        if name in self.pinned():
            return math.inf
        return self.table.stays_s.get(name, self._idle_unload_s or math.inf)

    # ---- memory ----------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """What all workers hold of the device's memory, rounded up: it changes a little with each token."""
        return self.table.held_bytes

    async def relieve(self, pressure: Pressure) -> None:
        """Called every second or so: give memory back while the system is short of it.

        Running requests keep theirs. A warning costs only what was idle for a while, and reuse of buffers:
        small machines live with it for hours.
        """
        if pressure not in ("warning", "critical"):
            self._relieved_at = 0.0
            return
        critical, now = pressure == "critical", asyncio.get_running_loop().time()
        first = not self._relieved_at
        if not first and now - self._relieved_at < limits.PRESSURE_STEP_S:
            return
        self._relieved_at = now
        if first or critical:
            for worker in self.table.workers():
                worker.free_memory(prompts=critical)
        idle_s = 0.0 if critical else limits.PRESSURE_IDLE_S
        kept = () if critical else self.pinned()
        await self.table.evict_idle(f"the system is short of memory ({pressure})", idle_s=idle_s, kept=kept)

    @property
    def disk_note(self) -> str:
        """Why a worker writes nothing to the disk at the moment; "" if all may."""
        return next((note for worker in self.table.workers() if (note := worker.disk_note)), "")

    def forget_prompts(self) -> None:
        """Let every worker throw away what it keeps of earlier prompts in memory."""
        for worker in self.table.workers():
            worker.free_memory(prompts=True)

    def forget_origins(self, labels: list[str]) -> None:
        """Let every worker throw away what it keeps under these labels in memory."""
        for worker in self.table.workers():
            worker.forget_origins(labels)

    def share_memory(self) -> None:
        """Called every second or so: tell each worker what others have taken of what it was given.

        One that is loaded later is given what is left then; the earlier ones have as much less.
        """
        options = self.maker.options
        if options.overcommit and not options.max_memory_bytes:
            return
        for worker in self.table.workers():
            worker.taken_elsewhere(max(0, self.table.held_besides(worker) - worker.settings.held_bytes))

    # ---- requests --------------------------------------------------------------------------------------

    async def stream(
        self, folder: ModelFolder, request: Generate, over: Collection[str] | None = None
    ) -> AsyncGenerator[Loading | Event, None]:
        """Load the model if needed (yields Loading), then yield the request's events up to Finished.

        Args:
            over: names of the other machines that have to hold the model with this one, which holds it alone
                if there are none; None leaves it open.

        Raises FleetError: why the load or the request failed. Closing the generator cancels the request.
        """
        wanted = WantedLayers.whole(folder, over)
        replay, lost_s = Replay(request), -math.inf
        clock = asyncio.get_running_loop().time
        with self.table.claim(folder.name):
            while True:
                try:
                    async with aclosing(self._streamed(wanted, replay)) as events:
                        async for event in events:
                            passed = event if isinstance(event, Loading) else replay.passed(event)
                            if passed is not None:
                                yield passed
                except GroupLost as error:
                    replay.again(error)
                    lost_s = clock()
                    log.warning("group.again", model=folder.name, reason=error.message)
                    self.table.again[folder.name] = error.message
                    yield _going_on(error)
                except OutOfMemory as error:
                    if clock() - lost_s > limits.GROUP_AGAIN_S:
                        if not self._refused_by_member(folder.name):
                            raise
                        replay.again(error)
                        yield _going_on(error)
                        continue
                    # The others of a group that has just lost a machine have yet to free their parts of it.
                    yield Loading("waiting for memory on other machines")
                    await asyncio.sleep(limits.POOL_CHECK_S)
                else:
                    return

    def _refused_by_member(self, name: str) -> bool:
        """True if the model's group failed before its worker here was started: others may do better."""
        model = self.table.models.get(name)
        return model is not None and model.forms

    async def _streamed(self, wanted: WantedLayers, replay: Replay) -> AsyncGenerator[Loading | Event, None]:
        """The same, as long as the model stays loaded."""
        async for item in self.loader.acquire(wanted):
            if not isinstance(item, EngineProcess):
                yield item
                continue
            if isinstance(item, GroupFront):
                if replay.request.local_only:
                    raise NoMachine(
                        f"{wanted.name} is on several machines, and this request stays on one.",
                        hint="Choose a model that fits this machine (fleetctl models).",
                    )
                replay.of_group = True
            request = replay.repeatable if replay.of_group else replay.request
            async with aclosing(item.stream(request)) as events:
                async for event in events:
                    yield event

    async def ask(
        self,
        folder: ModelFolder,
        question: Question[A],
        *,
        evict: bool = True,
        progress: Callable[[Loading | Prefill], None] = no_progress,
    ) -> A:
        """Load the model if needed, then its answer. Cancelling cancels the question.

        ``evict``: idle models make room for it. ``progress`` is told of the load, then of the work. Raises as
        ``EngineProcess.ask``, and why the load failed.
        """
        with self.table.claim(folder.name):
            async with aclosing(self.loader.acquire(WantedLayers(folder), evict=evict)) as steps:
                async for step in steps:
                    if isinstance(step, EngineProcess):
                        return await step.ask(question, progress)
                    progress(step)
        raise EngineDied(f"The engine for {folder.name} did not load.")

    async def vectors(
        self, folder: ModelFolder, request: EmbedTexts | RerankTexts, *, evict: bool = True
    ) -> AsyncGenerator[Loading | Event, None]:
        """Load the model if needed (yields Loading), then yield the request's events up to Finished.

        ``evict``: idle models make room for it. Raises as ``EngineProcess.vectors``, and why the load failed.
        Closing the generator cancels the request.
        """
        with self.table.claim(folder.name):
            async with aclosing(self.loader.acquire(WantedLayers(folder), evict=evict)) as steps:
                async for step in steps:
                    if isinstance(step, Loading):
                        yield step
                        continue
                    # It may have been loaded while a prompt was read.
                    self.table.tell_of_prompts()
                    async with aclosing(step.vectors(request)) as events:
                        async for event in events:
                            yield event

    # ---- models ----------------------------------------------------------------------------------------

    async def load(self, folder: ModelFolder, over: Collection[str] | None = None) -> None:
        """Load without a request. ``over`` and what it raises: as ``stream``."""
        async for _ in self.loading(folder, over=over):
            pass

    def loading(
        self,
        folder: ModelFolder,
        *,
        evict: bool = True,
        over: Collection[str] | None = None,
        split: Split | None = None,
    ) -> AsyncGenerator[Loading, None]:
        """Load without a request and yield the progress. ``evict`` and what it raises: as ``ask``. ``split``:
        how the machines ``over`` hold it; None leaves it open."""
        return self.loader.loading(WantedLayers.whole(folder, over, split), evict=evict)

    def engine(self, folder: ModelFolder) -> EngineProcess | None:
        """The worker that has the whole model, if it is ready."""
        return self.table.ready(folder.name)

    def loading_engine(self, folder: ModelFolder) -> EngineProcess | None:
        """The worker that has the whole model, or is about to."""
        return self.table.loading_or_ready(folder.name)

    def takes_others(self, folder: ModelFolder, over: Collection[str] | None) -> bool:
        """True if a load of the model would need other machines. ``over``: as ``stream``. Reads headers of
        files."""
        return self.maker.takes_others(folder) if over is None else bool(over)

    def load_s(self, folder: ModelFolder) -> float:
        """About how many seconds a load of a model takes here."""
        return self.maker.load_s(folder)

    def facts(self, name: str) -> Ready | None:
        """What the worker that has the whole model says of it, if it is ready."""
        engine = self.table.ready(name)
        return engine.facts if engine is not None else None

    async def unload(self, name: str) -> bool:
        """End a model's workers; their running requests fail with ModelUnloaded. False if none runs."""
        return await self.table.unload(name)

    @property
    def busy(self) -> bool:
        """True while a worker loads, or computes for anybody."""
        return self.table.busy

    def status(self) -> list[EngineStatus]:
        pinned = self.pinned()
        return [self._status(name, model, name in pinned) for name, model in self.table.models.items()]

    def _status(self, name: str, model: LoadedModel, pinned: bool) -> EngineStatus:
        status, carried = self.table.with_earlier(model.status), self.lent.carried(name)
        return msgspec.structs.replace(
            status,
            pinned=pinned,
            again=self.table.again.get(name, "") if model.state == "loading" else "",
            asked_by=self.lent.askers(name),
            carried=status.carried if carried is None else carried,
        )

    async def close(self) -> None:
        """End all workers."""
        for task in (self.measuring.task, self.recut.task, self.turn_taking.task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.table.close()


def _going_on(error: FleetError) -> Loading:
    """What a request is told while another group forms because of ``error``."""
    return Loading(f"going on: {error.message}"[: limits.CARD_TEXT_CHARS])
