"""sd_notify, and who is at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetd.process.notify import Notifier
from fleetd.process.peercred import peer_uid


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(60)
        yield sock


def test_ready_and_stopping_reach_the_manager(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.ready("serving")
    assert manager.recv(1024) == b"READY=1\nSTATUS=serving"
    notifier.stopping("finishing")
    assert manager.recv(1024) == b"STOPPING=1\nSTATUS=finishing"


@pytest.mark.skipif(sys.platform != "linux", reason="the abstract namespace is Linux's")
def test_an_abstract_socket_is_reached() -> None:
    name = f"fleetd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(60)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).send("READY=1")
        assert sock.recv(64) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    Notifier({"NOTIFY_SOCKET": address}).ready("x")


async def test_the_watchdog_is_pinged_at_half_its_time(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "100000"})
    assert notifier.ping_every_s == pytest.approx(0.05)
    task = asyncio.create_task(notifier.watchdog())
    for _ in range(3):
        assert await asyncio.to_thread(manager.recv, 64) == b"WATCHDOG=1"
    task.cancel()
    await asyncio.wait([task])


def pinged(manager: socket.socket) -> int:
    """How often since this was last asked."""
    pings = 0
    with contextlib.suppress(BlockingIOError):
        while manager.recv(64):
            pings += 1
    return pings


async def test_a_stalled_loop_stops_pinging(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"})
    task = asyncio.create_task(notifier.watchdog())
    await asyncio.to_thread(manager.recv, 64)
    manager.setblocking(False)
    pinged(manager)
    time.sleep(0.1)  # noqa: ASYNC251  (the stall under test)
    assert pinged(manager) == 0  # a pinging thread would have sent ten
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}]
)
async def test_no_watchdog_no_pings(manager: socket.socket, environ: dict[str, str]) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), **environ})
    assert notifier.ping_every_s is None
    await asyncio.wait_for(notifier.watchdog(), 10)


async def test_the_kernel_tells_the_peers_user(tmp_path: Path) -> None:
    seen: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(peer_uid(writer.transport))
        writer.close()

    server = await asyncio.start_unix_server(accept, tmp_path / "s")
    async with server:
        _, writer = await asyncio.open_unix_connection(tmp_path / "s")
        assert await asyncio.wait_for(seen, 60) == os.geteuid()
        writer.close()
        await writer.wait_closed()


async def test_tcp_peers_have_no_user() -> None:
    seen: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(peer_uid(writer.transport))
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await asyncio.wait_for(seen, 60) is None
        writer.close()
        await writer.wait_closed()
    assert peer_uid(None) is None
