"""A real daemon process over a home that is gone afterwards."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bench.harness.child import ROOT
from bench.harness.client import Heard, Stream, UnixConnection
from bench.harness.samples import Closing
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.models.model_store import ModelStore
from fleetd.models.pull import process

MODELS = ROOT / ".cache" / "models"
MODEL = MODELS / DEFAULT_MODEL
# The same with a head that ``eval.fit_head`` fitted to it; not there before that.
FITTED = ROOT / ".cache" / "fit-head" / DEFAULT_MODEL

# Settings of another daemon; and what would make Python compile all of fleetd at every start, which no
# installed program does.
_NOT_INHERITED = ("FLEETD_", "NOTIFY_", "PYTHONDONTWRITEBYTECODE")
_START_S = 60.0
_STOP_S = 20.0
# A first request may download the model; a long prompt on a busy machine takes a minute.
_ANSWER_S = 600.0
_CONTROL_S = 10.0
_POLL_S = 0.002


def fetch_model() -> None:
    """Download the default model into ``MODELS``, the first time. Call it before reading ``MODEL``."""
    process.pull(DEFAULT_MODEL, ModelStore(MODELS), lambda progress: None)


class Daemon(Closing):
    """``fleetd run`` on loopback. Ready when the constructor returns; ``ready_s`` says after how long.

    Args:
        home: a folder that the caller removes; by default a new one that is gone with the daemon.
        enter: what runs a command in another network namespace; the daemon is then asked for answers
            through its Unix socket, which is reached from everywhere.
        tree: the sources that it runs from.
        module: what is run in place of ``fleetd``.
    """

    def __init__(
        self,
        *,
        home: Path | None = None,
        models: Path = MODELS,
        tree: Path | str = ROOT,
        enter: Sequence[str] = (),
        module: str = "fleetd",
        **settings: str,
    ) -> None:
        # Short, because a Unix socket's path may have about a hundred bytes.
        self._folder = None if home else Path(tempfile.mkdtemp(prefix="fleetd-bench-"))
        self.home = home or Path(str(self._folder)) / "h"
        self._log = self.home.with_suffix(".log")
        alone = {"FLEETD_FLEET_LISTEN": "127.0.0.1:0", "FLEETD_FLEET_MDNS": "off", "PYTHONPATH": str(tree)}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        self._socket = self.home / "fleetd.sock"
        self._elsewhere = bool(enter)
        command = [*enter, sys.executable, "-m", module, "run", "--home", str(self.home)]
        command += ["--http", "127.0.0.1:0", "--models-dir", str(models)]
        #: On the clock that all measurements share.
        self.begun = time.perf_counter()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=tree,
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
        with contextlib.closing(UnixConnection(self._socket, _CONTROL_S)) as connection:
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

    def peers(self) -> list[dict[str, Any]]:
        """What this daemon knows about the other machines."""
        found: list[dict[str, Any]] = json.loads(self.control("GET", "/fleet/v1/peers"))["peers"]
        return found

    def stream(self, route: Literal["chat/completions", "completions"], **body: Any) -> Stream:
        """Send a streaming, greedy request; returns when the response's headers are here."""
        usage = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
        connection = (
            UnixConnection(self._socket, _ANSWER_S)
            if self._elsewhere
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        )
        return Stream(connection, self.token, f"/v1/{route}", usage | body)

    def complete(self, tokens: list[int], max_tokens: int, **body: Any) -> Heard:
        """A whole streamed answer to a prompt of token ids."""
        with self.stream("completions", prompt=tokens, max_tokens=max_tokens, **body) as stream:
            return stream.hear()

    def chat(self, messages: list[dict[str, str]], max_tokens: int, **body: Any) -> Heard:
        """A whole streamed answer to a chat."""
        with self.stream("chat/completions", messages=messages, max_tokens=max_tokens, **body) as stream:
            return stream.hear()

    def warm(self, model: str = DEFAULT_MODEL) -> None:
        """Load the model (and fetch it, the first time) on this machine and take the first steps."""
        self.complete([1, 2, 3, 4], 4, model=model, local_only=True)

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
