"""A model over several machines is loaded over another cut, once it is idle and was measured to be cut badly.

idle ──► another cut is better ──► machines that are new to it load ──► its front changes ──► loaded
                                     └ they do not: it stays as it is      └ failed: loaded as it was
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from fleetd import limits
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.daemon_side.group_front import GroupFront, NewCut
from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.daemon_side.model_loader import ModelLoader
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.errors import EngineDied, FleetError, OutOfMemory, Overloaded

log = structlog.get_logger(__name__)


class GroupRecut:
    """One model at a time."""

    def __init__(self, table: ModelTable, loader: ModelLoader) -> None:
        self._table, self._loader = table, loader
        # Another cut of a model over machines, given its name, what its layers took lately and the tokens
        # that were written with it; None: it stays as it is cut.
        self.cut_anew: Callable[[str, Sequence[GroupStage], int], NewCut | None] = (
            lambda name, stages, tokens: None
        )
        # Loads a model that is cut anew.
        self.task: asyncio.Task[None] | None = None

    def use_idle_time(self) -> None:
        """Called every second or so: a model over several machines that nobody uses may be loaded over
        another cut, if its machines turned out to be slower or faster than planned."""
        if self.task is not None and not self.task.done():
            return
        for name, model in self._table.models.items():
            front = model.first
            if isinstance(front, GroupFront) and front.stages and self._may_cut(model):
                self.task = asyncio.create_task(self._cut(model, front), name=f"cut-{name}")
                return

    def _may_cut(self, model: LoadedModel) -> bool:
        quiet = model.first.idle_s >= limits.GROUP_RECUT_IDLE_S and self._loader.turns is None
        return quiet and model.state == "ready" and not model.busy and not self._table.in_use(model.name)

    def _held_ready(self, model: LoadedModel) -> bool:
        return self._table.models.get(model.name) is model and model.state == "ready"

    async def _cut(self, model: LoadedModel, front: GroupFront) -> None:
        """Load a model over another cut, if there is a better one. Requests that come meanwhile wait for that
        load as for any other; if it fails, the model is loaded as it was."""
        cut: LoadedModel | None = None
        async with self._loader.starting:
            if not self._held_ready(model) or not self._may_cut(model):
                return
            # Each answer's figures are looked at once.
            stages, front.stages = front.stages, ()
            if (new := self.cut_anew(model.name, stages, front.written_tokens)) is None:
                return
            if new.prepare is None:
                cut = await self._switched(model, front, new)
        if new.prepare is not None:
            ready = new.prepare(front.exact_kind, partial(self._unused, model))
            cut = await self._prepared(model, front, new, ready)
        if cut is None:
            return
        try:
            async for _ in cut.loaded():
                pass
        except FleetError as error:
            log.warning("group.not_cut_anew", model=model.name, code=error.code, reason=error.message)
            await self._as_before(cut, new)

    async def _prepared(
        self, model: LoadedModel, front: GroupFront, new: NewCut, ready: Awaitable[None]
    ) -> LoadedModel | None:
        """Load it over another cut once machines that are new to it are ``ready``; None if they do not get
        so. Meanwhile it answers as before."""
        log.info("group.prepared", model=model.name, reason=new.why)
        waiting = asyncio.ensure_future(ready)
        try:
            try:
                while not waiting.done():
                    if not self._held_ready(model):
                        raise EngineDied(f"{model.name} is not loaded any more.")
                    await asyncio.wait([waiting], timeout=limits.POOL_CHECK_S)
                await waiting
            finally:
                # Before its group is closed, which closes what it has opened by then.
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            async with self._loader.starting:
                if not self._held_ready(model) or not self._may_cut(model):
                    raise Overloaded(f"{model.name} is in use again.")
                return await self._switched(model, front, new)
        except FleetError as error:
            log.info("group.not_cut_anew", model=model.name, code=error.code, reason=error.message)
            new.group.close()
            return None
        except BaseException:
            new.group.close()
            raise

    async def _unused(self, model: LoadedModel) -> None:
        """Until nobody uses it. Raises Overloaded if that takes too long: machines keep memory for it."""
        try:
            async with asyncio.timeout(limits.GROUP_RECUT_S):
                while not self._may_cut(model):  # noqa: ASYNC110  (idle for a while is no event)
                    await asyncio.sleep(limits.POOL_CHECK_S)
        except TimeoutError:
            raise Overloaded(f"{model.name} was in use all the time.") from None

    async def _switched(self, model: LoadedModel, front: GroupFront, new: NewCut) -> LoadedModel | None:
        """The other cut in the place of the one that is loaded, started. None if that could not be."""
        held_bytes = self._table.held_besides(front)
        cut = LoadedModel([front.over(new.group, held_bytes, new.why)], self._table.exited)
        self._table.place(cut)
        try:
            # The memory of machines that are in both holds one of both.
            await self._table.end(model)
            await cut.start()
        except BaseException as error:
            # Unloaded meanwhile, or cancelled: no request may wait for what was never started.
            self._table.remove(cut)
            new.group.close()
            if not isinstance(error, FleetError):
                raise
            log.info("group.not_cut_anew", model=model.name, code=error.code, reason=error.message)
            return None
        return cut

    async def _as_before(self, cut: LoadedModel, new: NewCut) -> None:
        """Load a model as it was before ``cut``, which failed, unless a request has done so, or it was
        unloaded."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + limits.GROUP_AGAIN_S
        wanted = WantedLayers.whole(new.folder, new.over)
        while (now := self._table.models.get(cut.name)) is not None and (now is cut or now.state == "failed"):
            try:
                async for _ in self._loader.loading(wanted, evict=False):
                    pass
            except FleetError as error:
                # Machines may have yet to free their parts of the other cut.
                if not isinstance(error, OutOfMemory) or clock() > until_s:
                    log.warning("group.not_again", model=cut.name, code=error.code, reason=error.message)
                    return
                await asyncio.sleep(limits.POOL_CHECK_S)
