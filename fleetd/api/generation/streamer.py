"""What an endpoint brings to ``generate``: how the events of an answer become objects of its dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from fleetd.engine.protocol import Event
from fleetd.errors import FleetError
from fleetd.requests.job import Planned


class Streamer(ABC):
    """Makes the objects of a stream. ``feed`` raises FleetError for an answer that was cut short."""

    def opening(self) -> Sequence[msgspec.Struct]:
        """The objects before all others. What is known when the headers go out has been fed before."""
        return ()

    @abstractmethod
    def feed(self, index: int, event: Planned | Event) -> Sequence[msgspec.Struct]:
        """The objects that one event of one choice adds."""

    def progress(self) -> Sequence[msgspec.Struct]:
        """Objects that say in a silence that the answer is on its way."""
        return ()

    def closing(self) -> Sequence[msgspec.Struct]:
        """The objects after the last event of all choices."""
        return ()

    def failure(self, error: FleetError) -> object | None:
        """The last object of a stream that failed; None is the dialect's own."""
        return None


class Collector(ABC):
    """Folds events into one whole answer."""

    @abstractmethod
    def feed(self, index: int, event: Planned | Event) -> None: ...

    @abstractmethod
    def whole(self) -> msgspec.Struct:
        """The answer, once every choice has ended."""
