"""Requests of other machines: which of this machine's models they may use, how many run, how each ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fleetd.errors import Draining, FleetError, ModelNotFound, Overloaded
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.p2p.membership.cards import Card
from fleetd.process.observe import get_logger

log = get_logger("fleetd.serving")

Kind = Literal["assist", "draft", "fetch", "group", "manage", "score", "vectors"]
OutcomeObserver = Callable[[Kind, str], None]


class ServingContext(msgspec.Struct, frozen=True):
    """What the servers of other machines' requests know of this machine.

    ``own_card``: what this machine tells others; they may ask only for models on it. ``finished`` is called
    with the kind of each request and how it ended: "done", "cancelled" or an error's code.
    """

    models: ModelStore
    own_card: Callable[[], Card]
    draining: Callable[[], bool]
    finished: OutcomeObserver = lambda kind, outcome: None

    async def model_by_digest(self, model: str, digest: str) -> ModelFolder:
        """The folder of a model that this machine shows to others. Raises ModelNotFound."""
        return await model_by_digest(self.models, self.own_card(), model, digest)

    def admit(self) -> None:
        """Raises Draining."""
        if self.draining():
            raise Draining("This machine is stopping and takes no new work.")


@dataclass(slots=True)
class ServedRequest:
    """One request. ``done`` is set once the other machine has its result: it may hang up before the end."""

    done: bool = False


@dataclass
class ConcurrencyLimit:
    """Admits at most ``most`` requests of one kind at once, at most ``most_per_peer`` of one machine.

    ``busy`` is told to the next: "helps with 2 prompts".
    """

    context: ServingContext
    kind: Kind
    most: int
    busy: str
    most_per_peer: int | None = None
    running: int = field(default=0, init=False)
    _peers: Counter[str] = field(default_factory=Counter, init=False)

    @contextmanager
    def serving(self, peer: str, request_id: str) -> Iterator[ServedRequest]:
        """Around the whole request. Raises Draining, Overloaded."""
        self.context.admit()
        if self.running >= self.most:
            raise Overloaded(f"This machine {self.busy} already.")
        if self.most_per_peer is not None and self._peers[peer] >= self.most_per_peer:
            raise Overloaded(f"This machine does {self.most_per_peer} such requests for that one already.")
        self.running += 1
        self._peers[peer] += 1
        request, failure = ServedRequest(), ""
        try:
            yield request
            request.done = True
        except FleetError as error:
            failure = error.code
            raise
        finally:
            self.running -= 1
            self._peers -= Counter([peer])
            outcome = failure or ("done" if request.done else "cancelled")
            self.context.finished(self.kind, outcome)
            log.info("served", kind=self.kind, peer=peer[:7], request=request_id, outcome=outcome)


async def model_by_digest(models: ModelStore, card: Card, model: str, digest: str) -> ModelFolder:
    """The folder that ``card`` shows with this digest; its name here may be another. Raises ModelNotFound."""
    name = next((m.name for m in card.models if m.digest == digest), None)
    if name is None:
        raise ModelNotFound(f"This machine does not have these files of {model} (any more).")
    return await file_threads.look(models.resolve, name)
