"""The step that says of a request whether several machines hold its model."""

from __future__ import annotations

from msgspec.structs import replace

from fleetd.engine.daemon_side.group_front import GroupFront
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Accepted
from fleetd.errors import NoMachine
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.job import THIS_NAME, Exactness, Planned
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.request import Request


class GroupLabels(PipelineStep):
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def prepare(self, request: Request) -> None:
        """A model that is loaded is told of before anything of the answer is there."""
        if (planned := self._planned(request)) is not None:
            request.placement = replace(request.placement, planned=planned)

    async def decide(self, request: Request, accepted: Accepted) -> None:
        """One that was loaded for this request is told of now."""
        planned = self._planned(request)
        if planned is not None and planned != request.planned:
            request.announce(planned)

    def _planned(self, request: Request) -> Planned | None:
        folder = request.folder_here
        if folder is None or request.placement.node_id != THIS_NODE:
            return None
        engine = self._pool.engine(folder)
        if not isinstance(engine, GroupFront):
            return None
        exactness: Exactness = "exact" if engine.exact else "equivalent"
        if request.attempt.generate.exact and exactness != "exact":
            raise NoMachine(
                f"The machines that hold {folder.name} together round in different ways.",
                hint="Leave out `exactness`.",
                param="exactness",
            )
        members = engine.settings.group
        names = tuple(member.name for member in members)
        cuts = (0, *(member.first for member in members), members[-1].last)
        if engine.settings.ring is not None:
            # Each machine has a part of every layer.
            cuts = ()
        return Planned("group", (THIS_NAME, *names), exactness, cuts=cuts)
