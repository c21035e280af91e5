"""Several machines in one: network namespaces behind a switch, for tests that cut cables and drop packets.

    with Lab(3) as lab:
        lab.hosts[0].start([sys.executable, "-c", "..."])
        lab.cut(lab.hosts[1])

Needs Linux with user namespaces, or root. Nothing is named and nothing has to be cleaned up: namespaces live
as long as the processes that hold them, and those end with their stdin, even if the tests are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_SWITCH = Path(__file__).with_name("tap_switch.py")
_NETWORK = "10.213.9"
_TOOLS = ("ip", "unshare", "nsenter")
_START_S = 60.0


def why_not() -> str:
    """Why there can be no lab on this machine; "" where there can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    try:
        with Lab(1):
            return ""
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not permitted: {error}"


class LabHost:
    """One machine of a lab. ``address`` is its own on the switch."""

    def __init__(self, number: int, enter: list[str]) -> None:
        self.number = number
        self.address = f"{_NETWORK}.{number + 1}"
        self._enter = enter
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, to be run on this machine."""
        return [*self._enter, *command]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on this machine that is killed with the lab."""
        process = subprocess.Popen(self.command(command), **options)
        self._started.append(process)
        return process

    def run(self, command: Sequence[str]) -> str:
        """Run to its end and return what it printed; raises RuntimeError with its complaint."""
        return _run(self.command(command))

    def link(self, state: str) -> None:
        """``down``: the cable is pulled, and this machine sees it. ``up``: plugged in again."""
        self.run(["ip", "link", "set", "eth0", state])

    def stop(self) -> None:
        for process in self._started:
            _end(process)


class Lab:
    """``count`` machines, each with an ``eth0`` on one switch."""

    def __init__(self, count: int, *, mtu: int = 1500) -> None:
        self._count = count
        self._mtu = mtu
        self._held: list[subprocess.Popen[str]] = []
        self._switch: subprocess.Popen[str] | None = None
        self._cut: set[int] = set()
        self._telling = threading.Lock()
        self.hosts: list[LabHost] = []

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tell(self, **shares: float) -> None:
        """From now on lose, double or delay these shares of all frames, in the words of the switch."""
        self._tell({**shares})

    def cut(self, host: LabHost) -> None:
        """Lose everything from and to a machine, which sees nothing of it: a Wi-Fi out of reach."""
        self._cut.add(host.number)
        self._tell({"cut": sorted(self._cut)})

    def mend(self, host: LabHost) -> None:
        self._cut.discard(host.number)
        self._tell({"cut": sorted(self._cut)})

    def close(self) -> None:
        for host in self.hosts:
            host.stop()
        for process in self._held:
            _end(process)

    # ---- building ----------------------------------------------------------------------------------------

    def _build(self) -> None:
        # As root a network namespace is enough, and its processes stay the root that they are.
        namespaces = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
        switch = self._hold(["unshare", *namespaces, "cat"], echoes=True)
        inside = _enter(switch.pid)
        taps = [f"tap{number}" for number in range(self._count)]
        self._switch = self._hold([*inside, sys.executable, str(_SWITCH), *taps])
        for number, tap in enumerate(taps):
            holder = self._hold([*inside, "unshare", "--net", "cat"], echoes=True)
            host = LabHost(number, _enter(holder.pid))
            self.hosts.append(host)
            _run([*inside, "ip", "link", "set", tap, "netns", str(holder.pid)])
            host.run(["ip", "link", "set", tap, "name", "eth0", "mtu", str(self._mtu)])
            host.run(["ip", "link", "set", "lo", "up"])
            host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
            host.link("up")

    def _hold(self, command: list[str], *, echoes: bool = False) -> subprocess.Popen[str]:
        """A process that ends with its stdin, which is ours. It is where it should be once it says a line."""
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._held.append(process)
        if echoes and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("here\n")
                process.stdin.flush()
        if not _line(process.stdout):
            complaint = process.stderr.read().strip() if process.stderr is not None else ""
            raise RuntimeError(complaint or f"{command[0]} has ended")
        return process

    def _tell(self, command: dict[str, object]) -> None:
        switch = self._switch
        if switch is None or switch.stdin is None:
            raise RuntimeError("the lab is not open")
        # Two threads that read at once would leave one of them waiting for a line that the other has taken.
        with self._telling:
            switch.stdin.write(json.dumps(command) + "\n")
            switch.stdin.flush()
            if _line(switch.stdout) != "done":
                raise RuntimeError("the switch has ended")


def _enter(pid: int) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user"]
    return ["nsenter", "--target", str(pid), *user, "--net", "--"]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[-1]}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _line(stream: IO[str] | None) -> str:
    return stream.readline().strip() if stream is not None else ""
