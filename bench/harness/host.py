"""The machine and the versions that a figure belongs to, as people write them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import psutil

from fleetd.limits import GIB

_ROOT = Path(__file__).parents[2]
_LOOP = 2_000_000
_PACKAGES = ("mlx", "mlx-cuda-13", "mlx-lm", "mkl", "onnxruntime", "xllamacpp")


def describe() -> list[str]:
    """Processor, memory, system, versions, commit: one phrase each."""
    return [
        _processor(),
        *_cards(),
        f"{psutil.virtual_memory().total / GIB:.0f} GB memory",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name))),
        _commit(),
    ]


def load() -> float:
    """The one-minute load average."""
    return os.getloadavg()[0]


def loop_s() -> float:
    """Seconds of a loop that is always the same, the best of five: on a processor that others share it tells
    how fast the machine was just then, which no load average does."""
    return min(_loop() for _ in range(5))


def _loop() -> float:
    begun, total = time.perf_counter(), 0
    for number in range(_LOOP):
        total += number
    return time.perf_counter() - begun


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        info = ""
    lines = (line.partition(":") for line in info.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name = fields.get("model name") or platform.processor() or platform.machine()
    # A hypervisor's guest does not know who else computes on its cores.
    shared = "shared virtual cores" if "hypervisor" in fields.get("flags", "").split() else "cores"
    return f"{name}, {os.cpu_count()} {shared}"


def _cards() -> list[str]:
    """NVIDIA's cards with their driver."""
    told = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return [line.replace(", ", ", driver ") for line in told.splitlines()]


def _said(*command: str) -> str:
    """What a program prints; "" if it fails, or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*args: str) -> str:
        return _said("git", "-C", str(_ROOT), *args)

    # A copy of the tree without its history is told which one it is.
    commit = git("rev-parse", "--short", "HEAD") or os.environ.get("BENCH_COMMIT", "unknown")
    changed = " with local changes" if git("status", "--porcelain", "--", "fleetd", "fleetctl") else ""
    return f"commit {commit}{changed}"
