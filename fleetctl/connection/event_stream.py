"""An incremental decoder of server-sent events. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetd import limits


@dataclass(frozen=True, slots=True)
class Comment:
    """A line that starts with a colon: progress and keepalives."""

    text: str


@dataclass(frozen=True, slots=True)
class Data:
    """The data of one event, its lines joined."""

    text: str


class EventTooLong(ValueError):
    """An event is larger than a request body may be, so the stream is not what it claims to be."""


class Decoder:
    """Decodes bytes in pieces of any size; ``feed`` yields each comment and event that they complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[Comment | Data]:
        self._buffer += piece
        while (end := self._buffer.find(b"\n")) >= 0:
            # Lines are cut as bytes, so a code point split between two pieces is never decoded in half.
            line = bytes(self._buffer[:end]).rstrip(b"\r").decode("utf-8", "replace")
            del self._buffer[: end + 1]
            yield from self._line(line)
        if len(self._buffer) > limits.HTTP_BODY_BYTES:
            raise EventTooLong(f"an event of more than {limits.HTTP_BODY_BYTES} bytes")

    def _line(self, line: str) -> Iterator[Comment | Data]:
        if not line:
            if self._data:
                yield Data("\n".join(self._data))
                self._data = []
        elif line.startswith(":"):
            yield Comment(line[1:].strip())
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        # fleetctl needs nothing of event:, id: and retry:.
