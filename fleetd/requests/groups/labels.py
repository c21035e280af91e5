"""The step that says of a request whether several machines hold its model."""

from __future__ import annotations

from msgspec.structs import replace

from fleetd.engine.daemon_side.group_front import GroupFront
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Accepted
from fleetd.errors import NoMachine
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.job import THIS_NAME, Exactness, Planned
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.request import Request


class GroupLabels(PipelineStep):
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def examine(self, request: Request) -> None:
        """A model that is not loaded, and that several machines are to hold, is told of once it is known
        which."""
        request.undecided = False
        if (folder := self._folder(request)) is not None and self._pool.engine(folder) is None:
            over = request.placement.over
            request.undecided = await file_threads.look(self._pool.takes_others, folder, over)

    def prepare(self, request: Request) -> None:
        """A model that is loaded is told of before anything of the answer is there."""
        if (planned := self._planned(request)) is not None:
            request.placement = replace(request.placement, planned=planned)

    def loads(self, request: Request) -> None:
        """Which machines hold it is known before they have loaded it. How exact that is, they say later."""
        if not request.undecided or (folder := self._folder(request)) is None:
            return
        engine = self._pool.loading_engine(folder)
        request.undecided = engine is None
        if isinstance(engine, GroupFront):
            request.placement = replace(request.placement, planned=_group(engine))

    async def decide(self, request: Request, accepted: Accepted) -> None:
        """One that was loaded for this request is told of now."""
        planned = self._planned(request)
        request.undecided = False
        if planned is not None and planned != request.planned:
            request.announce(planned)

    @staticmethod
    def _folder(request: Request) -> ModelFolder | None:
        """The model, if this machine answers with it."""
        return request.folder_here if request.placement.node_id == THIS_NODE else None

    def _planned(self, request: Request) -> Planned | None:
        """Which machines hold its model together. Raises NoMachine if that is not exact and has to be."""
        if (folder := self._folder(request)) is None:
            return None
        engine = self._pool.engine(folder)
        if not isinstance(engine, GroupFront):
            return None
        planned = _group(engine)
        if request.attempt.generate.exact and planned.exactness != "exact":
            raise NoMachine(
                f"The machines that hold {folder.name} together round in different ways.",
                hint="Leave out `exactness`.",
                param="exactness",
            )
        return planned


def _group(engine: GroupFront) -> Planned:
    """The machines that hold the model of this worker, loaded or not."""
    exactness: Exactness = "exact" if engine.exact else "equivalent"
    members = engine.settings.group
    names = tuple(member.name for member in members)
    cuts = (0, *(member.first for member in members), members[-1].last)
    if engine.settings.ring is not None:
        # Each machine has a part of every layer.
        cuts = ()
    return Planned("group", (THIS_NAME, *names), exactness, cuts=cuts)
