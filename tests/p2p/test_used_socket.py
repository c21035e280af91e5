"""Sockets that one thread uses while another one ends them: their numbers stay theirs until both are done."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fleetd.engine.protocol import STAGE, StreamTag
from fleetd.engine.streams import pipe as pipe_module
from fleetd.engine.streams.channel import SocketSender
from fleetd.engine.streams.frames import FrameHeader, Kind
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import EngineDied
from fleetd.p2p.tunnel import LocalPort, Mouth, Tunnel
from fleetd.process import local_peers, used_socket
from fleetd.process.used_socket import UsedSocket
from fleetd.sealed import handoff
from fleetd.sealed.stream import SealedReceiver, SealedSender

WITHIN_S = 60.0
# Than asyncio has.
MORE_THAN_THREADS = 33
KEY = bytes(range(32))


class HeldCall:
    """Stands for a call that uses a socket, and has not noticed yet that it was shut down."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.begun, self.let = threading.Event(), threading.Event()
        self.sock: socket.socket | None = None

    def __call__(self, sock: Any, *arguments: Any) -> Any:
        self.sock = sock if isinstance(sock, socket.socket) else sock._sock
        self.begun.set()
        assert self.let.wait(WITHIN_S)
        return self._real(sock, *arguments)

    def assert_open_until_let(self, ended: Callable[[], object]) -> None:
        """It is in use when ``ended`` is called, and closed after its user."""
        assert self.begun.wait(WITHIN_S)
        assert self.sock is not None
        try:
            ended()
            assert self.sock.fileno() >= 0, "its number may be another one's now"
        finally:
            self.let.set()


def _is_closed(sock: socket.socket | None) -> bool:
    return sock is not None and sock.fileno() < 0


def test_a_socket_that_nobody_uses_is_closed_at_once_and_used_no_more() -> None:
    near, far = socket.socketpair()
    with far:
        used = UsedSocket(near)
        with used.used() as sock:
            assert sock is near
        assert not _is_closed(near), "it was not ended"
        used.end()
        used.end()
        assert _is_closed(near)
        assert far.recv(1) == b""
        with pytest.raises(OSError, match="Bad file descriptor"), used.used():
            pass


def test_the_last_of_two_users_closes_it_also_if_it_fails() -> None:
    near, far = socket.socketpair()
    with far:
        used = UsedSocket(near)

        def fails() -> None:
            with used.used():
                with used.used():
                    used.end()
                    assert far.recv(1) == b"", "both directions end at once"
                assert not _is_closed(near)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert _is_closed(near)


def test_a_mouth_that_is_closed_while_a_thread_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed at once, some of such threads waited for half an hour beside a busy processor."""
    held = HeldCall(local_peers.accept)
    monkeypatch.setattr(local_peers, "accept", held)
    mouth, errors = Mouth(), list[OSError]()

    def opened() -> None:
        try:
            mouth.open()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=opened, daemon=True)
    thread.start()
    held.assert_open_until_let(mouth.close)
    thread.join(WITHIN_S)
    assert errors
    assert _is_closed(held.sock)


def test_a_mouth_is_closed_also_if_the_system_does_not_wake_the_thread_that_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As macOS does not: the thread waited for half an hour, and the port stayed open."""
    monkeypatch.setattr(used_socket, "shut_down", lambda sock: None)
    held, mouth = HeldCall(local_peers.accept), Mouth()
    monkeypatch.setattr(local_peers, "accept", held)

    def opened() -> None:
        with pytest.raises(TimeoutError, match="no process of fleetd"):
            mouth.open()

    thread = threading.Thread(target=opened, daemon=True)
    thread.start()
    held.assert_open_until_let(mouth.close)
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    assert _is_closed(mouth._listener.sock)


def test_who_accepts_asks_again_and_again_whether_anybody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_peers, "_LOOK_S", 0.01)
    answers = iter([False, False, True])
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        local_peers.accept(listener, os.getpid(), 10 * WITHIN_S, lambda: next(answers))
    assert not list(answers)


@pytest.mark.parametrize("local", [Mouth, LocalPort])
def test_a_tunnel_that_is_closed_before_its_thread_begins(
    local: type[Mouth | LocalPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = list[Callable[[], None]]()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begin.append(thread.run))
    near, far = socket.socketpair()
    with far:
        tunnel = Tunnel(near, KEY, "connector", local())
        tunnel.close()
        assert _is_closed(near)
        for run in begin:
            run()
        assert tunnel.agreed(0.0) is None


def test_a_tunnel_that_is_closed_while_its_ends_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldCall(SealedReceiver.receive_into)
    monkeypatch.setattr(SealedReceiver, "receive_into", lambda receiver, buffer: held(receiver, buffer))
    near, far = socket.socketpair()
    with far:
        tunnel = Tunnel(near, KEY, "connector", Mouth())
        held.assert_open_until_let(tunnel.close)
        tunnel.join(WITHIN_S)
    assert _is_closed(near)


async def test_a_channel_that_is_closed_while_a_socket_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldCall(handoff.send)
    monkeypatch.setattr(handoff, "send", held)
    ours, theirs = socket.socketpair()
    given, kept = socket.socketpair()
    with theirs, kept:
        sender = SocketSender(ours)
        giving = asyncio.create_task(sender.give(StreamTag("one", STAGE, KEY, "connector"), given))
        await asyncio.to_thread(held.assert_open_until_let, sender.close)
        with pytest.raises(Exception, match="could not be handed"):
            await giving
    assert _is_closed(ours)
    assert _is_closed(given)


def test_a_pipe_that_breaks_while_a_short_frame_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that computes, which is none of the pipe's own."""
    held = HeldCall(SealedSender.send)
    monkeypatch.setattr(SealedSender, "send", lambda sender, data: held(sender, data))
    near, far = socket.socketpair()
    pipe = SocketPipe(near, KEY, "connector", place=lambda head: (), wake=lambda: None, eager=True)
    computing = threading.Thread(target=pipe.send, args=(FrameHeader(Kind.ALIVE),), daemon=True)
    computing.start()

    def broke() -> None:
        far.close()
        for thread in pipe._threads:
            thread.join(WITHIN_S)

    held.assert_open_until_let(broke)
    computing.join(WITHIN_S)
    assert _is_closed(near)
    pipe.close()


async def test_sockets_that_wait_for_a_worker_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waited on a thread: eight of them for a worker that stood still were half a minute in which the
    daemon read nothing of its disk."""
    held = HeldCall(handoff.send)
    monkeypatch.setattr(handoff, "send", held)
    ours, theirs = socket.socketpair()
    pairs = [socket.socketpair() for _ in range(MORE_THAN_THREADS)]
    with theirs:
        sender = SocketSender(ours)
        gives = [
            asyncio.create_task(sender.give(StreamTag("one", STAGE, KEY, "connector"), given))
            for given, _ in pairs
        ]
        try:
            async with asyncio.timeout(WITHIN_S):
                assert await asyncio.to_thread(held.begun.wait, WITHIN_S)
                assert await asyncio.to_thread(lambda: "read") == "read"
        finally:
            sender.close()
            held.let.set()
        assert all(
            isinstance(error, EngineDied) for error in await asyncio.gather(*gives, return_exceptions=True)
        )
    for given, kept in pairs:
        assert _is_closed(given)
        kept.close()


@pytest.mark.parametrize("broken", [False, True])
def test_a_pipe_that_is_closed_while_its_reader_waits(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``broken``: by its other end, before it is closed here."""
    held = HeldCall(SealedReceiver.wait)
    monkeypatch.setattr(SealedReceiver, "wait", lambda receiver: held(receiver))
    near, far = socket.socketpair()
    pipe = SocketPipe(near, KEY, "connector", place=lambda head: (), wake=lambda: None)
    assert held.begun.wait(WITHIN_S)
    if broken:
        far.close()
        while pipe.backlog or not pipe._broken:
            pipe.send(FrameHeader(Kind.ALIVE))
    monkeypatch.setattr(pipe_module, "_JOIN_S", 0.0)  # as if the process had slept meanwhile
    held.assert_open_until_let(pipe.close)
    for thread in pipe._threads:
        thread.join(WITHIN_S)
    assert _is_closed(near)
    far.close()
