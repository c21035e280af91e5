"""A real daemon process over a home that is gone afterwards, and a client that notes when bytes arrive."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from bench.child import ROOT
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.models.model_store import ModelStore
from fleetd.models.pull import process

MODELS = ROOT / ".cache" / "models"
MODEL = MODELS / DEFAULT_MODEL

_START_S = 60.0
_STOP_S = 20.0
# A first request may download the model; a long prompt on a busy machine takes a minute.
_ANSWER_S = 600.0
_CONTROL_S = 10.0
_POLL_S = 0.002


def fetch_model() -> None:
    """Download the default model into ``MODELS``, the first time. Call it before reading ``MODEL``."""
    process.pull(DEFAULT_MODEL, ModelStore(MODELS), lambda progress: None)


class Daemon:
    """``fleetd run`` on loopback. Ready when the constructor returns; ``ready_s`` says after how long.

    Args:
        home: somebody else's to remove; by default a new one that is gone with the daemon.
        enter: what runs a command in another network namespace; the daemon is then asked for answers
            through its Unix socket, which is reached from everywhere.
    """

    def __init__(
        self, *, home: Path | None = None, models: Path = MODELS, enter: Sequence[str] = (), **settings: str
    ) -> None:
        # Short, because a Unix socket's path may have about a hundred bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="fleetd-bench-")) if home is None else None
        self.home = home or self._folder / "h"
        self._log = self.home.with_suffix(".log")
        alone = {"FLEETD_FLEET_LISTEN": "127.0.0.1:0", "FLEETD_FLEET_MDNS": "off"}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLEETD_", "NOTIFY_"))}
        self._socket = self.home / "fleetd.sock"
        self._elsewhere = bool(enter)
        command = [*enter, sys.executable, "-m", "fleetd", "run", "--home", str(self.home)]
        command += ["--http", "127.0.0.1:0", "--models-dir", str(models)]
        #: On the clock that all measurements share.
        self.begun = time.perf_counter()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=clean | alone | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait(self.begun + _START_S)
            self.ready_s = time.perf_counter() - self.begun
            self.port = int(self.status()["http"]["port"])
            self.token = (self.home / "api-token").read_text().strip()
        except BaseException:
            self.close()
            raise

    def control(self, method: str, path: str, question: Any = None) -> bytes:
        """The whole answer to a call on the Unix socket."""
        with contextlib.closing(_OverUnixSocket(self._socket, _CONTROL_S)) as connection:
            body = None if question is None else json.dumps(question)
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            told = response.read()
            if response.status != 200:
                raise RuntimeError(f"{path}: {response.status} {told[:500]!r}")
            return told

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.control("GET", "/fleet/v1/status"))
        return body

    def stream(self, route: Literal["chat/completions", "completions"], **body: Any) -> Stream:
        """Send a streaming, greedy request over TCP; returns when the response's headers are here."""
        usage = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
        connection = (
            _OverUnixSocket(self._socket, _ANSWER_S)
            if self._elsewhere
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        )
        return Stream(connection, self.token, f"/v1/{route}", usage | body)

    def complete(self, tokens: list[int], max_tokens: int) -> Heard:
        """A whole streamed answer to a prompt of token ids."""
        with self.stream("completions", prompt=tokens, max_tokens=max_tokens) as stream:
            return stream.hear()

    def warm(self) -> None:
        """Load the model (and fetch it, the first time) and take the first steps."""
        self.complete([1, 2, 3, 4], 4)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Stop the daemon and with it its workers, and remove everything."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, deadline: float) -> None:
        while time.perf_counter() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.status()["ready"]:
                    return
            time.sleep(_POLL_S)
        raise RuntimeError(f"the daemon did not become ready:\n{self.log()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class Heard:
    """A streamed answer: its text, and when things arrived, in seconds from when the request was sent.

    ``sent`` itself is on the clock that all requests share.
    """

    sent: float
    headers_s: float
    text: str = ""
    text_s: list[float] = field(default_factory=list)
    byte_s: list[float] = field(default_factory=list)
    # The first frame of the answer itself: after the comments, and there even if its token has no text.
    began_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def rate(self) -> float:
        """Tokens per second from the first to the last."""
        return (self.count - 1) / (self.text_s[-1] - self.text_s[0])

    @property
    def steady_rate(self) -> float:
        """Pieces of text per second by the usual gap between two: a moment in which the machine did something
        else does not show."""
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


class Stream:
    """One request on a connection of its own, read line by line. Use as a context manager."""

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

    def leave(self) -> None:
        """Go away without reading the rest, as a closed browser tab does."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class _OverUnixSocket(http.client.HTTPConnection):
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
