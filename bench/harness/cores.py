"""Cores for a machine: what a daemon starts meanwhile runs there, with a share of its time if need be.

Workers inherit their cores and their control group from the process that starts them, so they have both from
their first instruction on, also while they measure their own speed. The daemon itself is let go afterwards:
a machine is its worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from bench.harness.daemon import MODEL
from bench.harness.samples import Closing, wait_for
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.settings import WorkerSettings

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
# Short against a step of prefill, so that a slow machine is slow and does not stand still.
_PERIOD_US = 10_000
_REMOVED_WITHIN_S = 10.0
_WORKER = "fleetd.engine.worker"


@contextlib.contextmanager
def starting_on(cores: Collection[int], share: Share | None = None, pid: int = 0) -> Iterator[None]:
    """While this lasts, what the process starts runs on ``cores``, within ``share``; 0 is this process."""
    pid = pid or os.getpid()
    everywhere = os.sched_getaffinity(pid)
    _pin(pid, cores)
    try:
        with share.holding(pid) if share is not None else contextlib.nullcontext():
            yield
    finally:
        _pin(pid, everywhere)


def workers_of(daemon: int, cores: Collection[int]) -> list[int]:
    """The ids of a daemon's workers, all of whose threads run on ``cores``; RuntimeError otherwise."""
    workers = [child.pid for child in psutil.Process(daemon).children() if _WORKER in _command(child)]
    if any(os.sched_getaffinity(thread) != set(cores) for pid in workers for thread in _threads(pid)):
        raise RuntimeError(f"a worker does not run on cores {sorted(cores)} alone")
    return workers


def worker_of(daemon: int, cores: Collection[int]) -> int:
    """The id of a daemon's only worker, all of whose threads run on ``cores``; RuntimeError otherwise."""
    workers = workers_of(daemon, cores)
    if len(workers) != 1:
        raise RuntimeError(f"{len(workers)} workers where one was expected")
    return workers[0]


def _command(process: psutil.Process) -> str:
    """The command line; "" if the process has ended, as a daemon's short helpers do at any time."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextlib.asynccontextmanager
async def worker_on(core: int | None, model: Path = MODEL, **settings: Any) -> AsyncIterator[EngineProcess]:
    """A worker without a daemon that has loaded ``model``: one thread on one core, or on all cores (None)."""
    fixed = {"threads": 1 if core is not None else 0, "prefix_cache_bytes": 1}
    engine = EngineProcess(WorkerSettings(name=model.name, path=str(model), **fixed | settings))
    with starting_on({core}) if core is not None else contextlib.nullcontext():
        await engine.start()
    try:
        async for _ in engine.loaded():
            pass
        yield engine
    finally:
        await engine.stop()


def loopback() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection, without delay for small messages."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _pin(pid: int, cores: Collection[int]) -> None:
    # Affinity belongs to threads, and each of them may be the one that starts a process.
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def _threads(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def _version_1(quota_us: int) -> dict[str, str]:
    return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us), "cpu.shares": "262144"}


def _version_2(quota_us: int) -> dict[str, str]:
    return {"cpu.max": f"{quota_us} {_PERIOD_US}", "cpu.weight": "10000"}


class Share(Closing):
    """A control group with this share of one core: no more, and with the most weight against other work, so
    that it is no less either. ``close`` it after its processes have ended.

    Raises OSError where control groups cannot be made.
    """

    def __init__(self, share: float) -> None:
        quota = int(share * _PERIOD_US)
        root = next((root for root in _ROOTS if (root / "cgroup.procs").exists()), None)
        if root is None:
            raise FileNotFoundError("no control groups for processor time")
        self._root = root
        self._group = Path(tempfile.mkdtemp(prefix="fleetd-bench-", dir=root))
        version_1 = (self._group / "cpu.cfs_quota_us").exists()
        try:
            for file, value in (_version_1(quota) if version_1 else _version_2(quota)).items():
                (self._group / file).write_text(value)
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
        wait_for(self._removed, _REMOVED_WITHIN_S, 0.05, lambda: f"{self._group} still has processes")

    def _removed(self) -> bool:
        with contextlib.suppress(OSError):
            self._group.rmdir()
        return not self._group.exists()


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
