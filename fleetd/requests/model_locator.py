"""Where the models that clients name are on this machine, and the download of those that are not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fleetd.engine.protocol import Loading
from fleetd.errors import ModelNotFound
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.model_names import ModelNames, untagged
from fleetd.models.model_store import ModelStore
from fleetd.requests.placement.placement import canonical
from fleetd.requests.pulls import ModelSource, Pulls
from fleetd.requests.request import LocatedModel


class ModelLocator:
    """Args:
    names: the models that aliases stand for.
    embedded: model reference → its canonical name if that model travels with fleetd; these, and only
        these, are pulled by a request itself.
    source: where downloads come from; ``models`` itself if not given.
    """

    def __init__(
        self,
        models: ModelStore,
        names: ModelNames,
        embedded: Callable[[str], str | None],
        source: ModelSource | None = None,
    ) -> None:
        self.pulls = Pulls(source or models)
        self._models = models
        self._names = names
        self._embedded = embedded

    def named(self, named: str) -> str:
        """The name under which a model is looked for."""
        return canonical(untagged(self._names.named(named)))

    def locate(self, named: str, digest: str = "") -> LocatedModel:
        """Where the model is on this machine, if it is, and with that content if it matters. Blocks.

        Raises ModelUnsupported, ModelCorrupt, InvalidValue.
        """
        ref = untagged(self._names.named(named))
        try:
            folder = self._models.in_part(ref)
        except ModelNotFound as error:
            real = self._names.alias(ref)
            # What an alias stands for is not looked up as an alias again: settings could name a circle.
            if real is not None and self._names.alias(real) is None:
                return self.locate(real, digest)
            return self._missing(ref, error)
        if digest and str(self._models.digest(folder)) != digest:
            other = ModelNotFound(
                f"This machine has other files under the name {folder.name} than the ones asked for.",
                hint="The two copies come from different revisions; pull one of them again.",
            )
            return LocatedModel(ref, folder.name, None, missing=other)
        return LocatedModel(ref, folder.name, folder)

    def installed(self) -> list[ModelFolder]:
        """The models on this machine. Blocks."""
        return self._models.installed()

    def _missing(self, ref: str, error: ModelNotFound) -> LocatedModel:
        if (name := self._embedded(ref)) is not None:
            return LocatedModel(ref, name, None, can_pull=True, missing=error)
        if self._models.needs_pull(ref):
            error = ModelNotFound(
                f"The model {ref} is not on this machine.",
                hint=f"Get it with `fleetctl models pull {ref}`.",
                param="model",
            )
        return LocatedModel(ref, canonical(ref), None, missing=error)

    async def pull(self, ref: str) -> AsyncGenerator[Loading | ModelFolder, None]:
        """Download a model: the progress, and at the end its folder. Raises as ``Pulls.watch``."""
        async with aclosing(self.pulls.watch(ref)) as steps:
            async for step in steps:
                stage = f"{step.stage or 'downloading'} {step.file}".strip()
                yield Loading(stage, step.done_bytes, step.total_bytes)
        yield await file_threads.look(self._models.resolve, ref)

    async def close(self) -> None:
        """Cancel the downloads; what waits for them gets Draining."""
        await self.pulls.close()
