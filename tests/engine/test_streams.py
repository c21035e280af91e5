"""Streams that were handed over: found by their names, and closed when nobody takes them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from fleetd import limits
from fleetd.engine.protocol import StreamTag
from fleetd.engine.shared_prefill.frame_schedule import helper_streams, home_streams
from fleetd.engine.streams.channel import receive_sockets
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import Split
from fleetd.sealed import handoff

Pair = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Their end, which a registry is given, and the other one, on which it shows that theirs was closed."""
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        theirs, ours = socket.socketpair()
        ours.settimeout(60)
        made.extend((theirs, ours))
        return theirs, ours

    yield pair
    for sock in made:
        sock.close()


def tag(job: str = "j", name: str = "home") -> StreamTag:
    return StreamTag(job, name, bytes(32), "acceptor")


def is_open(ours: socket.socket) -> bool:
    ours.setblocking(False)
    try:
        return ours.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    ("split", "home", "helpers"),
    [
        (Split("layers", (0, 2, 4), 4, 0, 300, 64), ["helper0", "in"], [["home", "out"]]),
        (Split("layers", (0, 4, 4), 4, 0, 300, 64), ["helper0"], [["home"]]),
        (
            Split("layers", (0, 1, 2, 4), 4, 0, 300, 64),
            ["helper0", "helper1", "in"],
            [["home", "out"], ["home", "in", "out"]],
        ),
        (
            Split("layers", (0, 2, 4, 4), 4, 0, 300, 64),
            ["helper0", "helper1"],
            [["home", "out"], ["home", "in"]],
        ),
        (Split("tokens", (0, 64, 300), 4, 0, 300, 64), ["helper0"], [["home"]]),
        (
            Split("tokens", (0, 64, 128, 300), 4, 0, 300, 64),
            ["helper0", "helper1"],
            [["home", "out"], ["home", "in"]],
        ),
    ],
)
def test_who_needs_which_streams(split: Split, home: list[str], helpers: list[list[str]]) -> None:
    assert home_streams(split) == home
    assert [helper_streams(split, rank) for rank in range(split.helpers)] == helpers


def test_a_job_is_complete_once_all_its_streams_are_there(pair: Pair) -> None:
    woken: list[int] = []
    streams = HandedOverStreams(lambda: woken.append(1))
    streams.put(tag(name="home"), pair()[0])
    streams.put(tag("other", "out"), pair()[0])
    assert not streams.complete("j", ["home", "out"])
    streams.put(tag(name="out"), pair()[0])
    assert streams.complete("j", ["home", "out"])
    assert len(woken) == 3
    pipe = streams.connect("j")("home", lambda head: [])
    assert not streams.complete("j", ["home", "out"])
    pipe.close()
    streams.close()


def test_what_nobody_takes_is_closed(pair: Pair) -> None:
    now = [0.0]
    streams = HandedOverStreams(lambda: None, clock=lambda: now[0])
    (old, old_end), (new, new_end), (ended, ended_end) = pair(), pair(), pair()
    streams.put(tag("old"), old)
    now[0] = limits.TICKET_S
    streams.put(tag("new"), new)
    streams.put(tag("ended"), ended)
    streams.sweep()
    assert is_open(old_end)
    streams.drop("ended")
    assert not is_open(ended_end)
    now[0] += 0.1
    streams.sweep()
    assert (is_open(old_end), is_open(new_end), len(streams)) == (False, True, 1)
    streams.close()
    assert not is_open(new_end)


def test_a_flood_of_streams_is_bounded(pair: Pair) -> None:
    streams = HandedOverStreams(lambda: None)
    first, first_end = pair()
    streams.put(tag("first"), first)
    for number in range(limits.TICKETS):
        streams.put(tag(f"{number}"), pair()[0])
    assert len(streams) == limits.TICKETS
    assert not is_open(first_end)
    again, again_end = pair()
    streams.put(tag("0"), again)
    assert len(streams) == limits.TICKETS
    streams.close()
    assert not is_open(again_end)


@pytest.mark.parametrize("with_socket", [True, False])
def test_what_is_no_stream_is_refused(pair: Pair, with_socket: bool) -> None:
    channel, theirs = pair()
    given, given_end = pair()
    sender = threading.Thread(target=handoff.send, args=(theirs, b"rubbish", given if with_socket else None))
    sender.start()
    with pytest.raises(ProtocolError):
        receive_sockets(channel, lambda tag, sock: None)
    sender.join(60)
    given.close()
    assert not is_open(given_end)


def test_streams_come_until_the_daemon_goes(pair: Pair) -> None:
    channel, theirs = pair()
    streams = HandedOverStreams(lambda: None)
    reader = threading.Thread(target=receive_sockets, args=(channel, streams.put))
    reader.start()
    for number in range(3):
        handoff.send(theirs, msgspec.msgpack.encode(tag(f"{number}")), pair()[0])
    theirs.shutdown(socket.SHUT_RDWR)
    reader.join(60)
    assert not reader.is_alive()
    assert len(streams) == 3
    streams.close()
