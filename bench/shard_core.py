"""One core for a machine: what a daemon starts meanwhile runs there, with a share of its time if need be.

Workers inherit their core and their control group from the daemon that starts them, so they have both from
their first instruction on, also while they measure their own speed. The daemon itself is let go afterwards:
a machine is its worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
# Short against a step of prefill, so that a slow machine is slow and does not stand still.
_PERIOD_US = 10_000
_REMOVED_WITHIN_S = 10.0
_WORKER = "fleetd.engine.worker"


@contextlib.contextmanager
def starting_on(core: int, share: Share | None, pid: int) -> Iterator[None]:
    """While this lasts, what the process starts runs on ``core``, within ``share``."""
    everywhere = os.sched_getaffinity(pid)
    _pin(pid, {core})
    try:
        with share.holding(pid) if share is not None else contextlib.nullcontext():
            yield
    finally:
        _pin(pid, everywhere)


def worker_of(daemon: int, core: int) -> int:
    """The id of a daemon's only worker, all of whose threads run on ``core``; RuntimeError otherwise."""
    workers = [
        child.pid for child in psutil.Process(daemon).children() if _WORKER in " ".join(child.cmdline())
    ]
    if len(workers) != 1:
        raise RuntimeError(f"{len(workers)} workers where one was expected")
    if any(os.sched_getaffinity(thread) != {core} for thread in _threads(workers[0])):
        raise RuntimeError(f"the worker does not run on core {core} alone")
    return workers[0]


def _pin(pid: int, cores: set[int]) -> None:
    # Affinity belongs to threads, and each of them may be the one that starts a process.
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def _threads(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


class Share:
    """A control group with this share of one core; ``close`` it after its processes have ended.

    Raises OSError where control groups cannot be made.
    """

    def __init__(self, share: float) -> None:
        quota = int(share * _PERIOD_US)
        root = next((root for root in _ROOTS if (root / "cgroup.procs").exists()), None)
        if root is None:
            raise FileNotFoundError("no control groups for processor time")
        self._root = root
        self._group = Path(tempfile.mkdtemp(prefix="fleetd-bench-", dir=root))
        try:
            if (self._group / "cpu.cfs_quota_us").exists():
                (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (self._group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        except OSError:
            self._group.rmdir()
            raise

    @contextlib.contextmanager
    def holding(self, pid: int) -> Iterator[None]:
        """While this lasts, the process is in the group; what it starts stays there."""
        back = self._root / _group_of(pid, self._root) / "cgroup.procs"
        (self._group / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            back.write_text(str(pid))

    def close(self) -> None:
        """Its processes must have been told to end; they may still be at it."""
        deadline = time.monotonic() + _REMOVED_WITHIN_S
        while self._group.exists():
            try:
                self._group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _group_of(pid: int, root: Path) -> str:
    """The group of a process, relative to the root of its hierarchy."""
    wanted = "cpu" if root.name == "cpu" else ""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if wanted in controllers.split(","):
            return path.lstrip("/")
    raise FileNotFoundError(f"process {pid} is in no group of {root}")


@cache
def why_no_cores() -> str:
    """Why two machines cannot have a core each here; "" where they can."""
    if sys.platform != "linux":
        return "processes are tied to cores on Linux only"
    if len(os.sched_getaffinity(0)) < 2:
        return "there is only one core"
    return ""


@cache
def why_no_share() -> str:
    """Why a core's time cannot be shared out here; "" where it can."""
    try:
        Share(0.5).close()
    except OSError as error:
        return f"control groups: {error}"
    return ""
