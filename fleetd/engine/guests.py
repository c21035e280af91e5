"""Guest work: tasks that a worker computes for other workers, in turns beside its own sequences.

    command ──► begin: Accepted | Failed ──► its streams ──► a step per turn ──► the last report | Failed

There are three kinds: parts of prompts (``HelperGuests``), drafts (``DraftGuests``) and scores
(``ScoreGuests``). This module admits, starts, steps, cancels and ends tasks; each kind says what differs.
A task that has ended holds no memory and no stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from fleetd import limits
from fleetd.engine.failures import failed
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.protocol import Accepted, Finished, Report
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import PeerLost


class Steppable(Protocol):
    """Work in steps, between which it may wait for other machines: a ``SharedPrefill``, or a guest's work."""

    @property
    def ready(self) -> bool:
        """True if ``step`` can compute something now, or has an error to raise."""

    @property
    def due_s(self) -> float | None:
        """When ``step`` gives up waiting, in monotonic seconds; None while it does not wait."""


def can_step(work: Steppable) -> bool:
    """True if a step does something now: computes, or gives up what is overdue."""
    if work.ready:
        return True
    due_s = work.due_s
    return due_s is not None and time.monotonic() >= due_s


class GuestWork(Steppable, Protocol):
    def close(self) -> None: ...


class GuestCommand(Protocol):
    @property
    def id(self) -> str: ...


C = TypeVar("C", bound=GuestCommand)
W = TypeVar("W", bound=GuestWork)


@dataclass(slots=True, eq=False)
class GuestTask(Generic[C, W]):
    """``work`` is None until the task's streams are connected; if they are not by ``until_s``, it fails."""

    command: C
    work: W | None = None
    until_s: float = field(default_factory=lambda: time.monotonic() + limits.TICKET_S)

    @property
    def id(self) -> str:
        return self.command.id

    @property
    def can_step(self) -> bool:
        return self.work is not None and can_step(self.work)

    @property
    def due_s(self) -> float | None:
        """When the task's present wait ends even if nothing arrives; None while it does not wait."""
        return self.until_s if self.work is None else self.work.due_s


@dataclass(kw_only=True)
class Guests(ABC, Generic[C, W]):
    """All tasks of one kind, in the order of their turns.

    ``streams`` is None if tasks need none. ``steps`` counts forward passes, to prove progress.
    """

    # The message of an error that the code does not foresee.
    failure: ClassVar[str]

    budget: KvBudget
    emit: Callable[[Report], None]
    streams: HandedOverStreams | None = None
    steps: int = field(default=0, init=False)
    _tasks: list[GuestTask[C, W]] = field(default_factory=list, init=False)

    # ---- what differs ----------------------------------------------------------------------------------

    @abstractmethod
    def admit(self, command: C) -> tuple[GuestTask[C, W], Accepted]:
        """Check a command and reserve its memory. Raises FleetError if it is refused."""

    def stream_names(self, command: C) -> Iterable[str]:
        """The streams that must be connected before the task's work begins."""
        return ()

    def begin_work(self, task: GuestTask[C, W], streams: HandedOverStreams) -> W:
        """The work of a task whose streams are connected. Kinds that name streams override it; others never
        get here: without ``streams``, the work begins with ``admit``."""
        raise NotImplementedError

    @abstractmethod
    def advance(self, task: GuestTask[C, W], work: W, chunk_tokens: int) -> Report | None:
        """Take one step. Returns the task's last report if that ended it. Raises why it failed."""

    def on_end(self, task: GuestTask[C, W]) -> None:
        """Called when a task has ended in any way, after its memory and its streams are given back."""

    # ---- what is the same ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task_id: str) -> bool:
        return self._find(task_id) is not None

    def begin(self, command: C) -> None:
        """Admit a task. A refusal is reported, not raised."""
        try:
            task, accepted = self.admit(command)
        except Exception as error:
            self._report_failure(command.id, error)
            return
        self._tasks.append(task)
        self.emit(accepted)

    def cancel(self, task_id: str) -> bool:
        """End a task. False if there is none with this id."""
        if (task := self._find(task_id)) is None:
            return False
        self._end(task)
        self.emit(Finished(task_id, "cancelled"))
        return True

    def turn(self, chunk_tokens: int) -> None:
        """Start the tasks whose streams are connected, fail those that are overdue, and take a step of one.

        ``chunk_tokens``: about how many tokens that step may compute.
        """
        for task in list(self._tasks):
            if task.work is None:
                self._start(task)
        due = [task for task in self._tasks if task.can_step]
        if not due or (work := due[0].work) is None:
            return
        task = due[0]
        # The next turn is another task's.
        self._tasks.remove(task)
        self._tasks.append(task)
        try:
            last = self.advance(task, work, chunk_tokens)
        except Exception as error:
            self._fail(task, error)
            return
        self.steps += 1
        if last is not None:
            self._end(task)
            self.emit(last)

    @property
    def ids(self) -> list[str]:
        return [task.id for task in self._tasks]

    @property
    def ready(self) -> bool:
        """True if a step can be computed now."""
        return any(task.can_step for task in self._tasks)

    @property
    def deadlines(self) -> list[float | None]:
        """The time at which each task's wait ends even if nothing arrives."""
        return [task.due_s for task in self._tasks]

    def close(self) -> None:
        for task in list(self._tasks):
            self._end(task)

    def _find(self, task_id: str) -> GuestTask[C, W] | None:
        return next((task for task in self._tasks if task.id == task_id), None)

    def _start(self, task: GuestTask[C, W]) -> None:
        try:
            if self.streams is not None and self.streams.complete(task.id, self.stream_names(task.command)):
                task.work = self.begin_work(task, self.streams)
            elif time.monotonic() >= task.until_s:
                raise PeerLost(f"The other machines did not connect within {limits.TICKET_S:.0f} s.")
        except Exception as error:
            self._fail(task, error)

    def _fail(self, task: GuestTask[C, W], error: Exception) -> None:
        self._end(task)
        self._report_failure(task.id, error)

    def _report_failure(self, task_id: str, error: Exception) -> None:
        self.emit(failed(task_id, error, self.failure))

    def _end(self, task: GuestTask[C, W]) -> None:
        self._tasks.remove(task)
        if task.work is not None:
            task.work.close()
        if self.streams is not None:
            self.streams.drop(task.id)
        self.budget.give_back(task.id)
        self.on_end(task)
