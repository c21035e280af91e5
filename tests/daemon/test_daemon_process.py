"""The daemon as users meet it: a process, its exit codes, its files and its first second."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 20.0  # a loaded CI machine; the figure itself is checked apart
STOP_S = 10.0


class OverUnixSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def get(connection: http.client.HTTPConnection, path: str, **headers: str) -> tuple[int, Any]:
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body.startswith(b"{") else body.decode()


# A daemon of a test meets no other machine unless it is about that.
QUIET = {"FLEETD_FLEET_LISTEN": "127.0.0.1:0", "FLEETD_FLEET_MDNS": "off"}


class Daemon:
    """One `fleetd run` over a home folder of its own."""

    def __init__(self, home: Path, *args: str, **env: str) -> None:
        self.home = home
        self.log = home.parent / f"{home.name}.log"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLEETD_", "NOTIFY_", "WATCHDOG_"))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetd", "run", "--home", str(home), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean | QUIET | env,
            )

    def started(self) -> Daemon:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.status()["ready"]:
                    return self
            time.sleep(0.01)
        raise AssertionError(self.log.read_text())

    def get(self, path: str) -> tuple[int, Any]:
        return get(OverUnixSocket(self.home / "fleetd.sock"), path)

    def status(self) -> dict[str, Any]:
        status, body = self.get("/fleet/v1/status")
        assert status == 200
        assert isinstance(body, dict)
        return body

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def daemon(home: Path) -> Iterator[Daemon]:
    running = Daemon(home, "--http", "127.0.0.1:0").started()
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def refused(home: Path, *args: str, **env: str) -> tuple[int, str]:
    """The exit code and words of a daemon that must not start."""
    daemon = Daemon(home, *args, **env)
    try:
        code = daemon.process.wait(START_S)
    finally:
        daemon.process.kill()
        daemon.process.wait()
    text = daemon.log.read_text()
    assert "Traceback" not in text
    return code, text


def test_it_serves_and_stops(daemon: Daemon) -> None:
    status = daemon.status()
    assert status["pid"] == daemon.process.pid
    assert status["home"] == str(daemon.home)
    assert status["socket"] == str(daemon.home / "fleetd.sock")
    assert status["http"]["host"] == "127.0.0.1"
    assert status["http"]["port"] > 0
    assert status["default_model"] == "smollm2-135m"
    assert status["engines"] == []
    assert status["requests"] == {"running": 0, "waiting": 0, "completed": 0, "failed": 0}
    assert status["machine"]["tier"] in ("tiny", "small", "standard", "large")
    assert daemon.get("/health")[0] == 200
    assert daemon.get("/fleet/v1/usage")[1]["rows"] == []
    assert "fleetd_build_info" in daemon.get("/metrics")[1]

    assert daemon.stop() == 0
    assert not (daemon.home / "fleetd.sock").exists()
    assert [line["event"] for line in daemon.lines()] == ["daemon.ready", "daemon.draining", "daemon.stopped"]


def test_control_c_stops_it_too(daemon: Daemon) -> None:
    assert daemon.stop(signal.SIGINT) == 0


def test_the_home_is_private(daemon: Daemon) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((daemon.home / name).stat().st_mode)

    assert mode(".") == 0o700
    for name in ("fleetd.sock", "api-token", "fleetd.db", "fleetd.lock"):
        assert mode(name) == 0o600, name
    assert not [path for path in daemon.home.rglob("*") if path.stat().st_mode & 0o077]


def test_tcp_wants_the_token_of_the_file(daemon: Daemon) -> None:
    port = daemon.status()["http"]["port"]
    token = (daemon.home / "api-token").read_text().strip()

    def models(**headers: str) -> int:
        return get(http.client.HTTPConnection("127.0.0.1", port, timeout=10), "/v1/models", **headers)[0]

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


def test_a_second_daemon_on_the_home_says_who_is_there(daemon: Daemon) -> None:
    code, text = refused(daemon.home, "--http", "127.0.0.1:0")
    assert code == 3
    assert f"already running on {daemon.home} (pid {daemon.process.pid})" in text
    assert daemon.status()["ready"]  # the first is unharmed


def test_the_socket_of_a_killed_daemon_is_replaced(daemon: Daemon) -> None:
    daemon.process.kill()
    daemon.process.wait()
    assert (daemon.home / "fleetd.sock").exists()
    again = Daemon(daemon.home, "--http", "127.0.0.1:0").started()
    assert again.stop() == 0


def test_a_busy_port_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = refused(home, "--http", address)
    assert code == 4
    assert f"{address} is already in use" in text
    assert "--http" in text
    assert not (home / "fleetd.sock").exists()


def test_a_foreign_address_is_named(home: Path) -> None:
    (home.parent / "c.toml").write_text('[http]\nallow_remote = true\nlisten = "192.0.2.1:0"\n')
    code, text = refused(home, "--config", str(home.parent / "c.toml"))
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
    home: Path, toml: str, args: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    home.mkdir()
    (home / "fleetd.toml").write_text(toml)
    code, text = refused(home, *args, **env)
    assert code == 2
    assert said in text


def test_a_path_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    code, text = refused(tmp_path / ("x" * 120))
    assert code == 5
    assert "Unix sockets allow" in text


def test_symlink_planted_as_token_stops_the_start(home: Path) -> None:
    home.mkdir()
    (home / "known").write_text("attacker-knows-this")
    (home / "api-token").symlink_to(home / "known")
    code, text = refused(home, "--http", "127.0.0.1:0")
    assert code == 1
    assert "symbolic link" in text


def test_a_damaged_database_does_not_keep_it_from_starting(home: Path) -> None:
    home.mkdir()
    (home / "fleetd.db").write_bytes(b"\x00garbage" * 1000)
    daemon = Daemon(home, "--http", "127.0.0.1:0").started()
    assert daemon.stop() == 0
    assert daemon.lines()[0]["event"] == "store.damaged"


def test_the_service_manager_is_told(home: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        manager.settimeout(START_S)
        env = {"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "200000"}
        daemon = Daemon(home, "--http", "127.0.0.1:0", **env)
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
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "fleetd",
            "config",
            "show",
            "--home",
            str(home),
            "--json",
            "--http",
            "127.0.0.1:0",
        ],
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
