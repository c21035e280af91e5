"""While no worker of this machine has anything to do, one of them at a time is measured for scoring."""

from __future__ import annotations

import asyncio

import structlog

from fleetd import limits
from fleetd.engine.daemon_side.model_loader import ModelLoader
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.errors import FleetError
from fleetd.models.folder import ModelFolder

log = structlog.get_logger(__name__)


class IdleMeasuring:
    """Small models are measured once they are loaded; large ones if that is wanted, and loaded for it."""

    def __init__(self, table: ModelTable, loader: ModelLoader) -> None:
        self._table, self._loader = table, loader
        # Models that are to be measured whatever their size; those of them that are to be loaded.
        self._wanted: set[str] = set()
        self._to_load: dict[str, ModelFolder] = {}
        # Loads a model that is to be measured.
        self.task: asyncio.Task[None] | None = None

    def want(self, folder: ModelFolder) -> None:
        """Measure a model for scoring once nothing else runs; load it for that if it fits beside others."""
        self._wanted.add(folder.name)
        if self._table.ready(folder.name) is None:
            self._to_load[folder.name] = folder

    def use_idle_time(self) -> None:
        """Called every second or so: while nothing runs, a worker that has no profile may look for it."""
        if self._table.busy or any(self._table.claims.values()):
            return
        if self._to_load and (self.task is None or self.task.done()):
            name, folder = self._to_load.popitem()
            if self._table.ready(folder.name) is None:
                self.task = asyncio.create_task(self._load_to_measure(folder), name=f"measure-{name}")
                return
        # Those that a prompt has wanted first.
        for name, model in sorted(self._table.models.items(), key=lambda item: item[0] not in self._wanted):
            facts = model.first.facts
            small = facts is not None and facts.shape.weights_bytes <= limits.IDLE_MODEL_BYTES
            if model.state == "ready" and model.first.scoring.left and (small or name in self._wanted):
                model.first.give_idle_time(limits.IDLE_TIME_S)
                return

    async def _load_to_measure(self, folder: ModelFolder) -> None:
        try:
            await self._loader.load_beside(WantedLayers(folder))
        except FleetError as error:
            log.info("engine.not_measured", model=folder.name, reason=str(error))
