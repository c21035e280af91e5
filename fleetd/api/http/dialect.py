"""What differs between families of HTTP clients: how they read errors and streams.

A route names its dialect (``routes.py``). The middleware, the stream writer and the OpenAPI page ask the
dialect of the matched route, so none of them knows a client's format.

    error       Dialect.error          the object of a body, or of the last frame of a broken stream
    headers     Dialect.headers        on every answer
    stream      Dialect.stream()       a StreamFormat: objects, comments, errors and the end as bytes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from fleetd.errors import Draining, FleetError, OutOfMemory, Overloaded

# Errors that pass by themselves: clients ask again later.
BUSY = (Overloaded, OutOfMemory, Draining)


class StreamFormat(ABC):
    """The bytes of one stream. Every stream has its own object, so a format may number its frames."""

    #: With its charset, as the Content-Type header says it.
    content_type: ClassVar[str]

    @abstractmethod
    def frame(self, item: object) -> bytes:
        """One object of the answer."""

    @abstractmethod
    def error(self, error: FleetError) -> bytes:
        """The last frame of a stream that failed. No end marker follows it."""

    def comment(self, text: str) -> bytes:
        """A line that clients skip, for progress and against time-outs; b"" if the format has none."""
        return b""

    def end(self) -> bytes:
        """What follows the last object of a complete answer; b"" if the last object says that it is last."""
        return b""

    @abstractmethod
    def schema(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """JSON schema of one frame. ``items``: schemas of the objects in frames, the error's included."""


class ServerSentEvents(StreamFormat):
    """Server-sent events.

    Args:
        error: makes the object of an error frame.
        event: the name in a frame's ``event:`` line; "" or None sends no such line.
        end: the data of the end marker; "" sends none.
    """

    content_type = "text/event-stream; charset=utf-8"

    def __init__(
        self,
        error: Callable[[FleetError], object],
        *,
        event: Callable[[object], str] | None = None,
        end: str = "",
    ) -> None:
        self._error = error
        self._event = event
        self._end = end

    def frame(self, item: object) -> bytes:
        name = self._event(item) if self._event is not None else ""
        line = f"event: {name}\n" if name else ""
        # JSON has no raw newline, so one data line holds any object.
        return b"%bdata: %b\n\n" % (line.encode(), msgspec.json.encode(item))

    def error(self, error: FleetError) -> bytes:
        return self.frame(self._error(error))

    def comment(self, text: str) -> bytes:
        return b": %b\n\n" % text.encode()

    def end(self) -> bytes:
        return b"data: %b\n\n" % self._end.encode() if self._end else b""

    def schema(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": list(items)},
        }
        if self._end:
            data = {"anyOf": [{"const": self._end}, data]}
        return {"type": "object", "required": ["data"], "properties": {"data": data}}


def tag_of(item: object) -> str:
    """The tag of a struct, for streams whose events are named after their types; "" for other objects."""
    return str(item.__struct_config__.tag) if isinstance(item, msgspec.Struct) else ""


class Dialect(ABC):
    """One family of clients. Has no state, so one object serves all requests."""

    #: The struct that ``error`` returns.
    error_type: ClassVar[type[msgspec.Struct]]
    #: What every address of these clients begins with, if no other dialect has such addresses.
    addresses: ClassVar[str | None] = None

    @abstractmethod
    def error(self, error: FleetError) -> msgspec.Struct:
        """An error as the object that these clients read."""

    def status(self, error: FleetError) -> int:
        """The HTTP status of an error that comes before any answer."""
        return error.status

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Headers of every answer."""
        return {"X-Request-Id": request_id}

    def asked_by(self, headers: Mapping[str, str]) -> bool:
        """True if only clients of this dialect send such headers: at addresses that several dialects share,
        and where there is nothing, they are answered in it."""
        return False

    @abstractmethod
    def stream(self) -> StreamFormat:
        """A format for one new stream."""
