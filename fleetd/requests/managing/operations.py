"""What people do with the models of this machine: the same for its own API and for paired machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.group_view import GroupView
from fleetd.control.model_change import ModelDone, ModelProgress, Split, Verb
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.errors import GroupLost, ModelCorrupt, ModelNotFound, ModelUnsupported, OutOfMemory
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_parts import HubPartOrder
from fleetd.models.model_store import ModelStore
from fleetd.models.pinned import PinnedModels
from fleetd.models.pull_lines import PullProgress

# What a group whose layers are divided fails with, and one with whole layers perhaps does not.
_DIVIDED_FAILS = (GroupLost, ModelUnsupported, OutOfMemory)


async def no_plan(folder: ModelFolder, over: Sequence[str]) -> GroupView | None:
    """None: there are no other machines."""
    return None


class ModelOperations(msgspec.Struct, frozen=True):
    """The verbs of ``model_change.Verb`` on this machine."""

    models: ModelStore
    pool: EnginePool
    pinned: PinnedModels
    #: Starts or joins the download of a model and yields its progress.
    pull: Callable[[str], AsyncGenerator[PullProgress, None]]
    #: Is called when a model went; other machines hear of it at once.
    changed: Callable[[], None]
    #: How machines of these names would hold a model, with the way that is faster. Raises FleetError if they
    #: cannot.
    planned: Callable[[ModelFolder, Sequence[str]], Awaitable[GroupView | None]] = no_plan

    async def run(
        self, verb: Verb, ref: str, over: Sequence[str] | None = None, split: Split | None = None
    ) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        """Do it; the last event is ModelDone. Closing it early stops a download or a load.

        Args:
            over: names of the other machines that are to hold a model that is loaded, as ``EnginePool.load``.
            split: how they hold it; None leaves it to the planner, and ModelDone says why it is so.

        Raises:
            FleetError: as ``ModelStore`` and ``EnginePool``.
            ModelNotFound: also for what is to be unloaded or unpinned, and is not loaded or pinned.
        """
        name, held = "", ModelDone()
        match verb:
            case "pull":
                async with aclosing(self.pulled(ref)) as steps:
                    async for step in steps:
                        yield step
                name = (await self._resolve(ref)).name
            case "load" | "pin":
                if over and (order := await self._to_outline(ref)) is not None:
                    # Each machine fetches its layers alone, this one as well.
                    async with aclosing(self.models.pull_part(order)) as brought:
                        async for part in brought:
                            yield ModelProgress(part.file, part.done_bytes, part.total_bytes, part.stage)
                folder = await (self._resolve(ref) if verb == "pin" else self._in_part(ref))
                if over and split is None:
                    held = await self._chosen(folder, over)
                # What is pinned can be loaded here, so it is loaded first.
                async with aclosing(self._loaded(folder, over, split, held)) as steps:
                    async for each in steps:
                        if isinstance(each, ModelDone):
                            held = each
                        else:
                            yield each
                if verb == "pin":
                    await asyncio.to_thread(self.pinned.pin, folder.name)
                name = folder.name
            case "unload":
                name = await self._unload(ref)
            case "unpin":
                name = await self._unpin(ref)
            case "remove":
                name = await self.remove(ref)
        yield replace(held, name=name)

    async def _chosen(self, folder: ModelFolder, over: Sequence[str]) -> ModelDone:
        """How the planner would have machines hold a model, and why."""
        view = await self.planned(folder, over)
        if view is None or view.divided is None:
            return ModelDone()
        return ModelDone(split="tensors" if view.divided.chosen else "layers", why=_brief(view.divided.why))

    async def _loaded(
        self, folder: ModelFolder, over: Sequence[str] | None, split: Split | None, held: ModelDone
    ) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        """Progress of a load, then ModelDone. ``held``: what was chosen, if ``split`` leaves it open."""
        way = split or (None if held.split is UNSET else held.split)
        try:
            async with aclosing(self._progress(folder, over, way)) as loading:
                async for step in loading:
                    yield step
        except _DIVIDED_FAILS as error:
            if split is not None or way != "tensors":
                raise
            async with aclosing(self._progress(folder, over, "layers")) as loading:
                async for step in loading:
                    yield step
            held = ModelDone(split="layers", why=_brief(f"Dividing every layer failed: {error.message}"))
        yield replace(held, name=folder.name)

    async def _progress(
        self, folder: ModelFolder, over: Sequence[str] | None, split: Split | None
    ) -> AsyncGenerator[ModelProgress, None]:
        async with aclosing(self.pool.loading(folder, over=over, split=split)) as loading:
            async for each in loading:
                yield ModelProgress("", each.done, each.total, each.stage, each.members or UNSET)

    async def pulled(self, ref: str) -> AsyncGenerator[ModelProgress, None]:
        """The progress of a download. Raises as ``ModelStore.pull``."""
        async with aclosing(self.pull(ref)) as steps:
            async for step in steps:
                yield ModelProgress(step.file, step.done_bytes, step.total_bytes, step.stage)

    async def remove(self, ref: str) -> str:
        """Unload a model, delete its files, and return its name. Raises FleetError."""
        name = await self._installed_name(ref)
        # A worker that has the files mapped would keep the disk space.
        await self.pool.unload(name)
        await file_threads.look(self.models.remove, name)
        await asyncio.to_thread(self.pinned.unpin, name)
        self.changed()
        return name

    async def _unload(self, ref: str) -> str:
        name = await self._installed_name(ref)
        if not await self.pool.unload(name):
            raise ModelNotFound(f"{name} is not loaded.", hint="`fleetctl status` lists what is.")
        return name

    async def _unpin(self, ref: str) -> str:
        name = await self._installed_name(ref)
        if name not in self.pinned.names:
            raise ModelNotFound(f"{name} is not pinned.", hint="`fleetctl models` lists what is.")
        await asyncio.to_thread(self.pinned.unpin, name)
        return name

    async def _in_part(self, ref: str) -> ModelFolder:
        return await file_threads.look(self.models.in_part, ref)

    async def _to_outline(self, ref: str) -> HubPartOrder | None:
        """What is to be fetched of a model that is not here at all before it can be planned over several
        machines; None if it is here, whole or in part, or not of the hub."""
        try:
            await self._in_part(ref)
        except ModelNotFound:
            return await file_threads.look(self.models.outline_order, ref)
        return None

    async def _resolve(self, ref: str) -> ModelFolder:
        return await file_threads.look(self.models.resolve, ref)

    async def _installed_name(self, ref: str) -> str:
        """The name that a model is loaded and removed by; ``ref`` itself if its folder is gone or damaged."""
        try:
            return (await self._in_part(ref)).name
        except (ModelNotFound, ModelCorrupt):
            return ref


def _brief(text: str) -> str:
    return text[: limits.ERROR_TEXT_CHARS]
