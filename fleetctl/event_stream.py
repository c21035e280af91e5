"""Server-sent events: bytes in any pieces in, comments and data out. No I/O."""

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
    """An event over the size of a whole request body: this is not the stream it says it is."""


class Decoder:
    """Incremental decoder; ``feed`` yields whatever the bytes complete."""

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
        # event:, id: and retry: carry nothing that fleetctl needs.
