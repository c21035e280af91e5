"""Parts of other machines' prompts that this worker computes: admitted, done in turns, ended.

Nothing of one outlives its end: not its memory, not its streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetd import limits
from fleetd.engine.failures import failed
from fleetd.engine.memory import KvBudget
from fleetd.engine.protocol import Accepted, Assist, Assisted, Finished, Report
from fleetd.engine.share.assisting import Assisting
from fleetd.engine.share.sharable import Sharable
from fleetd.engine.share.streams import Streams, helper_streams
from fleetd.engine.turns import can_step
from fleetd.errors import FleetError, InvalidValue, ModelUnsupported, Overloaded, PeerLost
from fleetd.plan.split import checked


@dataclass(slots=True)
class _Task:
    command: Assist
    sharable: Sharable
    # When its streams must be there.
    until_s: float
    work: Assisting | None = None


@dataclass
class Assists:
    """``sharable`` is what this worker has of the model; None where it cannot be cut."""

    sharable: Sharable | None
    context_tokens: int
    budget: KvBudget
    streams: Streams
    emit: Callable[[Report], None]
    # Forward passes, for the proof of progress.
    steps: int = field(default=0, init=False)
    _tasks: list[_Task] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def ready(self) -> bool:
        """Whether a step can be computed now."""
        return any(task.work is not None and can_step(task.work) for task in self._tasks)

    @property
    def dues_s(self) -> list[float | None]:
        """When their waits end even if nothing comes."""
        return [task.until_s if task.work is None else task.work.due_s for task in self._tasks]

    def begin(self, command: Assist) -> None:
        """Reserve its memory; it starts with its last stream. What is refused is told, not raised."""
        try:
            sharable = self._admit(command)
        except FleetError as error:
            self._told(command.id, error)
            return
        self._tasks.append(_Task(command, sharable, time.monotonic() + limits.TICKET_S))
        split = command.split
        self.emit(Accepted(command.id, split.tokens, split.cached, split.chunk))

    def _admit(self, command: Assist) -> Sharable:
        split, place = checked(command.split), command.place
        if self.sharable is None:
            raise ModelUnsupported("A model of this kind cannot be shared between machines.")
        stage = self.sharable.stage
        if split.layers != stage.total or not 0 <= place < split.helpers:
            raise InvalidValue(f"Part {place} of {split.layers} layers is none of {stage.total} layers here.")
        layers = split.layers_of(place)
        if not stage.first <= layers.start < layers.stop <= stage.last:
            raise InvalidValue(
                f"Layers {layers.start} to {layers.stop} were asked for; "
                f"here are {stage.first} to {stage.last}."
            )
        if (longest := max(split.tokens, split.span)) > self.context_tokens:
            raise InvalidValue(f"{longest} tokens do not fit a context of {self.context_tokens}.")
        if split.span and (why := self.sharable.arithmetic.sparse):
            raise ModelUnsupported(f"Tokens cannot be left out of a prompt here. {why}", param="sparse")
        if any(task.command.id == command.id for task in self._tasks):
            raise InvalidValue("A part of this prompt is being computed already.")
        if len(self._tasks) >= limits.ASSISTS:
            raise Overloaded(f"This machine helps with {limits.ASSISTS} prompts already.")
        # Of all tokens that its layers attend to.
        tokens = split.tokens_of(place).stop
        held = stage.last - stage.first
        self.budget.lend(command.id, tokens * self.budget.bytes_per_token * len(layers) // held)
        return self.sharable

    def cancel(self, assist_id: str) -> bool:
        """False where it is none of these."""
        for task in self._tasks:
            if task.command.id == assist_id:
                self._end(task)
                self.emit(Finished(assist_id, "cancelled"))
                return True
        return False

    def turn(self) -> None:
        """Begin those whose streams have come, give up those that are overdue, and take a step of one."""
        for task in list(self._tasks):
            self._look(task)
        for task in self._tasks:
            if task.work is not None and can_step(task.work):
                # The next turn is another one's.
                self._tasks.remove(task)
                self._tasks.append(task)
                self._step(task, task.work)
                return

    def _step(self, task: _Task, work: Assisting) -> None:
        try:
            work.step()
        except Exception as error:
            self._fail(task, error)
            return
        self.steps += 1
        self._look(task)

    def _look(self, task: _Task) -> None:
        command = task.command
        try:
            if task.work is not None:
                if task.work.finished:
                    steps = task.work.steps
                    self._end(task)
                    self.emit(Assisted(command.id, steps))
            elif self.streams.complete(command.id, helper_streams(command.split, command.place)):
                task.work = Assisting(
                    task.sharable.stage, task.sharable.layout, command, self.streams.connect(command.id)
                )
            elif time.monotonic() >= task.until_s:
                raise PeerLost(f"The other machines did not connect within {limits.TICKET_S:.0f} s.")
        except Exception as error:
            self._fail(task, error)

    def _fail(self, task: _Task, error: Exception) -> None:
        self._end(task)
        self._told(task.command.id, error)

    def _told(self, assist_id: str, error: Exception) -> None:
        self.emit(failed(assist_id, error, "This part of a prompt could not be computed"))

    def _end(self, task: _Task) -> None:
        self._tasks.remove(task)
        if task.work is not None:
            task.work.close()
        self.streams.drop(task.command.id)
        self.budget.give_back(task.command.id)

    def close(self) -> None:
        for task in list(self._tasks):
            self._end(task)
