"""Tunnels between two machines of a ring; both are this one here."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from strangers import Stranger

from fleetd import limits
from fleetd.p2p.tunnel import LocalPort, Mouth, Tunnel
from fleetd.process.used_socket import shut_down

KEY = bytes(range(32))
SECRET = b"hidden states of a prompt" * 1000


class KeptWire:
    """Between two ends of a stream: passes on what comes, and keeps it."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.near, near = socket.socketpair()
        self.far, far = socket.socketpair()
        self._ends = near, far
        self._threads = [
            threading.Thread(target=self._pass, args=(near, far), daemon=True),
            threading.Thread(target=self._pass, args=(far, near), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        except OSError:
            pass
        self._shut_down()

    def _shut_down(self) -> None:
        for sock in self._ends:
            shut_down(sock)

    def close(self) -> None:
        self._shut_down()
        for thread in self._threads:
            thread.join(60)
        for sock in self._ends:
            sock.close()


class TunnelEnds:
    """Rank 0 comes in at the mouth; rank 1 listens at its port. ``private``: the link is, for each end."""

    def __init__(self, stack: ExitStack, private: tuple[bool, bool] = (False, False)) -> None:
        self.wire = KeptWire()
        self.mouth, self.port = Mouth(), LocalPort()
        self.tunnels = [
            Tunnel(self.wire.near, KEY, "connector", self.mouth, offer=int(private[0])),
            Tunnel(self.wire.far, KEY, "acceptor", self.port, offer=int(private[1])),
        ]
        self._stack = stack

    def connected(self) -> tuple[socket.socket, socket.socket]:
        """As MLX does it: bind the port that is held, listen, and let the other one come."""
        listener = self._stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", self.port.port))
        listener.listen(1)
        listener.settimeout(60)
        here = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.mouth.port), 60))
        there = self._stack.enter_context(listener.accept()[0])
        for sock in (here, there):
            sock.settimeout(60)
        return here, there

    def close(self) -> None:
        for tunnel in self.tunnels:
            tunnel.close()
        self.wire.close()
        for tunnel in self.tunnels:
            tunnel.join(60)


@pytest.fixture
def ends() -> Iterator[TunnelEnds]:
    with ExitStack() as stack:
        made = TunnelEnds(stack)
        stack.callback(made.close)
        yield made


def read(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = sock.recv(count - len(found))
        assert more
        found += more
    return found


def test_bytes_pass_both_ways_and_are_sealed_on_the_wire(ends: TunnelEnds) -> None:
    here, there = ends.connected()
    for source, target in ((here, there), (there, here)):
        source.sendall(SECRET)
        assert read(target, len(SECRET)) == SECRET
    assert SECRET[:25] not in bytes(ends.wire.seen)
    assert len(ends.wire.seen) > 2 * len(SECRET)


def test_more_than_a_chunk_arrives_whole(ends: TunnelEnds) -> None:
    here, there = ends.connected()
    data = os.urandom(3 * limits.SEALED_CHUNK_BYTES + 17)
    sending = threading.Thread(target=here.sendall, args=(data,))
    sending.start()
    assert read(there, len(data)) == data
    sending.join(60)
    assert not sending.is_alive()


def test_a_process_that_does_not_read_makes_the_other_one_wait(ends: TunnelEnds) -> None:
    here, there = ends.connected()
    here.settimeout(0.5)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 1 << 30:
            sent += here.send(bytes(1 << 16))
    assert 0 < sent < 1 << 30
    assert len(read(there, sent)) == sent


@pytest.mark.parametrize("first", [0, 1])
def test_when_one_process_goes_the_other_one_hears_of_it(ends: TunnelEnds, first: int) -> None:
    pair = ends.connected()
    # One that goes before it is looked at is nobody's.
    pair[first].sendall(b"1")
    assert pair[1 - first].recv(1) == b"1"
    pair[first].close()
    assert pair[1 - first].recv(1) == b""


def test_bytes_that_were_changed_on_their_way_end_the_tunnel(ends: TunnelEnds) -> None:
    here, there = ends.connected()
    ends.wire._ends[1].sendall(bytes(64))
    assert there.recv(1) == b""
    assert here.recv(1) == b""


def test_only_the_first_to_come_is_let_in(ends: TunnelEnds) -> None:
    ends.connected()
    with socket.socket() as other:
        other.settimeout(60)
        # One that comes while the door is being closed is let in by the kernel, and then reset.
        if (refused := other.connect_ex(("127.0.0.1", ends.mouth.port))) == 0:
            with pytest.raises(ConnectionResetError):
                other.recv(1)
        else:
            assert refused in (errno.ECONNREFUSED, errno.ECONNRESET)


def test_a_process_that_is_not_ours_is_sent_away_and_the_rank_comes_in_after_it(ends: TunnelEnds) -> None:
    with Stranger(ends.mouth.port) as stranger:
        assert stranger.says() == "in"
        # Nothing of the ring came to it.
        assert stranger.says() == "out 0"
        here, there = ends.connected()
        here.sendall(SECRET)
        assert read(there, len(SECRET)) == SECRET
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)


def test_a_port_that_is_held_is_given_to_no_other_process() -> None:
    held = LocalPort()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.port))
    finally:
        held.close()


def test_a_tunnel_that_no_process_uses_ends_at_once_when_it_is_told(ends: TunnelEnds) -> None:
    ends.close()
    assert not any(thread.is_alive() for tunnel in ends.tunnels for thread in tunnel._threads)
