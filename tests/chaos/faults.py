"""The kinds of faults: each is begun and undone from outside the daemon, or by a hook of the tests in it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import process_hooks
import psutil
from chaos_fleet import NAMES, ChaosFleet, workers
from live_daemon import frozen

HOUR_S = 3600.0
_IDLE = 12
_ZONES = ("Pacific/Kiritimati", "America/St_Johns", "Asia/Kathmandu", "UTC")
_CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


class Harm:
    """One fault under way: the fleet, its own draws, and which machines cannot answer for it."""

    def __init__(self, fleet: ChaosFleet, seed: int, killed: set[str]) -> None:
        self.fleet = fleet
        self.draw = random.Random(seed)
        self.killed = killed
        self.name = self.draw.choice(NAMES)

    @property
    def home(self) -> Path:
        return self.fleet.home(self.name)

    @property
    def pid(self) -> int:
        return self.fleet[self.name].process.pid

    def worker(self, *names: str) -> int | None:
        """A worker's process id, of one of these machines or of any."""
        for name in self.draw.sample(names or NAMES, len(names or NAMES)):
            if found := workers(self.fleet[name]):
                return self.draw.choice(found)
        return None

    def link(self) -> str:
        """One direction of dialling between two machines."""
        one, other = self.draw.sample(NAMES, 2)
        return f"{one}>{other}"


Begin = Callable[[Harm], AbstractContextManager[None]]
KINDS: dict[str, Begin] = {}
#: Kinds that this machine cannot do → why.
UNABLE: dict[str, str] = {}


def kind(name: str) -> Callable[[Callable[[Harm], Iterator[None]]], Callable[[Harm], Iterator[None]]]:
    def register(begin: Callable[[Harm], Iterator[None]]) -> Callable[[Harm], Iterator[None]]:
        KINDS[name] = contextmanager(begin)
        return begin

    return register


def possible(fleet: ChaosFleet) -> list[str]:
    """The kinds that can be tried with this fleet."""
    UNABLE.clear()
    if memory_cgroup() is None:
        UNABLE["memory: cgroup"] = "no memory cgroup can be made here"
    other = "network" if fleet.lab is not None else "switch"
    for name in KINDS:
        if name.startswith(other):
            UNABLE[name] = "needs the other kind of network"
    return [name for name in KINDS if name not in UNABLE]


# ---- Processes -------------------------------------------------------------------------------------------


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@kind("kill: worker")
def kill_worker(harm: Harm) -> Iterator[None]:
    _kill(harm.worker())
    yield


@kind("kill: helper")
def kill_helper(harm: Harm) -> Iterator[None]:
    # Both help each other with the prompts of the small model.
    _kill(harm.worker("beta", "gamma"))
    yield
    _kill(harm.worker("beta", "gamma"))


@kind("kill: daemon")
def kill_daemon(harm: Harm) -> Iterator[None]:
    harm.killed.add(harm.name)
    _kill(harm.pid)
    yield


@kind("kill: machine")
def kill_machine(harm: Harm) -> Iterator[None]:
    harm.killed.add(harm.name)
    harm.fleet[harm.name].kill()
    yield


@contextmanager
def _stopped(*pids: int | None) -> Iterator[None]:
    """Processes that stand still, those of them that there are."""
    with contextlib.ExitStack() as stack:
        for pid in pids:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    stack.enter_context(frozen(pid))
        yield


@kind("stop: worker")
def stop_worker(harm: Harm) -> Iterator[None]:
    with _stopped(harm.worker()):
        yield


@kind("stop: daemon")
def stop_daemon(harm: Harm) -> Iterator[None]:
    with _stopped(harm.pid):
        yield


@kind("clock: suspend")
def suspend(harm: Harm) -> Iterator[None]:
    """All of a machine stands still, and wakes up hours later by its clock."""
    pids = list[int]()
    with contextlib.suppress(psutil.NoSuchProcess):
        pids = [process.pid for process in harm.fleet[harm.name].processes()]
    with _stopped(*pids):
        yield
        process_hooks.tell(harm.home, clock_s=harm.draw.uniform(1, 100) * HOUR_S)


# ---- The network, by proxies -----------------------------------------------------------------------------


def _weather(name: str, **change: float) -> None:
    def begin(harm: Harm) -> Iterator[None]:
        assert harm.fleet.proxies is not None
        found = [harm.fleet.proxies.weather[harm.link()] for _ in range(harm.draw.randint(1, 3))]
        before = {field: getattr(found[0], field) for field in change}
        usual = type(found[0])()
        for weather in found:
            for field, most in change.items():
                value = most if isinstance(most, bool) else type(most)(harm.draw.uniform(0.1, 1.0) * most)
                setattr(weather, field, value)
        try:
            yield
        finally:
            for weather in found:
                for field in before:
                    setattr(weather, field, getattr(usual, field))

    kind(f"network: {name}")(begin)


_weather("delayed", delay_s=0.5)
_weather("slow", bytes_per_s=200_000.0)
_weather("silent", silent=True)
_weather("refused", refuses=True)
_weather("bits flipped", flips=10)


@kind("network: cut")
def cut(harm: Harm) -> Iterator[None]:
    assert harm.fleet.proxies is not None
    harm.fleet.proxies.cut(harm.link())
    yield
    harm.fleet.proxies.cut(harm.link())


@kind("network: half closed")
def half_closed(harm: Harm) -> Iterator[None]:
    assert harm.fleet.proxies is not None
    harm.fleet.proxies.half_close(harm.link())
    yield


# ---- The network, by a switch ----------------------------------------------------------------------------


@kind("switch: partition")
def partition(harm: Harm) -> Iterator[None]:
    assert harm.fleet.lab is not None
    host = harm.fleet.lab.hosts[NAMES.index(harm.name)]
    harm.fleet.lab.cut(host)
    try:
        yield
    finally:
        harm.fleet.lab.mend(host)


@kind("switch: loss")
def loss(harm: Harm) -> Iterator[None]:
    assert harm.fleet.lab is not None
    harm.fleet.lab.tell(loss=harm.draw.uniform(0.01, 0.3))
    try:
        yield
    finally:
        harm.fleet.lab.tell(loss=0.0)


@kind("switch: reordered")
def reordered(harm: Harm) -> Iterator[None]:
    assert harm.fleet.lab is not None
    harm.fleet.lab.tell(late=harm.draw.uniform(0.05, 0.5), late_s=harm.draw.uniform(0.001, 0.2))
    try:
        yield
    finally:
        harm.fleet.lab.tell(late=0.0)


@kind("switch: doubled")
def doubled(harm: Harm) -> Iterator[None]:
    assert harm.fleet.lab is not None
    harm.fleet.lab.tell(doubled=harm.draw.uniform(0.05, 0.8))
    try:
        yield
    finally:
        harm.fleet.lab.tell(doubled=0.0)


@kind("switch: cable")
def cable(harm: Harm) -> Iterator[None]:
    assert harm.fleet.lab is not None
    host = harm.fleet.lab.hosts[NAMES.index(harm.name)]
    host.link("down")
    try:
        yield
    finally:
        host.link("up")


# ---- What a machine is told ------------------------------------------------------------------------------


def _told(name: str, draw: Callable[[random.Random], dict[str, object]]) -> None:
    def begin(harm: Harm) -> Iterator[None]:
        process_hooks.tell(harm.home, **draw(harm.draw))
        try:
            yield
        finally:
            process_hooks.tell(harm.home)

    kind(name)(begin)


_told("clock: forward", lambda draw: {"clock_s": draw.uniform(1, 10_000) * HOUR_S})
_told("clock: back", lambda draw: {"clock_s": -draw.uniform(1, 10_000) * HOUR_S})
_told("clock: zone", lambda draw: {"zone": draw.choice(_ZONES)})
_told("disk: slow", lambda draw: {"disk_s": draw.uniform(0.05, 1.0)})
_told("peer: nonsense", lambda draw: {"nonsense": draw.uniform(0.05, 0.9)})
_told("peer: other blocks", lambda draw: {"other_blocks": draw.uniform(0.5, 1.0)})


# ---- What a machine has ----------------------------------------------------------------------------------


@contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """A resource limit of a process that runs."""
    try:
        before = psutil.Process(pid).rlimit(what)
        psutil.Process(pid).rlimit(what, (min(soft, before[1]) if before[1] >= 0 else soft, before[1]))
    except psutil.NoSuchProcess:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).rlimit(what, before)


@kind("descriptors")
def descriptors(harm: Harm) -> Iterator[None]:
    """The daemon may open none, or few, beside what it has, and others take those.

    Without a descriptor no refusal can be said: the event loop closes a connection as it comes.
    """
    harm.killed.add(harm.name)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            # No fewer than are open: what is open stays.
            room = psutil.Process(harm.pid).num_fds() + harm.draw.randint(0, 8)
            stack.enter_context(limited(harm.pid, resource.RLIMIT_NOFILE, room))
            for _ in range(_IDLE):
                idle = stack.enter_context(socket.socket(socket.AF_UNIX))
                idle.setblocking(False)
                idle.connect(str(harm.home / "fleetd.sock"))
        yield


@kind("disk: full")
def full(harm: Harm) -> Iterator[None]:
    """No file can grow, the log neither; the kernel says that by EFBIG, which stands for a full disk here."""
    with limited(harm.pid, resource.RLIMIT_FSIZE, 0):
        yield


@kind("disk: read-only")
def read_only(harm: Harm) -> Iterator[None]:
    folders = [harm.home, *(path for path in harm.home.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode & 0o777 for path in folders}
    for path in folders:
        path.chmod(modes[path] & 0o555)
    try:
        yield
    finally:
        for path, mode in modes.items():
            if path.exists():
                path.chmod(mode)


@kind("memory: address space")
def address_space(harm: Harm) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if (pid := harm.worker()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                size = psutil.Process(pid).memory_info().vms + harm.draw.randrange(64 << 20)
                stack.enter_context(limited(pid, resource.RLIMIT_AS, size))
        yield


def memory_cgroup() -> Path | None:
    """A folder in which memory cgroups can be made."""
    if sys.platform != "linux":
        return None
    for root in _CGROUPS:
        probe = root / f"fleetd-{os.getpid()}-probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        made = any((probe / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
        probe.rmdir()
        if made:
            return root
    return None


@kind("memory: cgroup")
def cgroup(harm: Harm) -> Iterator[None]:
    """A worker may have little more memory than it has; what is over that ends it."""
    pid, root = harm.worker(), memory_cgroup()
    if pid is None or root is None:
        yield
        return
    inside = root / f"fleetd-{os.getpid()}-{harm.draw.getrandbits(32)}"
    inside.mkdir()
    try:
        (inside / "cgroup.procs").write_text(str(pid))
        limit = inside / "memory.limit_in_bytes"
        limit = limit if limit.exists() else inside / "memory.max"
        # What the process had before is charged to where it came from.
        limit.write_text(str(harm.draw.randrange(1 << 20, 48 << 20)))
    except OSError:  # it has ended meanwhile
        pass
    try:
        yield
    finally:
        for left in (inside / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (root / "cgroup.procs").write_text(left)
        with contextlib.suppress(OSError):
            inside.rmdir()


# ---- The database ----------------------------------------------------------------------------------------


@kind("database: locked")
def locked(harm: Harm) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(harm.home / "fleetd.db", timeout=0.5)) as db:
        with contextlib.suppress(sqlite3.Error):
            db.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):
                db.rollback()


@kind("kept prompts: locked")
def kept_locked(harm: Harm) -> Iterator[None]:
    """The index of the kept blocks, which a machine's daemon and workers share."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(sqlite3.Error):
            path = harm.home / "cache" / "kv" / "index.db"
            db = stack.enter_context(contextlib.closing(sqlite3.connect(path, timeout=0.5)))
            db.execute("BEGIN EXCLUSIVE")
        yield


@kind("kept prompts: index damaged")
def kept_damaged(harm: Harm) -> Iterator[None]:
    _overwrite(harm, harm.home / "cache" / "kv" / f"index.db{harm.draw.choice(('', '', '-wal', '-shm'))}")
    yield


@kind("kept prompts: blocks damaged")
def kept_blocks_damaged(harm: Harm) -> Iterator[None]:
    for path in sorted((harm.home / "cache" / "kv" / "blocks").glob("*")):
        if harm.draw.random() < 0.5:
            _overwrite(harm, path)
    yield


@kind("database: damaged")
def damaged(harm: Harm) -> Iterator[None]:
    _damage(harm)
    yield


@kind("database: damaged at rest")
def damaged_at_rest(harm: Harm) -> Iterator[None]:
    """The daemon finds it when it starts."""
    harm.killed.add(harm.name)
    harm.fleet[harm.name].kill()
    _damage(harm)
    yield


def _damage(harm: Harm) -> None:
    _overwrite(
        harm, harm.home / harm.draw.choice(("fleetd.db", "fleetd.db", "fleetd.db-wal", "fleetd.db-shm"))
    )


def _overwrite(harm: Harm, path: Path) -> None:
    """Random bytes at random places of a file, as far as there is one."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(harm.draw.randint(1, 20)):
            file.seek(harm.draw.randrange(max(1, size - 64)))
            file.write(harm.draw.randbytes(64))
