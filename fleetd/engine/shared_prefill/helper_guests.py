"""Parts of other machines' prompts that this worker computes: admitted, done in turns, ended.

Nothing of one outlives its end: not its memory, not its streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleetd import limits
from fleetd.engine.failures import failed
from fleetd.engine.guests import GuestTask, GuestTasks
from fleetd.engine.memory import KvBudget
from fleetd.engine.protocol import Accepted, Assisted, AssistPrefill, Finished, Report
from fleetd.engine.shared_prefill.helper_prefill import HelperPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.streams.handed_over import HandedOverStreams, helper_streams
from fleetd.errors import FleetError, InvalidValue, ModelUnsupported, Overloaded, PeerLost
from fleetd.plan.prefill.split import checked

_Visit = GuestTask[AssistPrefill, HelperPrefill]


@dataclass
class HelperGuests:
    """``sharable`` is what this worker has of the model; None where it cannot be cut."""

    sharable: Sharable | None
    context_tokens: int
    budget: KvBudget
    streams: HandedOverStreams
    emit: Callable[[Report], None]
    # Forward passes, for the proof of progress.
    steps: int = field(default=0, init=False)
    visits: GuestTasks[_Visit] = field(default_factory=GuestTasks, init=False)

    def __len__(self) -> int:
        return len(self.visits)

    def begin(self, command: AssistPrefill) -> None:
        """Reserve its memory; it starts with its last stream. What is refused is told, not raised."""
        try:
            self._admit(command)
        except FleetError as error:
            self._told(command.id, error)
            return
        self.visits.add(_Visit(command))
        split = command.split
        self.emit(Accepted(command.id, split.tokens, split.cached, split.chunk))

    def _admit(self, command: AssistPrefill) -> None:
        split, place = checked(command.split), command.place
        sharable = self._sharable
        stage = sharable.stage
        if split.layers != stage.total or not 0 <= place < split.helpers:
            raise InvalidValue(f"Part {place} of {split.layers} layers is none of {stage.total} layers here.")
        layers = split.layers_of(place)
        if not stage.first <= layers.start < layers.stop <= stage.last:
            raise InvalidValue(
                f"Layers {layers.start} to {layers.stop} were asked for; "
                f"here are {stage.first} to {stage.last}."
            )
        if (longest := max(split.tokens, split.prompt_span)) > self.context_tokens:
            raise InvalidValue(f"{longest} tokens do not fit a context of {self.context_tokens}.")
        if split.prompt_span and (why := sharable.arithmetic.sparse):
            raise ModelUnsupported(f"Tokens cannot be left out of a prompt here. {why}", param="sparse")
        if self.visits.find(command.id) is not None:
            raise InvalidValue("A part of this prompt is being computed already.")
        if len(self.visits) >= limits.ASSISTS:
            raise Overloaded(f"This machine helps with {limits.ASSISTS} prompts already.")
        # Of all tokens that its layers attend to.
        tokens = split.tokens_of(place).stop
        held = stage.last - stage.first
        self.budget.lend(command.id, tokens * self.budget.bytes_per_token * len(layers) // held)

    @property
    def _sharable(self) -> Sharable:
        if self.sharable is None:
            raise ModelUnsupported("A model of this kind cannot be shared between machines.")
        return self.sharable

    def cancel(self, assist_id: str) -> bool:
        """False where it is none of these."""
        if (visit := self.visits.find(assist_id)) is None:
            return False
        self._end(visit)
        self.emit(Finished(assist_id, "cancelled"))
        return True

    def turn(self) -> None:
        """Begin those whose streams have come, give up those that are overdue, and take a step of one."""
        for visit in self.visits:
            self._look(visit)
        if (due := self.visits.take_turn()) is not None and due.work is not None:
            self._step(due, due.work)

    def _step(self, visit: _Visit, work: HelperPrefill) -> None:
        try:
            work.step()
        except Exception as error:
            self._fail(visit, error)
            return
        self.steps += 1
        self._look(visit)

    def _look(self, visit: _Visit) -> None:
        command = visit.command
        try:
            if visit.work is not None:
                if visit.work.finished:
                    steps = visit.work.steps
                    self._end(visit)
                    self.emit(Assisted(command.id, steps))
            elif self.streams.complete(command.id, helper_streams(command.split, command.place)):
                sharable, connect = self._sharable, self.streams.connect(command.id)
                visit.work = HelperPrefill(sharable.stage, sharable.layout, command, connect)
            elif visit.overdue:
                raise PeerLost(f"The other machines did not connect within {limits.TICKET_S:.0f} s.")
        except Exception as error:
            self._fail(visit, error)

    def _fail(self, visit: _Visit, error: Exception) -> None:
        self._end(visit)
        self._told(visit.command.id, error)

    def _told(self, assist_id: str, error: Exception) -> None:
        self.emit(failed(assist_id, error, "This part of a prompt could not be computed"))

    def _end(self, visit: _Visit) -> None:
        self.visits.end(visit, self.streams, self.budget)

    def close(self) -> None:
        for visit in self.visits:
            self._end(visit)
