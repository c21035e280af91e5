"""Slow, silent and huge: sockets and bodies that only want to hold something."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from api_fakes import FakeRunner, Site, post_bytes, read_until, serve, serve_unix, services

from fleetd import limits
from fleetd.engine import protocol as p

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_HEADERS_S", "HTTP_BODY_STALL_S", "HTTP_KEEPALIVE_IDLE_S"):
        monkeypatch.setattr(limits, name, 0.3)


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await site.raw()
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What the server said until it closed."""
    said = b""
    # Patience that ends before the first of the limits that `hurry` shortens.
    async with asyncio.timeout(9.0):
        try:
            said = await reader.read()
        except ConnectionResetError:
            pass
    return said


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)  # the attack itself: a byte at a time


# ---- Slow-loris ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hurry")
async def test_silent_socket_is_closed(site: Site) -> None:
    began_s = time.monotonic()
    async with connected(site) as (reader, _):
        said = await closed(reader)
    assert time.monotonic() - began_s > 0.2
    assert said == b""


@pytest.mark.usefixtures("hurry")
async def test_slow_loris_on_headers_is_closed(site: Site, runner: FakeRunner) -> None:
    began_s = time.monotonic()
    async with connected(site) as (reader, writer):
        attack = asyncio.create_task(trickle(writer, post_bytes(site, CHAT, BODY)))
        await closed(reader)
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
    assert time.monotonic() - began_s > 0.2
    assert runner.jobs == []


@pytest.mark.usefixtures("hurry")
async def test_slow_loris_on_the_headers_of_a_second_request_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_HEADERS_S", 1.0)  # the first one is no attack, and may be slow
    monkeypatch.setattr(limits, "HTTP_KEEPALIVE_IDLE_S", 60.0)
    async with serve(services(FakeRunner())) as site, connected(site) as (reader, writer):
        writer.write(post_bytes(site, CHAT, BODY))
        await read_until(reader, b"timings")
        attack = asyncio.create_task(trickle(writer, post_bytes(site, CHAT, BODY)))
        await closed(reader)
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)


@pytest.mark.parametrize("chunked", [True, False])
async def test_slow_loris_on_the_body_is_refused(
    site: Site, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    """A byte inside every stall deadline does not help: a body also has to average a speed."""
    monkeypatch.setattr(limits, "HTTP_BODY_STALL_S", 0.3)
    async with connected(site) as (reader, writer):
        if chunked:
            head = post_bytes(site, CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            writer.write(head)
            attack = asyncio.create_task(trickle(writer, b"1\r\n{\r\n" * 300))
        else:
            writer.write(post_bytes(site, CHAT, b"", **{"Content-Length": "100000"}))
            attack = asyncio.create_task(trickle(writer, b"{" * 2000))
        said = await read_until(reader, b"request_timeout")
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
    assert said.startswith(b"HTTP/1.1 408")
    assert runner.jobs == []


async def test_body_that_stops_is_refused(
    site: Site, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_BODY_STALL_S", 0.2)
    async with connected(site) as (reader, writer):
        writer.write(post_bytes(site, CHAT, b"{", **{"Content-Length": "100000"}))
        said = await read_until(reader, b"request_timeout")
    assert said.startswith(b"HTTP/1.1 408")
    assert runner.jobs == []


@pytest.mark.usefixtures("hurry")
async def test_idle_keepalive_is_closed_and_a_long_answer_is_not(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_HEADERS_S", 60.0)  # this client is no attack, and may be slow
    go = asyncio.Event()
    runner.script = lambda job: [go, p.Accepted(job.request.id, 1), p.Finished(job.request.id, "stop")]
    async with serve(services(runner)) as site, connected(site) as (reader, writer):
        writer.write(post_bytes(site, CHAT, BODY))
        with pytest.raises(TimeoutError):
            await read_until(reader, b"HTTP/1.1", 1.5)
        go.set()
        assert (await read_until(reader, b"timings")).startswith(b"HTTP/1.1 200")
        await closed(reader)


# ---- Many sockets ----------------------------------------------------------------------------------------


async def test_five_hundred_idle_sockets_do_not_keep_others_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_CONNECTIONS", 64)
    monkeypatch.setattr(limits, "HTTP_TOKEN_S", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    crowd = [await site.raw() for _ in range(500)]
    try:
        async with site.client() as session:
            for _ in range(20):
                async with session.post(
                    CHAT, data=BODY, headers={"Content-Type": "application/json"}
                ) as response:
                    assert response.status == 200
        server = site.runner.server
        assert server is not None
        assert len(server.tracked) <= limits.HTTP_CONNECTIONS_UNAUTHENTICATED + 1  # type: ignore[attr-defined]
    finally:
        for _, writer in crowd:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in crowd), return_exceptions=True)


async def test_who_opens_many_sockets_at_once_may_use_each_of_them(site: Site) -> None:
    """Open WebUI does, one for each piece of a document."""
    many = limits.HTTP_CONNECTIONS_UNAUTHENTICATED + 20
    opened = [await site.raw() for _ in range(many)]
    try:
        for _, writer in opened:
            writer.write(post_bytes(site, CHAT, BODY))
        for reader, _ in opened:
            assert (await read_until(reader, b"timings")).startswith(b"HTTP/1.1 200")
    finally:
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in opened), return_exceptions=True)


async def test_silent_sockets_make_room_before_those_that_wait_for_the_next_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_CONNECTIONS", 3)
    async with connected(site) as (reader, writer):
        writer.write(post_bytes(site, CHAT, BODY))
        await read_until(reader, b"timings")
        crowd = [await site.raw() for _ in range(4)]
        writer.write(post_bytes(site, CHAT, BODY))
        assert (await read_until(reader, b"timings")).startswith(b"HTTP/1.1 200")
        for _, each in crowd:
            each.close()


async def test_a_crowd_that_knows_the_token_is_capped_and_busy_ones_stay(
    site: Site, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_CONNECTIONS", 4)
    go = asyncio.Event()
    runner.script = lambda job: [go, p.Accepted(job.request.id, 1), p.Finished(job.request.id, "stop")]
    busy = [await site.raw() for _ in range(4)]
    for _, writer in busy:
        writer.write(post_bytes(site, CHAT, BODY))
    await runner.wait_for(lambda: runner.running == 4)
    async with connected(site) as (reader, _):
        said = await closed(reader)
        assert said.startswith(b"HTTP/1.1 503")
        assert b"Retry-After" in said
    go.set()
    for reader, _ in busy:
        assert (await read_until(reader, b"timings")).startswith(b"HTTP/1.1 200")
    async with connected(site) as (reader, writer):  # now the oldest idle one makes room
        writer.write(post_bytes(site, CHAT, BODY))
        assert (await read_until(reader, b"timings")).startswith(b"HTTP/1.1 200")
    for _, writer in busy:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in busy), return_exceptions=True)


# ---- Large bodies ----------------------------------------------------------------------------------------


async def test_200_mb_body_is_refused_by_its_length_before_it_is_read(site: Site, runner: FakeRunner) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with connected(site) as (reader, writer):
        writer.write(post_bytes(site, CHAT, b"", **{"Content-Length": str(200 << 20)}))
        said = await read_until(reader, b"payload_too_large")
        assert said.startswith(b"HTTP/1.1 413")
        piece = b"x" * (1 << 20)
        try:
            for _ in range(200):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10  # KiB
    assert runner.jobs == []


@pytest.mark.parametrize("over", [0, 1])
async def test_the_body_limit_is_exact_when_streamed_in_chunks(
    site: Site, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    monkeypatch.setattr(limits, "HTTP_BODY_BYTES", 100_000)
    data = BODY + b" " * (limits.HTTP_BODY_BYTES - len(BODY) + over)

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(data), 10_000):
            yield data[i : i + 10_000]

    async with site.client(headers={**site.auth, "Content-Type": "application/json"}) as session:
        for body in (pieces(), data):
            async with session.post(CHAT, data=body) as response:
                assert response.status == (413 if over else 200)
    assert len(runner.jobs) == (0 if over else 2)


async def test_gzip_bomb_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_BODY_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (64 << 20))
    headers = {**site.auth, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with site.client(headers=headers) as session:
        async with session.post(CHAT, data=bomb) as response:
            assert response.status == 413
            assert response.headers["Connection"] == "close", "what follows must not be sent behind it"
        async with session.post(CHAT, data=gzip.compress(BODY)) as response:
            assert response.status == 200
        async with session.post(CHAT, data=b"not gzip") as response:
            assert response.status == 400


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, br"])
async def test_a_body_in_an_unknown_coding_is_a_415_that_says_which_are_read(
    site: Site, runner: FakeRunner, coding: str
) -> None:
    headers = {**site.auth, "Content-Type": "application/json", "Content-Encoding": coding}
    async with site.client(headers=headers) as session, session.post(CHAT, data=BODY) as response:
        assert response.status == 415
        error = (await response.json())["error"]
    assert error["code"] == "unsupported_media_type"
    assert "Content-Encoding: gzip or deflate" in error["message"]
    assert runner.jobs == []


async def test_unauthenticated_body_is_not_even_asked_for(site: Site, runner: FakeRunner) -> None:
    """A client that waits for 100 Continue gets the refusal instead."""
    async with connected(site) as (reader, writer):
        expect = {"Expect": "100-continue", "Content-Length": str(len(BODY))}
        writer.write(post_bytes(site, CHAT, b"", **expect, Authorization="Bearer wrong"))
        said = await read_until(reader, b"invalid_api_key")
        assert said.startswith(b"HTTP/1.1 401")
        assert b"100 Continue" not in said
    async with connected(site) as (reader, writer):
        writer.write(post_bytes(site, CHAT, b"", **expect))
        assert (await read_until(reader, b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(BODY)
        assert b"200 OK" in await read_until(reader, b"timings")
    assert len(runner.jobs) == 1


# ---- What is not HTTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [b"GET /canary" + b"x" * 20_000, b"GET / HTTP/1.1\r\nX-Big: " + b"x" * 9000])
async def test_a_head_that_is_too_large_is_told_the_limit(site: Site, head: bytes) -> None:
    async with connected(site) as (reader, writer):
        writer.write(head + b"\r\n\r\n")
        said = await closed(reader)
    assert said.startswith(b"HTTP/1.0 431")
    assert b"over the limit of 8190 bytes" in said
    assert b"canary" not in said


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"canary-secret\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_are_answered_shortly_and_not_logged(
    site: Site, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    async with connected(site) as (reader, writer):
        writer.write(data + b"\r\n\r\n")
        said = await closed(reader)
    assert said.startswith(b"HTTP/1.0 400")
    assert b"Server: fleetd\r\n" in said
    assert b"canary" not in said
    assert "canary" not in caplog.text


@pytest.mark.usefixtures("hurry")
async def test_the_unix_socket_has_the_same_deadlines(runner: FakeRunner, tmp_path: object) -> None:
    async with serve_unix(services(runner), tmp_path / "s") as site:  # type: ignore[operator]
        reader, writer = await asyncio.open_unix_connection(str(site.socket_path))
        await closed(reader)
        writer.close()
        await writer.wait_closed()
