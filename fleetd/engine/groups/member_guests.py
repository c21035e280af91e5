"""Models of other machines of which this worker has some layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetd import limits
from fleetd.engine.groups.member_stage import MemberStage
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.protocol import STAGE, Accepted, Report, ServeStage
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, ModelUnsupported, Overloaded

_Task = GuestTask[ServeStage, MemberStage]


@dataclass(kw_only=True)
class MemberGuests(Guests[ServeStage, MemberStage]):
    """``sharable``: the layers of the model that this worker has; None if the model cannot be cut."""

    failure = "These layers could not be run"

    sharable: Sharable | None

    def admit(self, command: ServeStage) -> tuple[_Task, Accepted]:
        stage = self._sharable.stage
        if not stage.first <= command.first < command.last <= stage.last:
            raise InvalidValue(
                f"Layers {command.first} to {command.last} were asked for; "
                f"here are {stage.first} to {stage.last}."
            )
        if command.id in self:
            raise InvalidValue("These layers are run for this group already.")
        if len(self) >= limits.GROUPS:
            raise Overloaded(f"This machine is in {limits.GROUPS} groups already.")
        layers = command.last - command.first
        held = stage.last - stage.first
        self.budget.lend(command.id, self.budget.sizes.of(command.tokens) * layers // held)
        return _Task(command), Accepted(command.id, command.tokens)

    @property
    def _sharable(self) -> Sharable:
        if self.sharable is None:
            raise ModelUnsupported("A model of this kind cannot be cut between machines.")
        return self.sharable

    def stream_names(self, command: ServeStage) -> Iterable[str]:
        return (STAGE,)

    def begin_work(self, task: _Task, streams: HandedOverStreams) -> MemberStage:
        sharable, command = self._sharable, task.command
        return MemberStage(
            sharable.stage.part(command.first, command.last),
            sharable.layout.dtype,
            self.budget.lent_bytes(task.id),
            streams.connect(task.id),
        )

    def advance(self, task: _Task, work: MemberStage, chunk_tokens: int) -> Report | None:
        """``chunk_tokens`` has no effect: the worker that answers says how its prompts are cut."""
        work.step()
        return None
