"""A real daemon in a process of its own, and the ways in which tests look at it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import forked_programs
import found_once
import psutil
from forked_programs import ForkedProgram, Programs

REPO = Path(__file__).parents[2]
START_S = 90.0
STOP_S = 45.0
# For one answer of the control API: the load of a model may come before it.
WAIT_S = 180.0
# Patience, and no promise: what takes moments on an idle machine. `make bench` measures how long it takes.
SOON_S = 60.0
# The longest time between two looks at another process.
_LOOK_S = 0.1
FLEETCTL = [sys.executable, "-c", "import sys; from fleetctl.cli import main; sys.exit(main())"]


def until(condition: Callable[[], Any], limit_s: float = SOON_S) -> float:
    """Wait for a state of another process that it cannot signal; returns the seconds that took."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < limit_s, "it did not happen in time"
        pause(waited)
    return time.monotonic() - began


def pause(waited_s: float) -> None:
    """Before it is looked again, after a wait of so long: a look costs the other process work, too, and fifty
    of them in a second a third of a processor."""
    time.sleep(min(_LOOK_S, 0.01 + waited_s / 10))


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that does nothing, while its sockets stay open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been killed meanwhile
            os.kill(pid, signal.SIGCONT)


class OverUnixSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class LiveDaemon:
    """`fleetd run` on a home of its own. Use as a context manager.

    Args:
        programs: forks the daemon; without it the daemon is started as users do.
        enter: a command that runs another one somewhere else.
    """

    def __init__(
        self,
        home: Path,
        models_dir: Path,
        *,
        programs: Programs | None = None,
        flags: Sequence[str] = (),
        enter: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.home = home
        self.models_dir = models_dir
        self.log = home.parent / f"{home.name}.log"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLEETD_", "NOTIFY_", "WATCHDOG_"))}
        # A developer's own models must not appear in the tests.
        ours = {
            "FLEETD_MODELS_DIR": str(models_dir),
            "FLEETD_MODELS_HUB_CACHE": str(home.parent / "no-hub"),
            "FLEETD_FLEET_LISTEN": "127.0.0.1:0",
            "FLEETD_FLEET_MDNS": "off",
            # Tests change nothing of this machine, and send nothing to its network.
            "FLEETD_POWER_KEEP_AWAKE": "off",
            "FLEETD_POWER_WAKE": "off",
        }
        command = [
            sys.executable,
            "-m",
            "fleetd",
            "run",
            "--home",
            str(home),
            "--http",
            "127.0.0.1:0",
            *flags,
        ]
        self._programs = None if enter or not forked_programs.AVAILABLE else programs
        if self._programs is not None:
            ours[found_once.VARIABLE] = str(self._programs.found)
        self.command, self.env = [*enter, *command], clean | ours | settings
        self.process: subprocess.Popen[bytes] | ForkedProgram
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as out:
            if self._programs is not None:
                self.process = self._programs.popen(self.command, env=self.env, cwd=REPO, log=out.fileno())
            else:
                self.process = subprocess.Popen(
                    self.command,
                    cwd=REPO,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )

    def restart(self, **settings: str) -> None:
        """Stop it, if it runs, and start it again on the same home, with these settings besides."""
        if self.process.poll() is None:
            self.stop()
        self.env |= settings
        self._start()
        self.__enter__()

    def __enter__(self) -> LiveDaemon:
        """Wait until it is ready; raises AssertionError with its log if it ends before."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < START_S and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.status()["ready"]:
                    return self
            pause(waited)
        ended = self.process.poll()
        if ended is None and self._programs is not None:
            self.process.send_signal(forked_programs.SAY_WHERE)
        state = "alive" if ended is None else f"ended with {ended}"
        code = self.stop()
        raise AssertionError(f"not ready: {state}, stopped with {code}\n{self.log.read_text()}")

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after this signal."""
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def kill(self) -> None:
        """As if the machine lost its power: the daemon and what it started are gone at once."""
        if self.process.poll() is None:
            # It may end by itself meanwhile, and its children with it.
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in self.processes():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        self.process.wait()

    # ---- looking at it -------------------------------------------------------------------------------

    def control(self, method: str, path: str, body: Any = None) -> Any:
        """One call on the Unix socket: JSON if it is JSON, else text."""
        connection = OverUnixSocket(self.home / "fleetd.sock")
        with contextlib.closing(connection):
            payload = None if body is None else json.dumps(body)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, payload, headers)
            text = connection.getresponse().read().decode()
        return json.loads(text) if text.startswith("{") else text

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    @contextlib.contextmanager
    def control_events(self, path: str, body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """A call on the Unix socket that is answered with events; leaving the block drops the connection."""
        connection = OverUnixSocket(self.home / "fleetd.sock")
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                assert response.status == 200, response.read()
                yield events(response)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.control("GET", "/fleet/v1/status")
        return found

    @property
    def running(self) -> int:
        return int(self.status()["requests"]["running"])

    @property
    def cancelled(self) -> float:
        """Requests that ended because nobody wanted their answers any more, since start."""
        ended = [
            line
            for line in self.control("GET", "/metrics").splitlines()
            if line.startswith("vllm:request_success_total{") and 'finished_reason="abort"' in line
        ]
        return sum(float(line.rpartition(" ")[2]) for line in ended)

    def cancelled_so_far(self) -> float:
        """``cancelled`` once no request is left: those of clients that have just left are counted by then."""
        until(lambda: not any(self.status()["requests"][state] for state in ("running", "waiting")))
        return self.cancelled

    def trace(self, request_id: str) -> dict[str, Any]:
        """The trace of a request with one answer, once it is written: after the answer, where other machines
        have yet to say what they did."""
        path = f"/fleet/v1/traces?last=9&id={request_id}"
        until(lambda: self.control("GET", path)["traces"])
        (found,) = self.control("GET", path)["traces"]
        return dict(found)

    @property
    def address(self) -> tuple[str, int]:
        http_address = self.status()["http"]
        return http_address["host"], http_address["port"]

    @property
    def base_url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}/v1"

    @property
    def key(self) -> str:
        return (self.home / "api-token").read_text().strip()

    def engine_pid(self, model: str) -> int:
        (pid,) = [engine["pid"] for engine in self.status()["engines"] if engine["model"] == model]
        return int(pid)

    def processes(self) -> list[psutil.Process]:
        """The daemon and all its children."""
        daemon = psutil.Process(self.process.pid)
        return [daemon, *daemon.children(recursive=True)]

    # ---- using it ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, model: str, prompt: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed chat over TCP, as they come; leaving the block drops the connection."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True, **fields}
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            with connection.getresponse() as response:
                assert response.status == 200, response.read()
                yield events(response)

    def fleetctl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        where = ["--home", str(self.home), *arguments]
        if self._programs is not None:
            command = [sys.executable, "-m", "fleetctl", *where]
            typed = None if stdin is None else stdin.encode()
            done = self._programs.run(command, env=os.environ, given=typed, timeout_s=100)
            said = [stream.decode() for stream in (done.stdout, done.stderr)]
            return subprocess.CompletedProcess(done.args, done.returncode, *said)
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [*FLEETCTL, *where],
            capture_output=True,
            text=True,
            cwd=REPO,
            timeout=100,
            check=False,
            **given,
        )


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Data of server-sent events up to `[DONE]` or the end."""
    for line in iter(response.readline, b""):
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                return
            yield json.loads(line.removeprefix(b"data: "))


def text_of(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
