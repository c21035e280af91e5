"""A worker's reports to its daemon: whole, in order, and without making the sender wait."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest

from fleetd.engine import protocol
from fleetd.engine.protocol import Delta, Report
from fleetd.engine.worker import EAGER_BYTES, DaemonSocket


class SocketPair:
    """A worker's socket, and the daemon's end."""

    def __init__(self) -> None:
        self.daemon, worker = socket.socketpair()
        self.daemon.settimeout(60)
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.link = DaemonSocket(worker.detach())

    def read(self, reports: int) -> list[Report]:
        decoder, found = protocol.reports(), list[Report]()
        while len(found) < reports:
            found += decoder.feed(self.daemon.recv(1 << 16))
        return found

    def close(self) -> None:
        self.daemon.close()
        self.link.flush()
        self.link._socket.close()


@pytest.fixture
def pair() -> Iterator[SocketPair]:
    made = SocketPair()
    yield made
    made.close()


def numbered(sender: str, count: int, text: str = "") -> list[Report]:
    return [Delta(sender, f"{i} {text}") for i in range(count)]


def test_a_report_that_fits_is_written_by_its_sender(
    pair: SocketPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.link._changed, "notify", lambda: pytest.fail("the writer was woken"))
    sent = numbered("a", 3)
    for report in sent:
        pair.link.send(report)
    assert pair.read(3) == sent
    monkeypatch.undo()


def test_a_full_socket_makes_nobody_wait_and_loses_nothing(pair: SocketPair) -> None:
    sent = numbered("a", 900, "x" * 900)
    assert len(protocol.encode(sent[-1])) <= EAGER_BYTES
    for report in sent:
        pair.link.send(report)  # nobody reads
    assert pair.link._unsent
    assert pair.read(len(sent)) == sent
    # What comes once all is written is written at once again.
    pair.link.send(sent[0])
    assert pair.read(1) == sent[:1]


def test_frames_of_several_threads_are_whole_and_in_order(pair: SocketPair) -> None:
    sent = {name: numbered(name, 200, "x" * size) for name, size in (("a", 10), ("b", 900), ("c", 9000))}

    def send(reports: list[Report]) -> None:
        for report in reports:
            pair.link.send(report)

    threads = [threading.Thread(target=send, args=(reports,)) for reports in sent.values()]
    for thread in threads:
        thread.start()
    found = defaultdict[str, list[Report]](list)
    for report in pair.read(600):
        assert isinstance(report, Delta)
        found[report.id].append(report)
    for thread in threads:
        thread.join()
    assert found == sent


def test_flushing_writes_what_is_left_and_ends(pair: SocketPair) -> None:
    sent = numbered("a", 300, "x" * 3000)
    for report in sent:
        pair.link.send(report)
    flushing = threading.Thread(target=pair.link.flush)
    flushing.start()
    assert pair.read(len(sent)) == sent
    flushing.join()
    assert not pair.link._writer.is_alive()
    pair.link.send(sent[0])
    assert not pair.link._unsent


def test_a_daemon_that_has_gone_stops_nobody(pair: SocketPair) -> None:
    pair.daemon.close()
    for report in numbered("a", 300, "x" * 3000):
        pair.link.send(report)
    pair.link._writer.join(60)
    assert not pair.link._writer.is_alive()
