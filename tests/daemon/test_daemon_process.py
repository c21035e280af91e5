"""The daemon as users meet it: a process, its exit codes, its files and its first second."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from forked_programs import Programs
from live_daemon import REPO, START_S, LiveDaemon, OverUnixSocket

from fleetd.process import busy_port

Begin = Callable[..., LiveDaemon]
Refused = Callable[..., tuple[int, str]]


def get(connection: http.client.HTTPConnection, path: str, **headers: str) -> tuple[int, Any]:
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body.startswith(b"{") else body.decode()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def begin(programs: Programs) -> Iterator[Callable[..., LiveDaemon]]:
    """Begins a daemon, which need not get ready; after the test it is gone."""
    with contextlib.ExitStack() as stack:

        def begin(home: Path, *flags: str, **env: str) -> LiveDaemon:
            daemon = LiveDaemon(home, home.parent / "models", programs=programs, flags=flags, **env)
            stack.callback(daemon.kill)
            return daemon

        yield begin


@pytest.fixture
def daemon(home: Path, begin: Begin) -> LiveDaemon:
    return begin(home).__enter__()


@pytest.fixture
def refused(begin: Begin) -> Callable[..., tuple[int, str]]:
    """The exit code and words of a daemon that must not start."""

    def refused(home: Path, *flags: str, **env: str) -> tuple[int, str]:
        daemon = begin(home, *flags, **env)
        code = daemon.process.wait(START_S)
        text = daemon.log.read_text()
        assert "Traceback" not in text
        return code, text

    return refused


def test_it_serves_and_stops(home: Path) -> None:
    """Started as users start it."""
    with LiveDaemon(home, home.parent / "models") as daemon:
        status = daemon.status()
        assert status["pid"] == daemon.process.pid
        assert status["home"] == str(home)
        assert status["socket"] == str(home / "fleetd.sock")
        assert status["http"]["host"] == "127.0.0.1"
        assert status["http"]["port"] > 0
        assert status["default_model"] == "smollm2-135m"
        assert status["engines"] == []
        assert status["requests"] == {"running": 0, "waiting": 0, "completed": 0, "failed": 0}
        assert status["machine"]["tier"] in ("tiny", "small", "standard", "large")
        assert get(OverUnixSocket(home / "fleetd.sock"), "/health")[0] == 200
        assert daemon.control("GET", "/fleet/v1/usage")["rows"] == []
        assert "fleetd_build_info" in daemon.control("GET", "/metrics")

        assert daemon.stop() == 0
    assert not (home / "fleetd.sock").exists()
    assert [line["event"] for line in daemon.lines()] == ["daemon.ready", "daemon.draining", "daemon.stopped"]


def test_control_c_stops_it_too(daemon: LiveDaemon) -> None:
    assert daemon.stop(signal.SIGINT) == 0


def test_the_home_is_private(daemon: LiveDaemon) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((daemon.home / name).stat().st_mode)

    assert mode(".") == 0o700
    for name in ("fleetd.sock", "api-token", "fleetd.db", "fleetd.lock"):
        assert mode(name) == 0o600, name
    assert not [path for path in daemon.home.rglob("*") if path.stat().st_mode & 0o077]


def test_tcp_wants_the_token_of_the_file(daemon: LiveDaemon) -> None:
    port = daemon.status()["http"]["port"]
    token = (daemon.home / "api-token").read_text().strip()

    def models(**headers: str) -> int:
        return get(http.client.HTTPConnection("127.0.0.1", port, timeout=60), "/v1/models", **headers)[0]

    assert models() == 401
    assert models(Authorization="Bearer wrong") == 401
    assert models(Authorization=f"Bearer {token}") == 200


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, fleetd.app, fleetd.cli; print(*sorted(m for m in sys.modules if '.' not in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {
        "mlx",
        "mlx_lm",
        "transformers",
        "torch",
        "numpy",
        "huggingface_hub",
        "jinja2",
        "tokenizers",
        "gguf",
    }
    assert not heavy & set(out.stdout.split())


def test_a_second_daemon_on_the_home_says_who_is_there(daemon: LiveDaemon, refused: Refused) -> None:
    code, text = refused(daemon.home)
    assert code == 3
    assert f"already running on {daemon.home} (pid {daemon.process.pid})" in text
    assert daemon.status()["ready"]  # the first is unharmed


def test_the_socket_of_a_killed_daemon_is_replaced(daemon: LiveDaemon, begin: Begin) -> None:
    daemon.kill()
    assert (daemon.home / "fleetd.sock").exists()
    again = begin(daemon.home).__enter__()
    assert again.stop() == 0


def test_a_busy_port_is_named(home: Path, refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = refused(home, "--http", address)
    assert code == 4
    assert f"{address} is already in use" in text
    assert "--http" in text
    assert not (home / "fleetd.sock").exists()


def test_a_second_daemon_on_a_port_names_the_first_and_the_line_to_type(home: Path) -> None:
    """Started as users start them: a process is known by its command line."""
    with LiveDaemon(home, home.parent / "models") as first:
        port = first.status()["http"]["port"]
        other = home.parent / "other"
        second = LiveDaemon(other, home.parent / "models", flags=("--http", f"127.0.0.1:{port}"))
        assert second.process.wait(START_S) == 4
        assert first.stop() == 0
    text = second.log.read_text()
    owner = f"another fleetd (process {first.process.pid})"
    assert f"The address 127.0.0.1:{port} is already in use by {owner}." in text
    assert re.search(rf"fleetd run --home {re.escape(str(other))} --http 127\.0\.0\.1:\d+\n", text)


def test_a_daemon_on_a_terminal_says_where_it_is_and_what_to_do_next(home: Path) -> None:
    made = LiveDaemon(home, home.parent / "models")
    made.kill()
    child = pexpect.spawn(
        made.command[0],
        [*made.command[1:], "--peer-port", "0"],
        env=made.env,
        cwd=str(REPO),
        encoding="utf-8",
        timeout=START_S,
        dimensions=(24, 80),
    )
    child.expect(r"fleetd \S+ serves http://127\.0\.0\.1:\d+/v1\r\n")
    child.expect_exact(f"home {home} (Ctrl-C stops it)\r\n")
    child.expect_exact("next, in another terminal: fleetctl chat, fleetctl open or fleetctl pair\r\n")
    child.sendcontrol("c")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "daemon.ready" not in str(child.before)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["fleetd", "run", "--home", "/a b", "--listen", "*:8115", "--no-mdns"],
            "fleetd run --home '/a b' --no-mdns --http 127.0.0.1:8124 --listen '*:8125'",
        ),
        (["fleetd", "run", "--peer-port=8115"], "fleetd run --http 127.0.0.1:8124 --listen '*:8125'"),
        (["/usr/bin/pytest", "tests"], ""),
    ],
)
def test_the_line_to_type_has_a_free_port_for_the_taken_one(
    given: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_port, "_is_free", lambda host, port: port in (8124, 8125))
    assert busy_port.other_line(given, "fleet.listen", "0.0.0.0", 8115) == line  # noqa: S104


def test_a_foreign_address_is_named(home: Path, refused: Refused) -> None:
    (home.parent / "c.toml").write_text("[http]\nallow_remote = true\n")
    code, text = refused(home, "--config", str(home.parent / "c.toml"), "--http", "192.0.2.1:0")
    assert code == 2
    assert "cannot listen on 192.0.2.1:0" in text


@pytest.mark.parametrize(
    ("toml", "args", "env", "said"),
    [
        ("[http]\nlisen = 'x'\n", (), {}, "Did you mean `http.listen`?"),
        ("", ("--http", "0.0.0.0:8114"), {}, "other machines can reach"),
        ("", ("--log-level", "loud"), {}, "`log.level` from flag --log-level"),
        ("", (), {"FLEETD_LOG_LEVEL": "loud"}, "`log.level` from environment FLEETD_LOG_LEVEL"),
        ("", ("--config", "/nonexistent.toml"), {}, "does not exist"),
    ],
)
def test_a_wrong_setting_is_named(
    home: Path, refused: Refused, toml: str, args: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    home.mkdir()
    (home / "fleetd.toml").write_text(toml)
    code, text = refused(home, *args, **env)
    assert code == 2
    assert said in text


def test_a_path_too_long_for_a_socket_is_told(tmp_path: Path, refused: Refused) -> None:
    code, text = refused(tmp_path / ("x" * 120))
    assert code == 5
    assert "Unix sockets allow" in text


def test_symlink_planted_as_token_stops_the_start(home: Path, refused: Refused) -> None:
    home.mkdir()
    (home / "known").write_text("attacker-knows-this")
    (home / "api-token").symlink_to(home / "known")
    code, text = refused(home)
    assert code == 1
    assert "symbolic link" in text


def test_a_damaged_database_does_not_keep_it_from_starting(home: Path, begin: Begin) -> None:
    home.mkdir()
    (home / "fleetd.db").write_bytes(b"\x00garbage" * 1000)
    daemon = begin(home).__enter__()
    assert daemon.stop() == 0
    assert daemon.lines()[0]["event"] == "store.damaged"


def test_the_service_manager_is_told(home: Path, tmp_path: Path, begin: Begin) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        manager.settimeout(START_S)
        # A ping a second: the system keeps no more than ten messages, and the last one counts here, too.
        env = {"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "2000000"}
        daemon = begin(home, **env)
        said: list[bytes] = []
        while not said or not said[-1].startswith(b"READY=1\nSTATUS=serving http://127.0.0.1:"):
            said.append(manager.recv(1024))
        assert manager.recv(1024) == b"WATCHDOG=1"
        assert daemon.stop() == 0
        while not said[-1].startswith(b"STOPPING=1"):
            said.append(manager.recv(1024))


def test_config_show_names_every_origin(home: Path) -> None:
    home.mkdir()
    (home / "fleetd.toml").write_text("[usage]\nkeep_days = 9\n")
    words = ("config", "show", "--json")
    out = subprocess.run(
        [sys.executable, "-m", "fleetd", *words, "--home", str(home), "--http", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"FLEETD_LOG_LEVEL": "error", "PATH": ""},
    )
    settings = {row["key"]: row for row in json.loads(out.stdout)["settings"]}
    assert settings["http.listen"]["origin"] == "flag --http"
    assert settings["log.level"]["origin"] == "environment FLEETD_LOG_LEVEL"
    assert settings["usage.keep_days"]["origin"] == f"{home / 'fleetd.toml'}, line 2"
    assert settings["models.default"]["origin"] == "default"


def test_a_command_of_fleetctl_leads_there() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "fleetd", "status"], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 2
    assert "No such command 'status'. `fleetctl` asks the daemon" in out.stderr
