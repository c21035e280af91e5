"""A client of a daemon that notes when bytes arrive."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.samples import Closing


@dataclass(slots=True)
class Heard:
    """A streamed answer: its text, and when things arrived, in seconds from when the request was sent.

    ``sent`` is on the clock that all requests share. ``began_s``: the first frame of the answer itself,
    after the comments, and there even if its token has no text.
    """

    sent: float
    headers_s: float
    text: str = ""
    text_s: list[float] = field(default_factory=list)
    byte_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def beside_s(self) -> float:
        """The part of the time to the first token in which the engine did not work on the prompt."""
        return self.began_s - float(self.timings["prompt_ms"]) / 1000

    @property
    def rate(self) -> float:
        """Tokens per second from the first to the last."""
        return (self.count - 1) / (self.text_s[-1] - self.text_s[0])

    @property
    def steady_rate(self) -> float:
        """Pieces of text per second by the median gap between two; a single long pause does not show."""
        return 1 / statistics.median(b - a for a, b in itertools.pairwise(self.text_s))

    @property
    def gap_s(self) -> float:
        """The longest silence, from sending the request on."""
        times = [0.0, self.headers_s, *self.byte_s]
        return max(b - a for a, b in itertools.pairwise(times))


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of the stream. ``data`` is None for comments and for the closing marker."""

    at_s: float
    line: str
    data: dict[str, Any] | None

    @property
    def text(self) -> str:
        for choice in (self.data or {}).get("choices") or ():
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                return str(piece)
        return ""


class Stream(Closing):
    """One request on a connection of its own, read line by line."""

    def __init__(
        self, connection: http.client.HTTPConnection, token: str, path: str, body: dict[str, Any]
    ) -> None:
        self._connection = connection
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            self._connection.connect()
            self.sent = time.perf_counter()
            self._connection.request("POST", path, body=json.dumps(body).encode(), headers=headers)
            self._response = self._connection.getresponse()
            self.headers_s = time.perf_counter() - self.sent
            if self._response.status != 200:
                raise RuntimeError(f"{path}: {self._response.status} {self._response.read()[:500]!r}")
            self.id = self._response.getheader("X-Fleet-Request", "")
            #: Where it is computed: "local", or "remote; nodes=NAME".
            self.plan = self._response.getheader("X-Fleet-Plan", "")
        except BaseException:
            self._connection.close()
            raise

    def frames(self) -> Iterator[Frame]:
        """Each line as it arrives."""
        while line := self._response.readline():
            at_s = time.perf_counter() - self.sent
            if line.strip():
                told = line.decode().strip()
                is_data = told.startswith("data: {")
                yield Frame(at_s, told, json.loads(told[6:]) if is_data else None)

    def hear(self, each: Callable[[], None] | None = None) -> Heard:
        """Read to the end; ``each`` is called for every piece of text.

        Raises RuntimeError if the answer is an error or ends too early.
        """
        heard = Heard(self.sent, self.headers_s)
        for frame in self.frames():
            heard.byte_s.append(frame.at_s)
            if frame.text:
                heard.text += frame.text
                heard.text_s.append(frame.at_s)
                if each is not None:
                    each()
            if frame.data is not None:
                heard.began_s = heard.began_s or frame.at_s
                heard.usage = frame.data.get("usage") or heard.usage
                heard.timings = frame.data.get("timings") or heard.timings
                if "error" in frame.data:
                    raise RuntimeError(f"the daemon said: {frame.line}")
        if not heard.usage:
            raise RuntimeError("the stream ended without its usage chunk")
        return heard

    def close(self) -> None:
        """Leave without reading the rest, as a closed browser tab does."""
        self._response.close()
        self._connection.close()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise
