"""A process with few file descriptors: connections share what is left, and no task ends the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from structlog.testing import capture_logs

from fleetd import limits
from fleetd.process.descriptors import connection_caps, open_limit, raise_limit
from fleetd.process.periodic import keep_running


@pytest.mark.parametrize("descriptors", [64, 128, 256, 1024, limits.DESCRIPTORS])
@pytest.mark.parametrize("sites", [2, 3])
def test_connections_leave_the_reserve_free(descriptors: int, sites: int) -> None:
    caps = connection_caps(descriptors, sites)
    most = sites * caps.http + caps.peers_unknown
    assert most <= max(4 * sites + 4, 3 * (descriptors - limits.DESCRIPTORS_RESERVED) // 4)
    assert 2 <= caps.http_unknown <= caps.http <= limits.HTTP_CONNECTIONS
    assert caps.peers_unknown <= limits.PEER_SOCKETS_UNKNOWN


def test_a_common_limit_needs_no_lower_caps() -> None:
    caps = connection_caps(limits.DESCRIPTORS, 3)
    assert (caps.http, caps.peers_unknown) == (limits.HTTP_CONNECTIONS, limits.PEER_SOCKETS_UNKNOWN)


def test_the_soft_limit_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        raise_limit()
        assert open_limit() == min(before[1], limits.DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


TOLD = """
import resource, sys
from pathlib import Path
from fleetd import app
from fleetd.process import observe
from fleetd.config import Config
from fleetd.storage.paths import HomeFolder
hard = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
observe.configure("info", "json")
app.Daemon.serve = lambda self: app.asyncio.sleep(0)
app.run(Config(), HomeFolder(Path(sys.argv[1])))
"""


def test_a_limit_that_cannot_be_raised_is_told(tmp_path: Path) -> None:
    """256: what a Mac gives a terminal, if it were the hard limit too."""
    command = [sys.executable, "-c", TOLD, str(tmp_path), "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    few = [(line["open_files"], line["connections"]) for line in lines if line["event"] == "descriptors.few"]
    assert few == [(256, connection_caps(256, 2).http)]


# ---- tasks that outlive their errors ---------------------------------------------------------------------


async def test_a_task_that_fails_begins_again_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESTART_S", 0.0)
    monkeypatch.setattr(limits, "RESTART_MOST_S", 0.0)
    tries, goes_on = 0, asyncio.Event()

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError("Too many open files")
        goes_on.set()
        await asyncio.Event().wait()

    with capture_logs() as logs:
        running = asyncio.create_task(keep_running("reader", work))
        await goes_on.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(line["event"], line["task"]) for line in logs] == [("task.restarts", "reader")]


async def test_a_task_that_ends_is_not_begun_again() -> None:
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1

    await keep_running("once", work)
    assert tries == 1


# ---- a whole daemon --------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path, programs: Programs) -> Iterator[LiveDaemon]:
    with LiveDaemon(tmp_path / "home", tmp_path / "models", programs=programs) as begun:
        yield begun


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux changes the limits of a running process")
def test_a_daemon_without_file_descriptors_serves_again_when_it_has_some(daemon: LiveDaemon) -> None:
    """Strangers and idle clients hold all of them until the card's next reading of the memory fails."""
    if sys.platform != "linux":
        return
    pid, status = daemon.process.pid, daemon.status()
    ports = [status["http"]["port"], status["fleet"]["port"]]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + 3, before[1]))
    with contextlib.ExitStack() as crowd:
        for port in ports * 12:
            stranger = crowd.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
        until(lambda: any(line["event"] == "memory.unread" for line in daemon.lines()))
        assert daemon.process.poll() is None
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    until(lambda: answers(daemon))


def answers(daemon: LiveDaemon) -> bool:
    with contextlib.suppress(OSError):
        return bool(daemon.status()["ready"])
    return False
