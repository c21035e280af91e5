"""Loading what is wanted: one model at a time, beside what is loaded, or in the place of what is idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field

from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.supervisor import EngineProcess, no_progress
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import WAITING, Loading
from fleetd.errors import FleetError, OutOfMemory, Overloaded
from fleetd.models.model_sizes import ModelSizes


@dataclass
class Turns:
    """Two models do not fit together: ``first`` is used and then gives way. ``allowed``: the one model that
    may be loaded now, "" if none; ``changed`` is set at each change, the end included."""

    first: str
    allowed: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Requests for the first model that came once it was to give way, and wait.
    put_off: int = 0

    @property
    def giving_way(self) -> str:
        """The model that nobody may begin to use any more, "" if none."""
        return self.first if self.allowed != self.first else ""

    def allow(self, name: str) -> None:
        self.allowed = name
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class ModelLoader:
    """``pinned``: models that do not make room for others."""

    def __init__(self, table: ModelTable, maker: WorkerMaker, pinned: Callable[[], Collection[str]]) -> None:
        self._table, self._maker, self._pinned = table, maker, pinned
        # Held while a worker is started: of two that begin at the same moment, one is seen by the other.
        self.starting = asyncio.Lock()
        # While two models take turns in the memory.
        self.turns: Turns | None = None

    async def loading(self, wanted: WantedLayers, *, evict: bool = True) -> AsyncGenerator[Loading, None]:
        """Load it and yield the progress. ``evict``: idle models make room for it. Raises FleetError."""
        with self._table.claim(wanted.name):
            async with aclosing(self.acquire(wanted, evict=evict)) as steps:
                async for step in steps:
                    if isinstance(step, Loading):
                        yield step

    async def load_beside(
        self, wanted: WantedLayers, progress: Callable[[Loading], None] = no_progress
    ) -> None:
        """Load it if it fits beside what is loaded: nothing makes room for it. Raises FleetError."""
        try:
            async for step in self.acquire(wanted, evict=False):
                if isinstance(step, Loading):
                    progress(step)
        except OutOfMemory:
            # No request of this machine asked for it: the failure is not shown here.
            if (model := self._table.models.get(wanted.name)) is not None and model.state == "failed":
                self._table.remove(model)
                await self._table.end(model)
            raise

    async def acquire(
        self, wanted: WantedLayers, *, evict: bool = True
    ) -> AsyncGenerator[Loading | EngineProcess, None]:
        """Yield progress, then the ready engine. Two first requests share one load; idle models make room."""
        while True:
            while (turns := self.turns) is not None and not self._may_go_on(turns, wanted):
                with self._put_off(turns, wanted.name):
                    yield Loading(f"{WAITING}a model that has to make room")
                    await turns.changed.wait()
            # One load at a time: each looks at the memory that is free, and would count the same bytes.
            while other := self._loading_besides(wanted):
                yield Loading(f"{WAITING}{other.name} to load")
                with suppress(FleetError):  # its own requests hear of that
                    async for _ in other.loaded():
                        pass
            if (model := await self._running(wanted)) is None:
                continue
            try:
                async for progress in model.loaded():
                    yield progress
            except OutOfMemory:
                if not evict or not await self._table.evict_idle(
                    "memory is needed", besides=wanted.name, kept=self._pinned()
                ):
                    raise
                continue
            if not wanted.is_held_by(model):
                continue
            yield model.first
            return

    def _may_go_on(self, turns: Turns, wanted: WantedLayers) -> bool:
        """True for a model that needs no load, or whose turn it is."""
        if wanted.name == turns.giving_way:
            return False
        return self._table.ready(wanted.name) is not None or wanted.name == turns.allowed

    @contextmanager
    def _put_off(self, turns: Turns, name: str) -> Iterator[None]:
        """Meanwhile a request waits for the end of a turn, which does not wait for the request."""
        count = int(name == turns.first)
        turns.put_off += count
        self._table.claim_ended.set()
        try:
            yield
        finally:
            turns.put_off -= count

    def _loading_besides(self, wanted: WantedLayers) -> LoadedModel | None:
        """Another model whose load is to be over first.

        What another machine asks for does not wait for a load here that itself waits for other machines:
        one of those may wait for this. Groups are promised memory, and it counts for no two of them.
        """
        own = self._table.models.get(wanted.name)
        if own is not None and own.state in ("loading", "ready"):
            return None
        loading = (model for model in self._table.models.values() if model.state == "loading")
        for_others = wanted.last or wanted.ring is not None
        return next((each for each in loading if not (for_others and each.waits_for_others)), None)

    async def _running(self, wanted: WantedLayers) -> LoadedModel | None:
        """The model, its workers started if need be. None if another has begun to load meanwhile: that one
        is first."""
        name = wanted.name
        ready = self._table.models.get(name)
        if ready is not None and ready.state == "ready" and wanted.is_held_by(ready):
            return ready
        sizes: ModelSizes | None = None
        if ready is None or ready.state != "loading":
            # A disk that hangs holds up this load alone.
            sizes = await self._maker.sizes(wanted)
        async with self.starting:
            model = self._table.models.get(name)
            if model is not None and model.state in ("loading", "ready"):
                if model.state == "loading" or wanted.is_held_by(model):
                    return model
                self._check_unused(model)
            if model is not None:
                # Only this one: unloading would also end what helps with other layers.
                self._table.remove(model)
                await self._table.end(model)
            if self._loading_besides(wanted):
                return None
            drafter = None if wanted.last else await self._maker.drafter(wanted.folder)
            sizes = sizes or await self._maker.sizes(wanted)
            workers = self._maker.workers(wanted, drafter, sizes, self._table)
            model = LoadedModel(workers, self._table.exited)
            # It measures its speed at the end of its load.
            self._table.end_idle_time()
            self._table.place(model)
            try:
                await model.start()
            except BaseException:
                # Refused or cancelled: the next request must not wait for what was never started.
                self._table.remove(model)
                raise
            return model

    def _check_unused(self, model: LoadedModel) -> None:
        """Raises Overloaded unless the request that is placed now is the model's only one: then it is loaded
        anew, over other machines."""
        if model.busy or self._table.claims.get(model.name, 0) > 1:
            raise Overloaded(
                f"{model.name} is in use, and on other machines than those that were named.",
                hint="Leave `placement` out, or send it again once its requests have ended.",
            )
