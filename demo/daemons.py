"""Machines of the demo: daemons in folders of their own, and fleetctl to talk with them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
MODEL = "smollm2-135m"
READY_S = 30.0
STOP_S = 45.0
ANSWER_S = 300.0
PAIR_S = 60.0
# Unix socket paths are limited to about 100 bytes, and some temporary folders are deep.
LONGEST_TMP = 60
BUSY = "If other programs keep this computer busy, try again later."


def say(text: str = "") -> None:
    print(text, flush=True)


def fail(text: str, log: Path | None = None) -> NoReturn:
    print(f"\ndemo: {text}", file=sys.stderr)
    if log is not None and log.exists():
        print("the daemon's last words:", file=sys.stderr)
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    sys.exit(1)


@contextmanager
def temporary_home() -> Iterator[Path]:
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="fleetd-demo-", dir=base if len(base) <= LONGEST_TMP else "/tmp"))  # noqa: S108
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Machine:
    """One daemon that stands for a machine."""

    name: str
    home: Path
    environ: dict[str, str]

    @property
    def log(self) -> Path:
        return self.home / "demo.log"


@contextmanager
def daemon(machine: Machine) -> Iterator[None]:
    """Start it, and stop it at the end."""
    machine.home.mkdir(mode=0o700)
    command: list[str | Path] = [BIN / "fleetd", "run", "--home", machine.home]
    command += ["--http", "127.0.0.1:0", "--listen", "127.0.0.1:0"]
    with machine.log.open("wb") as out:
        # A session of its own: Ctrl-C on the terminal reaches the demo alone, which then stops it in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=machine.environ,
            start_new_session=True,
        )
    try:
        wait_ready(process, machine.home / "fleetd.sock", machine.log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            fail(f"the daemon ended with exit status {process.returncode}", log)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                time.sleep(0.05)
            else:
                return
    fail(f"the daemon was not ready within {READY_S:.0f} s. {BUSY}", log)


def command_line(machine: Machine, *arguments: str) -> list[str | Path]:
    return [BIN / "fleetctl", "--home", machine.home, *arguments]


def fleetctl(machine: Machine, *arguments: str, limit_s: float, stdin: str = "") -> Any:
    """Run fleetctl with --json. Its progress goes to this terminal; its answer comes back as an object."""
    # What is piped becomes part of a prompt, so there is a pipe only where there is something to say.
    given: dict[str, Any] = {"input": stdin} if stdin else {"stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            command_line(machine, *arguments, "--json"),
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=machine.environ,
            timeout=limit_s,
            check=False,
            **given,
        )
    except subprocess.TimeoutExpired:
        fail(f"`fleetctl {arguments[0]}` took longer than {limit_s:.0f} s. {BUSY}", machine.log)
    if done.returncode:
        fail(f"`fleetctl {arguments[0]}` failed with exit status {done.returncode}", machine.log)
    lines = done.stdout.splitlines()
    # Verbs that take a while tell what happens line by line; the others print one object over many lines.
    return json.loads(lines[-1]) if lines and lines[0].endswith("}") else json.loads(done.stdout)


def pair(inviter: Machine, joiner: Machine) -> None:
    """What two people would do at two terminals."""
    with subprocess.Popen(
        command_line(inviter, "pair", "--yes", "--json"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=inviter.environ,
    ) as window:
        shown = window.stdout.readline() if window.stdout else ""
        if not shown:
            fail(f"{inviter.name} did not open a pairing window", inviter.log)
        code = json.loads(shown)["code"]
        done = subprocess.run(
            command_line(joiner, "join", code, "--yes", "--json"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=joiner.environ,
            timeout=PAIR_S,
            check=False,
        )
        if done.returncode:
            window.terminate()
            fail(f"{joiner.name} could not join {inviter.name}", joiner.log)
        theirs = {event["type"]: event for event in map(json.loads, done.stdout.splitlines())}
        ours = {event["type"]: event for event in map(json.loads, window.stdout or ())}
    if theirs["meeting"]["phrase"] != ours["meeting"]["phrase"]:
        fail("the two machines do not show the same phrase", inviter.log)
    say(f"  {joiner.name} joined {inviter.name} with the code {code}; both show {ours['meeting']['phrase']}")


def wait_usable(machines: Sequence[Machine]) -> None:
    """Every machine can use every other one."""
    deadline = time.monotonic() + PAIR_S
    while time.monotonic() < deadline:
        views = [fleetctl(machine, "peers", limit_s=30)["peers"] for machine in machines]
        if all(sum(peer["state"] == "usable" for peer in view) == len(machines) - 1 for view in views):
            return
        time.sleep(0.1)
    fail("the machines did not all become usable", machines[0].log)
