"""What people do with the models of this machine: the same for its own API and for paired machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from fleetd.control.model_change import ModelDone, ModelProgress, Split, Verb
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.errors import ModelCorrupt, ModelNotFound
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.models.pinned import PinnedModels
from fleetd.models.pull_lines import PullProgress


class ModelOperations(msgspec.Struct, frozen=True):
    """The verbs of ``model_change.Verb`` on this machine."""

    models: ModelStore
    pool: EnginePool
    pinned: PinnedModels
    #: Starts or joins the download of a model and yields its progress.
    pull: Callable[[str], AsyncGenerator[PullProgress, None]]
    #: Is called when a model went; other machines hear of it at once.
    changed: Callable[[], None]

    async def run(
        self, verb: Verb, ref: str, over: Sequence[str] | None = None, split: Split | None = None
    ) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        """Do it; the last event is ModelDone. Closing it early stops a download or a load.

        Args:
            over: names of the other machines that are to hold a model that is loaded, as ``EnginePool.load``.
            split: how they hold it.

        Raises:
            FleetError: as ``ModelStore`` and ``EnginePool``.
            ModelNotFound: also for what is to be unloaded or unpinned, and is not loaded or pinned.
        """
        name = ""
        match verb:
            case "pull":
                async with aclosing(self.pulled(ref)) as steps:
                    async for step in steps:
                        yield step
                name = (await self._resolve(ref)).name
            case "load" | "pin":
                folder = await self._resolve(ref)
                # What is pinned can be loaded here, so it is loaded first.
                async with aclosing(self.pool.loading(folder, over=over, split=split)) as loading:
                    async for each in loading:
                        yield ModelProgress("", each.done, each.total, each.stage, each.members)
                if verb == "pin":
                    await asyncio.to_thread(self.pinned.pin, folder.name)
                name = folder.name
            case "unload":
                name = await self._unload(ref)
            case "unpin":
                name = await self._unpin(ref)
            case "remove":
                name = await self.remove(ref)
        yield ModelDone(name=name)

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

    async def _resolve(self, ref: str) -> ModelFolder:
        return await file_threads.look(self.models.resolve, ref)

    async def _installed_name(self, ref: str) -> str:
        """The name that a model is loaded and removed by; ``ref`` itself if its folder is gone or damaged."""
        try:
            return (await self._resolve(ref)).name
        except (ModelNotFound, ModelCorrupt):
            return ref
