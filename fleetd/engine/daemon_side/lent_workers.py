"""Workers that compute for other machines: with a model, with some of its layers, or as a rank.

No model makes room for them. Whoever computes for other machines has these, and not the pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from fleetd.control.daemon_status import Carried
from fleetd.engine.daemon_side.model_loader import ModelLoader
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.supervisor import EngineProcess, no_progress
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.engine.protocol import Loading
from fleetd.engine.settings import RingPlace
from fleetd.models.folder import ModelFolder

log = structlog.get_logger(__name__)


class LentWorkers:
    """Several machines may use one worker."""

    def __init__(self, table: ModelTable, loader: ModelLoader) -> None:
        self._table, self._loader = table, loader
        # The machines whose groups have a worker's layers, with a name for each group.
        self._askers: dict[str, list[str]] = {}
        # How the bytes of a rank travel, by the name of its worker.
        self._carried: dict[str, Callable[[], Carried]] = {}

    def askers(self, name: str) -> list[str]:
        """The machines whose groups have the layers of a worker, by name."""
        return sorted({*self._askers.get(name, ())} - {""})

    def carried(self, name: str) -> Carried | None:
        """How the bytes of a rank travel; None for other workers."""
        return carried() if (carried := self._carried.get(name)) is not None else None

    @asynccontextmanager
    async def assisting(
        self,
        folder: ModelFolder,
        first: int,
        last: int,
        *,
        progress: Callable[[Loading], None] = no_progress,
        asked_by: str = "",
    ) -> AsyncIterator[EngineProcess]:
        """A ready worker that has layers [first, last), not unloaded for others meanwhile.

        One is loaded if need be, with these layers alone (with the whole model where ``last`` is 0): whoever
        asks for some has found that its prompts do not fit beside all of them. ``progress`` is told of the
        load. ``asked_by``: a machine whose group has these layers until the end, by name. Raises FleetError:
        why the load failed.
        """
        name = await self._with_layers(folder, first, last, progress, asked_by)
        with self._table.claim(name), self._asked_by(name, asked_by):
            yield self._table.models[name].first

    @asynccontextmanager
    async def ranked(
        self,
        folder: ModelFolder,
        place: RingPlace,
        *,
        progress: Callable[[Loading], None] = no_progress,
        asked_by: str = "",
        carried: Callable[[], Carried] = lambda: "",
    ) -> AsyncIterator[EngineProcess]:
        """A ready worker that is this rank of another machine's model, and ends with the context.

        ``progress``, ``asked_by`` and what it raises: as ``assisting``. ``carried``: how its bytes travel.
        """
        wanted = WantedLayers(folder, ring=place)
        self._carried[wanted.name] = carried
        try:
            with self._table.claim(wanted.name), self._asked_by(wanted.name, asked_by):
                await self._loader.load_beside(wanted, progress)
                yield self._table.models[wanted.name].first
        finally:
            del self._carried[wanted.name]
            await self._table.unload(wanted.name)

    async def let_go(self, folder: ModelFolder, first: int, last: int) -> None:
        """End a worker that has layers [first, last) and not the others, unless somebody uses it."""
        name = WantedLayers(folder, first, last).name
        model = self._table.models.get(name)
        if model is not None and model.first.settings.part_of and not self._table.in_use(name):
            log.info("engine.unload", model=name, reason="no machine needs these layers")
            await self._table.unload(name)

    def part(self, folder: ModelFolder) -> tuple[int, int] | None:
        """Layers [first, last) of a model that a worker has, or is loading, which has not all of it."""
        found = [
            (model.first.settings.first_layer, model.first.settings.last_layer)
            for model in self._table.models.values()
            if model.first.settings.part_of == folder.name
            and model.first.settings.ring is None
            and model.state in ("loading", "ready")
        ]
        return max(found, key=lambda part: part[1] - part[0], default=None)

    def held_of(self, folder: ModelFolder, first: int, last: int) -> int:
        """Bytes of memory that the worker of just these layers holds; 0 without one."""
        return self._held_for(WantedLayers(folder, first, last))

    def held_by_rank(self, folder: ModelFolder, place: RingPlace) -> int:
        """Bytes of memory that the worker of this rank holds; 0 without one."""
        return self._held_for(WantedLayers(folder, ring=place))

    def _held_for(self, wanted: WantedLayers) -> int:
        model = self._table.models.get(wanted.name)
        return sum(worker.claimed_bytes for worker in model.workers) if model is not None else 0

    def holds(self, folder: ModelFolder, first: int, last: int) -> bool:
        """True if a ready worker has layers [first, last), so that ``assisting`` would load nothing."""
        return self._holder(folder, first, last) is not None

    def _holder(self, folder: ModelFolder, first: int, last: int) -> str | None:
        for name, model in self._table.models.items():
            held = model.first.settings
            if self._loader.turns is not None and name == self._loader.turns.giving_way:
                continue
            if model.state == "ready" and (
                (name == folder.name and not held.group)
                or (held.path == str(folder.path) and held.first_layer <= first < last <= held.last_layer)
            ):
                return name
        return None

    async def _with_layers(
        self,
        folder: ModelFolder,
        first: int,
        last: int,
        progress: Callable[[Loading], None],
        asked_by: str,
    ) -> str:
        """The name of a worker that has these layers; loads one for ``asked_by`` if there is none."""
        if (name := self._holder(folder, first, last)) is not None:
            return name
        whole = self._table.models.get(folder.name)
        if whole is not None and whole.state == "loading" and not whole.first.settings.group:
            first = last = 0
        wanted = WantedLayers(folder, first, last)
        # Another group that asked for the same layers and leaves does not end the load for this one.
        with self._table.claim(wanted.name), self._asked_by(wanted.name, asked_by):
            await self._loader.load_beside(wanted, progress)
        return wanted.name

    @contextmanager
    def _asked_by(self, name: str, machine: str) -> Iterator[None]:
        """Meanwhile a machine's group has a worker's layers; "" is no group."""
        self._askers.setdefault(name, []).append(machine)
        try:
            yield
        finally:
            self._askers[name].remove(machine)
            if not self._askers[name]:
                del self._askers[name]
