"""The home folder: private, owned by one daemon, and not to be tricked by what lies in it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from fleetd import limits
from fleetd.errors import AlreadyRunning, ConfigError, Forbidden, SocketPathTooLong
from fleetd.storage import paths
from fleetd.storage.paths import HomeFolder, HomeLock


@pytest.fixture
def home(tmp_path: Path) -> HomeFolder:
    made = HomeFolder(tmp_path / "home")
    paths.prepare(made)
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_order_of_homes(tmp_path: Path) -> None:
    env = {"FLEETD_HOME": "/env", "STATE_DIRECTORY": "/var/lib/fleetd:/other"}
    assert paths.resolve(tmp_path, env).root == tmp_path
    assert paths.resolve(None, env).root == Path("/env")
    assert paths.resolve(None, {"STATE_DIRECTORY": env["STATE_DIRECTORY"]}).root == Path("/var/lib/fleetd")
    assert paths.resolve(None, {}).root.name == "fleetd"


def test_a_new_home_is_private(home: HomeFolder) -> None:
    assert mode(home.root) == 0o700
    assert mode(home.cache) == 0o700


def test_a_home_open_to_others_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    paths.prepare(HomeFolder(tmp_path))
    assert mode(tmp_path) == 0o700


def test_a_file_in_place_of_the_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigError, match="home"):
        paths.prepare(HomeFolder(tmp_path / "home"))


def test_anothers_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user id"):
        paths.prepare(HomeFolder(tmp_path))


def test_the_socket_path_limit_is_exact() -> None:
    longest = Path("/" + "x" * (limits.SOCKET_PATH_BYTES - 1))
    paths.check_socket_path(longest)
    with pytest.raises(SocketPathTooLong, match=str(limits.SOCKET_PATH_BYTES + 1)) as caught:
        paths.check_socket_path(Path(f"{longest}x"))
    assert "--home" in caught.value.hint


def test_the_limit_counts_bytes_not_characters() -> None:
    with pytest.raises(SocketPathTooLong):
        paths.check_socket_path(Path("/" + "é" * (limits.SOCKET_PATH_BYTES // 2 + 1)))


def test_a_second_lock_names_the_first_holder(home: HomeFolder) -> None:
    with HomeLock(home):
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
            HomeLock(home).acquire()
    with HomeLock(home):  # released, so free again
        assert home.lock.read_text() == f"{os.getpid()}\n"


def test_symlink_planted_as_lock_file_is_not_truncated(home: HomeFolder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    home.lock.symlink_to(victim)
    with pytest.raises(ConfigError):
        HomeLock(home).acquire()
    assert victim.read_text() == "precious"


def test_a_disk_without_locks_is_no_place_for_a_home(
    home: HomeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS without its lock service: two daemons could own the home."""

    def refuse(fd: int, _operation: int) -> None:
        refused.append(fd)
        raise OSError(errno.ENOLCK, "No locks available")

    refused: list[int] = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="no locks available") as caught:
        HomeLock(home).acquire()
    assert "--home" in caught.value.hint
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(refused[0])


def test_a_dead_socket_is_removed(home: HomeFolder) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(home.socket))
    assert paths.clear_stale_socket(home.socket)
    assert not home.socket.exists()
    assert not paths.clear_stale_socket(home.socket)


def test_a_live_socket_is_kept(home: HomeFolder) -> None:
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(home.socket))
        alive.listen()
        with pytest.raises(AlreadyRunning):
            paths.clear_stale_socket(home.socket)
    assert home.socket.exists()


def test_a_file_in_place_of_the_socket_is_kept(home: HomeFolder) -> None:
    home.socket.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        paths.clear_stale_socket(home.socket)
    assert home.socket.read_text() == "mine"


def test_the_token_is_made_once_and_is_private(home: HomeFolder) -> None:
    token = paths.load_token(home.token)
    assert len(token) > 40
    assert mode(home.token) == 0o600
    assert paths.load_token(home.token) == token
    assert [path.name for path in home.root.iterdir() if "token" in path.name] == ["api-token"]


def test_tokens_differ_between_homes(tmp_path: Path) -> None:
    assert paths.load_token(tmp_path / "a") != paths.load_token(tmp_path / "b")


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o602, 0o666])
def test_a_token_that_others_may_know_is_refused(home: HomeFolder, bits: int) -> None:
    token = paths.load_token(home.token)
    home.token.chmod(bits)
    with pytest.raises(Forbidden, match=f"mode {bits:o}") as refused:
        paths.load_token(home.token)
    assert "chmod 600" in refused.value.hint
    home.token.chmod(0o600)
    assert paths.load_token(home.token) == token


def test_symlink_planted_as_token_is_refused(home: HomeFolder, tmp_path: Path) -> None:
    (tmp_path / "known").write_text("attacker-knows-this")
    home.token.symlink_to(tmp_path / "known")
    with pytest.raises(Forbidden, match="symbolic link"):
        paths.load_token(home.token)


def test_token_of_another_user_is_refused(home: HomeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.load_token(home.token)
    monkeypatch.setattr(os, "geteuid", lambda: home.token.stat().st_uid + 1)
    with pytest.raises(Forbidden, match="belongs to user id"):
        paths.load_token(home.token)


@pytest.mark.parametrize("token", ["", "hunter2", "x" * (paths.TOKEN_LEAST_CHARS - 1)])
def test_a_token_that_can_be_guessed_would_open_the_door(home: HomeFolder, token: str) -> None:
    home.token.write_text(f"{token}\n")
    home.token.chmod(0o600)
    with pytest.raises(ConfigError, match=f"holds {len(token)} characters") as refused:
        paths.load_token(home.token)
    assert "new token" in refused.value.hint
    assert not token or token not in str(refused.value)
