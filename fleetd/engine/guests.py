"""Works of other workers that wait for streams, then take a step when it is their turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fleetd import limits
from fleetd.engine.memory import KvBudget
from fleetd.engine.steppable import Steppable, can_step
from fleetd.engine.streams.handed_over import HandedOverStreams


class Command(Protocol):
    @property
    def id(self) -> str: ...


class Closable(Steppable, Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Command)
W = TypeVar("W", bound=Closable)


@dataclass(slots=True, eq=False)
class GuestTask(Generic[C, W]):
    """``work`` is None until its streams are there, which they must be by ``until_s``."""

    command: C
    until_s: float = field(default_factory=lambda: time.monotonic() + limits.TICKET_S)
    work: W | None = None

    @property
    def id(self) -> str:
        return self.command.id

    @property
    def overdue(self) -> bool:
        """Whether its streams have not come in time."""
        return self.work is None and time.monotonic() >= self.until_s

    @property
    def can_step(self) -> bool:
        return self.work is not None and can_step(self.work)


V = TypeVar("V", bound=GuestTask)  # type: ignore[type-arg]  # of any command and work


class GuestTasks(Generic[V]):
    """In the order of their turns."""

    def __init__(self) -> None:
        self._visits: list[V] = []

    def __len__(self) -> int:
        return len(self._visits)

    def __iter__(self) -> Iterator[V]:
        """As they are now: some may leave meanwhile."""
        return iter(list(self._visits))

    def find(self, visit_id: str) -> V | None:
        return next((visit for visit in self._visits if visit.id == visit_id), None)

    def add(self, visit: V) -> None:
        self._visits.append(visit)

    def end(self, visit: V, streams: HandedOverStreams, budget: KvBudget) -> None:
        """Remove it and give back what it holds: its work's caches, its streams, its memory."""
        self._visits.remove(visit)
        if visit.work is not None:
            visit.work.close()
        streams.drop(visit.id)
        budget.give_back(visit.id)

    def take_turn(self) -> V | None:
        """The first that can take a step; the next turn is another one's."""
        visit = next((visit for visit in self._visits if visit.can_step), None)
        if visit is not None:
            self._visits.remove(visit)
            self._visits.append(visit)
        return visit

    @property
    def ready(self) -> bool:
        """Whether a step can be computed now."""
        return any(visit.can_step for visit in self._visits)

    @property
    def deadlines(self) -> list[float | None]:
        """When their waits end even if nothing comes."""
        return [visit.until_s if visit.work is None else visit.work.due_s for visit in self._visits]
