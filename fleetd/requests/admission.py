"""This machine as others may use it: what it shows them, how many requests it takes, and how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from fleetd.errors import Draining, FleetError, Overloaded
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.observe import get_logger
from fleetd.p2p.membership.cards import Card
from fleetd.requests.model_by_digest import model_by_digest

log = get_logger("fleetd.serving")

Kind = Literal["assist", "draft", "score"]
OutcomeObserver = Callable[[Kind, str], None]


@dataclass(frozen=True, slots=True)
class ServingContext:
    """``own_card``: what this machine has told others; only models that it shows may be asked for.

    ``finished`` is told the kind of each request and how it ended: "done", "cancelled" or an error's code.
    """

    models: ModelStore
    own_card: Callable[[], Card]
    draining: Callable[[], bool]
    finished: OutcomeObserver = lambda kind, outcome: None

    async def holding(self, model: str, digest: str) -> ModelFolder:
        """``held.model_by_digest``."""
        return await model_by_digest(self.models, self.own_card(), model, digest)

    def admit(self) -> None:
        """Raises Draining."""
        if self.draining():
            raise Draining("This machine is stopping and takes no new work.")


@dataclass(slots=True)
class ServedRequest:
    """One request. Whoever made it may be gone as soon as it has what it came for: ``done`` is said then."""

    done: bool = False


@dataclass
class ConcurrencyLimit:
    """Requests of one kind: ``most`` at once, and what is said to the next: "helps with 2 prompts"."""

    host: ServingContext
    kind: Kind
    most: int
    busy: str
    running: int = field(default=0, init=False)

    @contextmanager
    def visit(self, peer: str, request_id: str) -> Iterator[ServedRequest]:
        """Around the whole request. Raises Draining, Overloaded."""
        self.host.admit()
        if self.running >= self.most:
            raise Overloaded(f"This machine {self.busy} already.")
        self.running += 1
        visit, failure = ServedRequest(), ""
        try:
            yield visit
            visit.done = True
        except FleetError as error:
            failure = error.code
            raise
        finally:
            self.running -= 1
            outcome = failure or ("done" if visit.done else "cancelled")
            self.host.finished(self.kind, outcome)
            log.info("served", kind=self.kind, peer=peer[:7], request=request_id, outcome=outcome)
