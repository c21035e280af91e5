"""One end of a stream in a process of its own, as an engine worker or a copying process would hold it.

tcp      the same buffers and calls as a sealed stream, without the seal
sealed   fleetd/sealed
tls      uvloop's TLS 1.3 in a protocol of its own, both ends writing and reading as much as they can
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.harness.child import serve
from fleetd import limits
from fleetd.sealed.stream import SealedReceiver, SealedSender

PIECE_BYTES = limits.SEALED_CHUNK_BYTES
_KEY = bytes(range(32))
Plain = Callable[[socket.socket, int], None]


def main() -> None:
    listeners: list[socket.socket] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        kind, count, share = question["kind"], question["streams"], question["bytes"] // question["streams"]
        match question["do"]:
            case "listen":
                for listener in listeners:
                    listener.close()
                listeners[:] = [socket.create_server(("127.0.0.1", 0))]
                return {"port": listeners[0].getsockname()[1]}
            case "receive":
                socks = [listeners[0].accept()[0] for _ in range(count)]
                before = psutil.Process().memory_info().rss
                begun = time.perf_counter()
                _run(_RECEIVE[kind], socks, share)
                took_s = time.perf_counter() - begun
                gained = psutil.Process().memory_info().rss - before
                return {"took_s": took_s, "gained": gained}
            case "send":
                socks = [socket.create_connection(("127.0.0.1", question["port"])) for _ in range(count)]
                _run(_SEND[kind], socks, share)
        return {}

    serve(answer)


def _run(end: Plain, socks: list[socket.socket], share: int) -> None:
    threads = [threading.Thread(target=end, args=(sock, share)) for sock in socks[1:]]
    for thread in threads:
        thread.start()
    end(socks[0], share)
    for thread in threads:
        thread.join()
    for sock in socks:
        sock.close()


def _send_tcp(sock: socket.socket, count: int) -> None:
    data = memoryview(bytearray(PIECE_BYTES))
    for _ in range(count // PIECE_BYTES):
        sock.sendall(data)


def _receive_tcp(sock: socket.socket, count: int) -> None:
    data = memoryview(bytearray(PIECE_BYTES))
    while count:
        count -= sock.recv_into(data[: min(count, PIECE_BYTES)])


def _send_sealed(sock: socket.socket, count: int) -> None:
    sender, data = SealedSender(sock, _KEY, "connector"), memoryview(bytearray(PIECE_BYTES))
    for _ in range(count // PIECE_BYTES):
        sender.send(data)
    sender.finish()


def _receive_sealed(sock: socket.socket, count: int) -> None:
    receiver, data = SealedReceiver(sock, _KEY, "acceptor"), memoryview(bytearray(PIECE_BYTES))
    found = 0
    while received := receiver.receive_into(data):
        found += received
    assert found == count


# ---- TLS -------------------------------------------------------------------------------------------------


class _Sending(asyncio.Protocol):
    def __init__(self, count: int) -> None:
        self._left = count
        self._data = memoryview(bytearray(PIECE_BYTES))
        self._paused = False
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=2 * PIECE_BYTES)
        self._write()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def _write(self) -> None:
        while self._left and not self._paused:
            self._left -= PIECE_BYTES
            self._transport.write(self._data)
        if not self._left:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)


class _Receiving(asyncio.BufferedProtocol):
    def __init__(self, count: int) -> None:
        self._left = count
        self._buffer = bytearray(PIECE_BYTES)
        self.closed = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes

    def connection_lost(self, error: Exception | None) -> None:
        assert self._left == 0
        self.closed.set_result(None)


def _send_tls(sock: socket.socket, count: int) -> None:
    async def run() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        end = _Sending(count)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: end, sock=sock, ssl=context, server_hostname="bench")
        await end.closed

    uvloop.run(run())


def _receive_tls(sock: socket.socket, count: int) -> None:
    async def run() -> None:
        end = _Receiving(count)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: end, sock, ssl=_server_context())
        await end.closed

    uvloop.run(run())


def _server_context() -> ssl.SSLContext:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    long_ago, far_off = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (1970, 2970))
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, long_ago, far_off)
    raw = builder.sign(key, None).public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "both.pem"
        file.write_bytes(raw)
        context.load_cert_chain(file)
    return context


_SEND: dict[str, Plain] = {"tcp": _send_tcp, "sealed": _send_sealed, "tls": _send_tls}
_RECEIVE: dict[str, Plain] = {"tcp": _receive_tcp, "sealed": _receive_sealed, "tls": _receive_tls}


if __name__ == "__main__":
    main()
