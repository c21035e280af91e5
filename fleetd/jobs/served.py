"""Requests of one kind that other machines make here: how many at once, and how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from fleetd.errors import Draining, FleetError, Overloaded
from fleetd.observe import get_logger

log = get_logger("fleetd.serving")

Kind = Literal["assist", "draft", "score"]
Finished = Callable[[Kind, str], None]


@dataclass(slots=True)
class Visit:
    """One request. Whoever made it may be gone as soon as it has what it came for: ``done`` is said then."""

    done: bool = False


@dataclass
class Served:
    """``kind`` names it in the log; ``most`` at once, and what is said to the next: "helps with 2 prompts".

    ``finished`` is told the kind and how each ended: "done", "cancelled" or an error's code.
    """

    kind: Kind
    most: int
    busy: str
    draining: Callable[[], bool]
    finished: Finished = lambda kind, outcome: None
    running: int = field(default=0, init=False)

    def admit(self) -> None:
        """Raises Draining."""
        if self.draining():
            raise Draining("This machine is stopping and takes no new work.")

    @contextmanager
    def visit(self, peer: str, request_id: str) -> Iterator[Visit]:
        """Around the whole request. Raises Draining, Overloaded."""
        self.admit()
        if self.running >= self.most:
            raise Overloaded(f"This machine {self.busy} already.")
        self.running += 1
        visit, failure = Visit(), ""
        try:
            yield visit
            visit.done = True
        except FleetError as error:
            failure = error.code
            raise
        finally:
            self.running -= 1
            outcome = failure or ("done" if visit.done else "cancelled")
            self.finished(self.kind, outcome)
            log.info("served", kind=self.kind, peer=peer[:7], request=request_id, outcome=outcome)
