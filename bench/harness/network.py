"""A network of two machines with a given speed and delay: two network namespaces and a cable between them.

    with Cable(Link("100 Mbit/s", bits_per_s=100e6)) as cable:
        subprocess.run([*cable.ends[0].enter, "ip", "address"])

The cable is the only way from one to the other, so what TCP gets through it is what the link has. Rates are
the kernel's own token buckets at both ends; a delay is ``wire.py``. Nothing is named and nothing has to
be cleaned up: the namespaces live as long as the processes that hold them, and those end with their stdin.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness.samples import Closing

_WIRE = Path(__file__).with_name("wire.py")
_NETWORK = "10.213.10"
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_WITHIN_S = 10.0
_DEVICE = "eth0"
# As large as a TAP device allows: the wire copies every frame.
_LONG_MTU = 65000
# A token bucket's depth: as little as a timer tick of the fastest rate needs, or short bursts are too fast.
_BURST_S, _BURST_BYTES = 0.0005, 16384
# What waits before a link, as in a switch's buffer; more is lost.
_QUEUE = "50ms"


@dataclass(frozen=True, slots=True)
class Link:
    """``bits_per_s`` 0: as fast as it goes. ``rtt_s``: what the cable adds to a round trip."""

    title: str
    bits_per_s: float = 0.0
    rtt_s: float = 0.0

    @property
    def shaped(self) -> bool:
        return bool(self.bits_per_s or self.rtt_s)


@dataclass(frozen=True, slots=True)
class End:
    """Where a machine of a cable is. ``enter``: what runs a command there."""

    enter: Sequence[str]
    address: str


class Cable(Closing):
    """Two ends. Raises RuntimeError where this system cannot have it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._held: list[subprocess.Popen[str]] = []
        self.ends: list[End] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._held:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self._held.clear()

    def _build(self) -> None:
        # As root a network namespace is enough, and its processes stay the root that they are.
        user = [] if os.geteuid() == 0 else ["--user"]
        first = self._hold(["unshare", *user, *(["--map-root-user"] if user else []), "--net", "cat"])
        inside = ["nsenter", "--target", str(first), *user, "--net", "--"]
        second = self._hold([*inside, "unshare", "--net", "cat"])
        beyond = ["nsenter", "--target", str(second), *user, "--net", "--"]
        if self._link.rtt_s:
            delay = str(self._link.rtt_s / 2)
            self._hold([*inside, sys.executable, str(_WIRE), delay, _DEVICE, "far"], speaks=True)
        else:
            _run([*inside, "ip", "link", "add", _DEVICE, "type", "veth", "peer", "name", "far"])
        _run([*inside, "ip", "link", "set", "far", "netns", str(second)])
        _run([*beyond, "ip", "link", "set", "far", "name", _DEVICE])
        for number, enter in enumerate((inside, beyond), start=1):
            end = End(enter, f"{_NETWORK}.{number}")
            self.ends.append(end)
            self._plug_in(end)

    def _plug_in(self, end: End) -> None:
        if self._link.rtt_s:
            _run([*end.enter, "ip", "link", "set", _DEVICE, "mtu", str(_LONG_MTU)])
        _run([*end.enter, "ip", "link", "set", "lo", "up"])
        _run([*end.enter, "ip", "address", "add", f"{end.address}/24", "dev", _DEVICE])
        _run([*end.enter, "ip", "link", "set", _DEVICE, "up"])
        if rate := self._link.bits_per_s:
            burst = max(_BURST_BYTES, int(rate / 8 * _BURST_S))
            bucket = ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", _QUEUE]
            _run([*end.enter, "tc", "qdisc", "add", "dev", _DEVICE, "root", *bucket])

    def _hold(self, command: list[str], *, speaks: bool = False) -> int:
        """The id of a process that ends with its stdin; it is where it should be once it says a line."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._held.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not speaks:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("here\n")
                process.stdin.flush()
        if not process.stdout.readline().strip():
            raise RuntimeError(process.stderr.read().strip() or f"{command[0]} has ended")
        return process.pid


@cache
def why_not(link: Link) -> str:
    """Why this system cannot have such a link; "" where it can."""
    if not link.shaped:
        return ""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    try:
        with Cable(link):
            return ""
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not permitted: {error}"


def passed_bytes(pid: int) -> int:
    """What has crossed the cable, both ways, at the end where this process is."""
    for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _DEVICE:
            fields = counts.split()
            return int(fields[0]) + int(fields[8])
    raise RuntimeError(f"process {pid} has no {_DEVICE}")


def _run(command: list[str]) -> None:
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        command, capture_output=True, text=True, timeout=_WITHIN_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
