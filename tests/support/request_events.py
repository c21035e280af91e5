"""What one request gave: its events and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from fleetd.engine.protocol import Delta, Finished, Loading, PrefillReport
from fleetd.engine.protocol import Event as EngineEvent
from fleetd.errors import FleetError


class RequestEvents:
    """``error`` is what it failed with, if it did; ``seen`` is told of each event as it comes."""

    def __init__(self, seen: Callable[[Any], None] = lambda event: None) -> None:
        self.events: list[Loading | EngineEvent] = []
        self._seen = seen
        self.error: FleetError | None = None

    async def read(self, events: Any) -> None:
        """Take all that comes, to the end or to an error."""
        try:
            async with aclosing(events):
                async for event in events:
                    self.events.append(event)
                    self._seen(event)
        except FleetError as error:
            self.error = error

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def numbers(self) -> list[Any]:
        """Tokens and log-probabilities of the answer, bit for bit."""
        return [(p.token, p.logprob, p.top) for d in self.of(Delta) for p in d.logprobs or []]

    @property
    def answer(self) -> tuple[str, list[Any]]:
        """Text, tokens and log-probabilities of an answer that ended well."""
        assert isinstance(self.events[-1], Finished), self.error
        return "".join(delta.text for delta in self.of(Delta)), self.numbers

    @property
    def shared(self) -> PrefillReport:
        (found,) = self.of(PrefillReport)
        return found  # type: ignore[no-any-return]

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last
