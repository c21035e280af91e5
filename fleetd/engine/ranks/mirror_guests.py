"""The one group for which this process is a rank, as guest work of its loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleetd.engine.groups.promised_rows import promised_bytes
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.protocol import STAGE, Accepted, Report, ServeStage
from fleetd.engine.ranks.mirror import Mirror
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue

_Task = GuestTask[ServeStage, Mirror]


@dataclass(kw_only=True)
class MirrorGuests(Guests[ServeStage, Mirror]):
    """``stage``: all layers, divided. ``ring``: the group of all ranks."""

    failure = "This rank could not be run"

    stage: Stage
    ring: Any
    progress: PassProgress

    def admit(self, command: ServeStage) -> tuple[_Task, Accepted]:
        if (command.first, command.last) != (0, self.stage.total):
            raise InvalidValue(f"A rank has a part of all {self.stage.total} layers.")
        if len(self):
            raise InvalidValue("This process is a rank of one group, which it serves already.")
        self.budget.lend(command.id, promised_bytes(command.tokens, self.budget.sizes))
        return _Task(command), Accepted(command.id, command.tokens)

    def stream_names(self, command: ServeStage) -> Iterable[str]:
        return (STAGE,)

    def begin_work(self, task: _Task, streams: HandedOverStreams) -> Mirror:
        room = self.budget.lent_bytes(task.id)
        return Mirror(self.stage, self.ring, self.progress, room, streams.connect(task.id))

    def advance(self, task: _Task, work: Mirror, chunk_tokens: int) -> Report | None:
        """``chunk_tokens`` has no effect: a pass is as long as that of the worker that answers."""
        work.step()
        return None
