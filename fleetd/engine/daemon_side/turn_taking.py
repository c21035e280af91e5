"""Two models that do not fit this machine together take turns in its memory.

second is unloaded ──► first loads and is used ──► first is unloaded once nobody uses it ──► second loads
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import structlog

from fleetd.engine.daemon_side.model_loader import ModelLoader, Turns
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.errors import FleetError, Overloaded
from fleetd.models.folder import ModelFolder

log = structlog.get_logger(__name__)


class TurnTaking:
    """One pair at a time. ``pinned``: models that are not unloaded for this."""

    def __init__(self, table: ModelTable, loader: ModelLoader, pinned: Callable[[], Collection[str]]) -> None:
        self._table, self._loader, self._pinned = table, loader, pinned
        # Ends a turn, and loads the second model.
        self.task: asyncio.Task[None] | None = None

    def freed_by(self, folder: ModelFolder) -> int:
        """Bytes of memory that unloading a model would give back."""
        model = self._table.models.get(folder.name)
        return self._table.held_bytes - self._table.held_besides(model.first) if model is not None else 0

    def why_stays(self, folder: ModelFolder) -> str:
        """Why a model cannot be unloaded for a while and loaded again; "" if it can, or is not loaded."""
        name, model = folder.name, self._table.models.get(folder.name)
        # The first come are served first: a model that somebody waits for does not wait for one turn more.
        awaited = (other for other, claims in self._table.claims.items() if claims and other != name)
        if self._loader.turns is not None or any(self._table.ready(other) is None for other in awaited):
            return "another model is to be loaded first"
        if self._table.in_use(name):
            return f"{name} is in use"
        if any(other.first.settings.part_of == name for other in self._table.models.values()):
            return f"other machines use layers of {name}"
        if model is None:
            return ""
        if why := self.why_pinned(folder):
            return why
        if model.first.settings.group or model.first.settings.ring is not None or len(model.workers) > 1:
            return f"other machines hold some of {name}"
        return f"{name} is in use" if model.busy or model.state == "loading" else ""

    def why_pinned(self, folder: ModelFolder) -> str:
        """Says so of a model that is pinned; "" of others."""
        return f"{folder.name} is pinned" if folder.name in self._pinned() else ""

    @asynccontextmanager
    async def in_turn(self, first: ModelFolder, second: ModelFolder) -> AsyncIterator[None]:
        """Meanwhile ``first`` can be loaded into the memory that ``second`` has or needs: that is unloaded,
        and no other load begins.

        At the end ``first`` is unloaded once nobody uses it; who asks for it from then on waits. Then
        ``second`` begins to load, if it was loaded or all went well; a request for it shares that load.
        Raises Overloaded, before anything is unloaded, if ``second`` has to stay as it is.
        """
        name = second.name
        if why := self.why_stays(second) or self.why_pinned(first):
            raise Overloaded(
                f"{name} and {first.name} cannot take turns: {why}.", hint="Send it again later."
            )
        again, stays_s = name in self._table.models, self._table.stays_s.get(name)
        turns = self._loader.turns = Turns(first.name, allowed=first.name)
        try:
            with self._table.claim(name):
                log.info("engine.in_turn", model=first.name, then=name)
                await self._table.unload(name)
                yield
            again = True
        finally:
            # In a task of its own, for a client that leaves must not leave two models behind.
            self.task = asyncio.create_task(
                self._second_turn(turns, first, second if again else None, stays_s), name=f"second-{name}"
            )
            await asyncio.shield(self._gone(turns, second))

    async def _gone(self, turns: Turns, second: ModelFolder) -> None:
        """Until the first model is gone."""
        while self._loader.turns is turns and turns.allowed != second.name:
            await turns.changed.wait()

    async def _second_turn(
        self, turns: Turns, first: ModelFolder, second: ModelFolder | None, stays_s: float | None
    ) -> None:
        try:
            turns.allow("")
            while self._is_used(first, turns):
                self._table.claim_ended.clear()
                await self._table.claim_ended.wait()
            await self._table.unload(first.name)
            if second is not None:
                if stays_s is not None:
                    self._table.stays_s[second.name] = stays_s
                turns.allow(second.name)
                async for _ in self._loader.loading(WantedLayers.whole(second)):
                    pass
        except FleetError as error:
            log.warning("engine.not_again", model=first.name, code=error.code, reason=error.message)
        finally:
            self._loader.turns = None
            turns.allow("")

    def _is_used(self, first: ModelFolder, turns: Turns) -> bool:
        """True while requests use the first model, besides those that wait for this turn to be over."""
        claims = self._table.claims.get(first.name, 0)
        return claims > turns.put_off and self._table.loading_or_ready(first.name) is not None
