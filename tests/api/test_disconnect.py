"""A client that goes away gives its slot back, whatever the request was doing."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterable

import pytest
from api_fakes import FakeRunner, Site, Step, post_bytes, read_until

from fleetd import limits
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the client is gone has to be noticed by itself, not because something could not be sent to it."""
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 100.0)
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.03)


def request(site: Site, *, stream: bool, n: int = 1) -> bytes:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, "n": n}
    return post_bytes(site, CHAT, json.dumps(body).encode())


def waiting_in_queue(job: Job) -> Iterable[Step]:
    yield asyncio.Event()


def waiting_in_prefill(job: Job) -> Iterable[Step]:
    yield p.Accepted(job.request.id, 100)
    yield p.Prefill(job.request.id, 10, 100)
    yield asyncio.Event()


def decoding(job: Job) -> Iterable[Step]:
    yield p.Accepted(job.request.id, 100)
    yield p.Delta(job.request.id, "some")
    yield asyncio.Event()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a killed process's socket with unread data does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


@pytest.mark.parametrize("leave", [reset, close, half_close])
@pytest.mark.parametrize("script", [waiting_in_queue, waiting_in_prefill, decoding])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_frees_the_slot(
    site: Site, runner: FakeRunner, stream: bool, script: object, leave: object
) -> None:
    runner.script = script  # type: ignore[assignment]
    reader, writer = await site.raw()
    writer.write(request(site, stream=stream))
    await runner.wait_for(lambda: runner.running == 1)
    if stream:
        await read_until(reader, b"\n\n")
    leave(writer)  # type: ignore[operator]
    await runner.wait_for(lambda: runner.running == 0)
    assert len(runner.cancelled) == 1
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_leaving_frees_the_slots_of_all_choices(site: Site, runner: FakeRunner) -> None:
    runner.script = decoding
    reader, writer = await site.raw()
    writer.write(request(site, stream=True, n=5))
    await runner.wait_for(lambda: runner.running == 5)
    await read_until(reader, b"some")
    writer.close()
    await runner.wait_for(lambda: runner.running == 0)
    assert len(runner.cancelled) == 5
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def flood(job: Job) -> Iterable[Step]:
    yield p.Accepted(job.request.id, 1)
    while True:
        yield p.Delta(job.request.id, "x" * 65536)


async def test_a_reader_that_reads_nothing_holds_the_engine_back_and_is_dropped(
    site: Site, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_WRITE_STALL_S", 0.3)
    made = 0

    def script(job: Job) -> Iterable[Step]:
        nonlocal made
        for step in flood(job):
            made += 1
            yield step

    runner.script = script
    sock = socket.create_connection((site.host, site.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, request(site, stream=True))
    await runner.wait_for(lambda: runner.running == 1)
    await runner.wait_for(lambda: runner.running == 0)
    sock.close()
    # Kernel buffers of loopback hold a few megabytes; nothing near this many chunks fits anywhere else.
    assert made < 500


async def test_a_half_closed_reader_that_reads_nothing_is_dropped_at_once(
    site: Site, runner: FakeRunner
) -> None:
    runner.script = flood
    sock = socket.create_connection((site.host, site.port))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, request(site, stream=True))
    await runner.wait_for(lambda: runner.running == 1)
    sock.shutdown(socket.SHUT_WR)
    await runner.wait_for(lambda: runner.running == 0)
    sock.close()


async def test_stopping_the_server_ends_streams(site: Site, runner: FakeRunner) -> None:
    runner.script = decoding
    _, writer = await site.raw()
    writer.write(request(site, stream=True))
    await runner.wait_for(lambda: runner.running == 1)
    server = site.runner.server
    assert server is not None
    await server.shutdown(0.1)
    await runner.wait_for(lambda: runner.running == 0)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
