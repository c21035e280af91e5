"""Sockets that change their process: they work there, nothing leaks, nonsense is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetd import limits
from fleetd.errors import ProtocolError
from fleetd.sealed import handoff

CHILD = """
import socket, sys
from fleetd.sealed import handoff
channel = socket.socket(fileno=int(sys.argv[1]))
channel.settimeout(60)
while True:
    try:
        body, sock = handoff.receive(channel)
    except EOFError:
        break
    sock.sendall(b"got " + body)
    sock.close()
"""


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    for end in (here, there):
        end.settimeout(60)
    with here, there:
        yield here, there


def descriptors() -> set[str]:
    """Only descriptors that outlive the listing itself."""
    listed = os.listdir("/dev/fd")
    return {name for name in listed if Path(f"/dev/fd/{name}").exists()}


@pytest.fixture
def no_leak(channel: object) -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() <= before  # what an earlier test left may go


@pytest.fixture
def spare() -> Iterator[socket.socket]:
    one, other = socket.socketpair()
    with one, other:
        yield one


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@contextlib.contextmanager
def sending(channel: socket.socket, body: bytes, sock: socket.socket) -> Iterator[Future[None]]:
    """Send in a thread, because it waits until the socket was taken; on the way out it has been sent."""
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(handoff.send, channel, body, sock)
        yield sent
        sent.result(60)


class TappedSocket(socket.socket):
    """A socket that tells when somebody waits for what comes on it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.settimeout(60)
        self.awaited = threading.Event()

    def recv(self, *arguments: int) -> bytes:
        self.awaited.set()
        return super().recv(*arguments)


def test_the_sender_keeps_its_copy_until_the_other_process_has_one(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    """Even if an acknowledgement comes late that an earlier message was given up for."""
    there = channel[1]
    with TappedSocket(channel[0]) as here:
        here.settimeout(0)
        with pytest.raises(BlockingIOError):
            handoff.send(here, b"given up", spare)
        here.settimeout(60)
        here.awaited.clear()
        with sending(here, b"kept", spare) as sent:
            assert here.awaited.wait(60)
            late, given_up = handoff.receive(there)
            assert (late, sent.done()) == (b"given up", False)
            body, sock = handoff.receive(there)
            assert body == b"kept"
        for got in (given_up, sock):
            assert got is not None
            got.close()


def test_a_process_that_ends_before_it_took_the_socket_is_an_error(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    here, there = channel
    there.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="ended before"):
        handoff.send(here, b"", spare)


def test_another_process_speaks_on_the_sockets_it_is_given(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    here, there = channel
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(there.fileno())], pass_fds=[there.fileno()])
    there.close()
    for number in range(3):
        near, far = tcp_pair()
        near.settimeout(60)
        # As an event loop would have it.
        far.setblocking(False)
        with near, far:
            handoff.send(here, b"number %d" % number, far)
            far.close()
            answer = b""
            while piece := near.recv(100):
                answer += piece
        # The end of the stream shows that no copy of the socket is open here or there.
        assert answer == b"got number %d" % number
    here.close()
    assert child.wait(60) == 0


@pytest.mark.usefixtures("no_leak")
def test_messages_with_and_without_sockets_keep_their_order(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    here, there = channel
    handoff.send(here, b"first")
    with sending(here, b"second", spare):
        found = [handoff.receive(there) for _ in range(2)]
    handoff.send(here, b"")
    with sending(here, b"fourth", spare):
        found += [handoff.receive(there) for _ in range(2)]
    assert [body for body, _ in found] == [b"first", b"second", b"", b"fourth"]
    assert [sock is not None for _, sock in found] == [False, True, False, True]
    for _, sock in found:
        if sock is not None:
            assert os.path.sameopenfile(sock.fileno(), spare.fileno())
            assert not sock.get_inheritable()
            sock.close()


@pytest.mark.usefixtures("no_leak")
def test_a_message_is_read_byte_by_byte_as_well(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    here, there = channel
    socket.send_fds(here, [b"\0"], [spare.fileno()])
    for byte in b"\0\0\3\7abc":
        here.sendall(bytes([byte]))
    body, sock = handoff.receive(there)
    assert body == b"abc"
    assert here.recv(1) == b"\7"
    assert sock is not None
    sock.close()


def test_the_longest_message_passes_and_a_longer_one_is_not_sent(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    here, there = channel
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(there.fileno())],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
    )
    near, far = tcp_pair()
    near.settimeout(60)
    with near, far:
        handoff.send(here, b"x" * limits.HANDOFF_BYTES, far)
        far.close()
        count = 0
        while piece := near.recv(1 << 20):
            count += len(piece)
    assert count == len(b"got ") + limits.HANDOFF_BYTES
    with pytest.raises(ValueError, match="at most"):
        handoff.send(here, b"x" * (limits.HANDOFF_BYTES + 1))
    here.close()
    there.close()
    assert child.wait(60) == 0


@pytest.mark.usefixtures("no_leak")
def test_a_claimed_length_over_the_bound_is_refused_unread(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    here, there = channel
    socket.send_fds(here, [struct.pack(">IB", limits.HANDOFF_BYTES + 1, 0)], [spare.fileno()])
    with pytest.raises(ProtocolError, match="claims"):
        handoff.receive(there)


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize("count", [2, 3, 20])
def test_more_sockets_than_one_are_closed_and_refused(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket, count: int
) -> None:
    here, there = channel
    socket.send_fds(here, [struct.pack(">IB", 0, 0)], [spare.fileno()] * count)
    with pytest.raises(ProtocolError, match="more than one"):
        handoff.receive(there)


@pytest.mark.usefixtures("no_leak")
def test_a_file_is_no_socket(channel: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    here, there = channel
    with (tmp_path / "file").open("wb") as file:
        socket.send_fds(here, [struct.pack(">IB", 0, 0)], [file.fileno()])
    with pytest.raises(ProtocolError, match="no socket"):
        handoff.receive(there)


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\5\0", b"\0\0\0\5\0abcd"])
def test_a_process_that_ends_in_the_middle_leaves_nothing_open(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket, sent: bytes
) -> None:
    here, there = channel
    if sent:
        socket.send_fds(here, [sent], [spare.fileno()])
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        handoff.receive(there)


@pytest.mark.usefixtures("no_leak")
def test_a_process_that_stops_in_the_middle_leaves_nothing_open(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    here, there = channel
    there.settimeout(0.05)
    socket.send_fds(here, [b"\0\0\0\5\0abcd"], [spare.fileno()])
    with pytest.raises(TimeoutError):
        handoff.receive(there)


def test_a_received_socket_is_not_inherited_by_the_next_program(
    channel: tuple[socket.socket, socket.socket], spare: socket.socket
) -> None:
    here, there = channel
    with sending(here, b"", spare):
        _, sock = handoff.receive(there)
    assert sock is not None
    with contextlib.closing(sock):
        probe = f"import os; os.fstat({sock.fileno()})"
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, close_fds=False, check=False
        )
    assert b"Bad file descriptor" in done.stderr
