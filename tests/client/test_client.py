"""Not reaching a daemon, in its several ways, and errors that come back typed."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, Reply

from fleetctl.connection.client import Client, daemon_error, explain_connect
from fleetctl.connection.event_stream import Comment, Data
from fleetctl.connection.home import Address, locate
from fleetctl.exits import ConnectionBroken, DaemonFailed, Exit, NoDaemon, Refused, exit_for
from fleetd import errors, limits


def client(home: Path) -> Client:
    return Client(locate(home, None))


def why(home: Path) -> NoDaemon:
    with pytest.raises(NoDaemon) as caught:
        client(home).get("/fleet/v1/status")
    assert exit_for(caught.value) == Exit.NO_DAEMON
    return caught.value


def test_no_home(short_dir: Path) -> None:
    error = why(short_dir / "nope")
    assert "does not exist" in error.message
    assert f"fleetd run --home {short_dir}/nope" in error.hint
    assert "service install" in error.hint


def test_no_socket(short_dir: Path) -> None:
    assert "has no socket" in why(short_dir).message


def test_stale_socket(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(short_dir / "fleetd.sock"))
    assert "left behind" in why(short_dir).message


def test_not_a_socket(short_dir: Path) -> None:
    (short_dir / "fleetd.sock").write_text("hello")
    assert "is not a socket" in why(short_dir).message


def test_path_too_long(short_dir: Path) -> None:
    home = short_dir / ("x" * limits.SOCKET_PATH_BYTES)
    assert str(limits.SOCKET_PATH_BYTES) in why(home).message


def test_path_at_the_limit_is_tried(short_dir: Path) -> None:
    fill = limits.SOCKET_PATH_BYTES - len(os.fsencode(short_dir / "y" / "fleetd.sock"))
    home = short_dir / ("y" * (fill + 1))
    home.mkdir()
    assert len(os.fsencode(home / "fleetd.sock")) == limits.SOCKET_PATH_BYTES
    assert "has no socket" in why(home).message


def test_permission_denied_names_the_owner(short_dir: Path) -> None:
    path = short_dir / "fleetd.sock"
    path.write_text("")
    error = explain_connect(Address(short_dir, path), PermissionError(13, "Permission denied"))
    assert "Permission denied" in error.message
    assert "belongs to user" in error.message
    assert "as that user" in error.hint


def test_full_backlog_is_not_called_stale(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_dir / "fleetd.sock"))
        address = locate(short_dir, None)
        error = explain_connect(address, BlockingIOError(11, "Resource temporarily unavailable"))
    assert "does not accept" in error.message


def test_known_code_comes_back_as_its_type(daemon: FakeDaemon) -> None:
    fields = {
        "message": "Unknown model foo.",
        "code": "model_not_found",
        "hint": "Try bar.",
        "param": "model",
    }
    daemon.on("GET", "/x", Reply({"error": fields}, status=404))
    with pytest.raises(errors.ModelNotFound) as caught:
        client(daemon.home).get("/x")
    assert (caught.value.message, caught.value.hint, caught.value.param) == (
        "Unknown model foo.",
        "Try bar.",
        "model",
    )
    assert exit_for(caught.value) == Exit.REFUSED


@pytest.mark.parametrize("cls", sorted(set(errors.BY_CODE.values()), key=lambda c: c.code))
def test_every_code_has_an_exit(cls: type[errors.FleetError]) -> None:
    error = daemon_error({"error": {"message": "m", "code": cls.code}}, 500)
    assert type(error) is cls
    expected = Exit.REFUSED if cls.status < 500 else Exit.FAILED
    if issubclass(cls, errors.PeerError):
        pairing = issubclass(cls, (errors.PairingFailed, errors.NotPaired))
        expected = Exit.PAIRING if pairing else Exit.PEER
    assert exit_for(error) == expected


@pytest.mark.parametrize(("status", "kind"), [(418, Refused), (599, DaemonFailed)])
@pytest.mark.parametrize("body", [{"error": {"message": "m", "code": "new_in_2030"}}, {"error": "m"}])
def test_unknown_code_goes_by_status(status: int, kind: type[errors.FleetError], body: object) -> None:
    error = daemon_error(body, status)
    assert type(error) is kind
    assert error.message == "m"


def test_an_answer_that_is_not_json(daemon: FakeDaemon) -> None:
    daemon.on("GET", "/x", Reply(raw=b"<html>"))
    with pytest.raises(DaemonFailed, match="not JSON"):
        client(daemon.home).get("/x")


def test_a_daemon_that_accepts_and_says_nothing(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_dir / "fleetd.sock"))
        server.listen()
        with pytest.raises(ConnectionBroken, match="did not answer within"):
            client(short_dir).call("GET", "/x", timeout_s=0.05)


def test_a_daemon_that_dies_before_answering(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_dir / "fleetd.sock"))
        server.listen()

        def accept_and_die() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=accept_and_die)
        thread.start()
        with pytest.raises(ConnectionBroken, match="without an answer"):
            client(short_dir).get("/x")
        thread.join()


def test_stream_yields_comments_and_data_as_they_come(daemon: FakeDaemon) -> None:
    held = threading.Event()
    daemon.on("POST", "/s", Reply(stream=[": keepalive 0/9\n\n", "data: 1\n\n", held, "data: 2\n\n"]))
    with client(daemon.home).stream("/s", {}) as stream:
        events = iter(stream)
        assert next(events) == Comment("keepalive 0/9")
        assert next(events) == Data("1")
        held.set()
        assert list(events) == [Data("2")]
        assert stream.headers["x-fleet-exactness"] == "exact"


def test_closing_a_stream_reaches_the_daemon(daemon: FakeDaemon) -> None:
    reply = Reply(stream=["data: 1\n\n", threading.Event()])
    daemon.on("POST", "/s", reply)
    with client(daemon.home).stream("/s", {}) as stream:
        assert next(iter(stream)) == Data("1")
    assert reply.gone.wait(60)


def test_a_stream_cut_off_in_the_middle(daemon: FakeDaemon) -> None:
    daemon.on("POST", "/s", Reply(stream=["data: 1\n\n", "drop"]))
    with (
        client(daemon.home).stream("/s", {}) as stream,
        pytest.raises(ConnectionBroken, match="broke before"),
    ):
        list(stream)


def test_a_stream_that_falls_silent(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # No less than a slow machine needs to send what comes before.
    monkeypatch.setattr(limits, "CLIENT_STREAM_STALL_S", 2.0)
    daemon.on("POST", "/s", Reply(stream=["data: 1\n\n", threading.Event()]))
    with (
        client(daemon.home).stream("/s", {}) as stream,
        pytest.raises(ConnectionBroken, match="no sign of life"),
    ):
        list(stream)
