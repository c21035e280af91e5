"""The proxy that plays a bad network passes bytes on, and does what it is told to them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from tcp_proxy import Proxies

pytestmark = pytest.mark.skipif(
    "sys.platform != 'linux'", reason="NO PROXY IS TESTED: only Linux has all of 127/8"
)

SOURCE = "127.1.0.9"


@pytest.fixture
def through() -> Iterator[tuple[Proxies, socket.socket, socket.socket]]:
    """A proxy called "way", and both ends of a connection through it."""
    with socket.create_server(("127.0.0.1", 0)) as server, Proxies() as proxies:
        port = server.getsockname()[1]
        proxies.add("way", ("127.1.0.8", port), ("127.0.0.1", port), SOURCE)
        with socket.create_connection(("127.1.0.8", port), timeout=20) as near:
            far, address = server.accept()
            assert address[0] == SOURCE
            with far:
                far.settimeout(20)
                near.sendall(b"hello")
                assert far.recv(5) == b"hello"
                yield proxies, near, far


def test_a_bit_is_turned(through: tuple[Proxies, socket.socket, socket.socket]) -> None:
    proxies, near, far = through
    proxies.weather["way"].flips = 1
    far.sendall(b"\0")
    assert near.recv(1) == b"\1"
    far.sendall(b"\0")
    assert near.recv(1) == b"\0"


def test_a_cut_reaches_both_ends(through: tuple[Proxies, socket.socket, socket.socket]) -> None:
    proxies, near, far = through
    proxies.cut("way")
    for end in (near, far):
        try:
            assert end.recv(1) == b""
        except ConnectionResetError:
            pass


def test_one_direction_can_end(through: tuple[Proxies, socket.socket, socket.socket]) -> None:
    _, near, far = through
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    far.sendall(b"still")
    assert near.recv(5) == b"still"
