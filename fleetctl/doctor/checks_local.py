"""Doctor's checks of this machine and the daemon's files; they need no daemon."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from fleetctl.connection.home import Address, settings_file
from fleetctl.doctor.findings import Finding, fail, ok, warn
from fleetctl.render.text import one_line, size
from fleetd import limits

DEFAULT_LISTEN = "127.0.0.1:8114"
# 2026-01-01: a clock before this version was written is wrong, and TLS to the model hub fails with it.
_WRITTEN_S = 1_767_225_600.0
_DAY_S = 86_400.0
# The smallest model with its cache; below the second figure a few answers' worth of growth is left.
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = limits.GIB, 5 * limits.GIB
_MEMORY_FAIL_BYTES, _MEMORY_WARN_BYTES = 512 * limits.MIB, 2 * limits.GIB
_CONNECT_S = 1.0


def python(version: tuple[int, int]) -> Finding:
    """Check that Python is 3.11 or newer."""
    found = f"Python {version[0]}.{version[1]} at {sys.executable}"
    if version < (3, 11):
        return fail("python", found, "Install fleetd with Python 3.11 or newer.")
    return ok("python", found)


def clock(home: Path, now_s: float) -> Finding:
    """Check the clock: a wrong one breaks TLS and the days of the usage ledger."""
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s))
    if now_s < _WRITTEN_S:
        return fail(
            "clock", f"It says {shown}, which is in the past.", "Set it, or switch time synchronisation on."
        )
    for path in (home, home / "api-token", home / "fleetd.db"):
        try:
            ahead_s = path.stat().st_mtime - now_s
        except OSError:
            continue
        if ahead_s > _DAY_S:
            return warn(
                "clock",
                f"It says {shown}, but {path} was changed {ahead_s / _DAY_S:.0f} days later.",
                "Check the date; usage is counted per day.",
            )
    return ok("clock", shown)


def home(path: Path, user_id: int) -> Finding:
    """Check that only the owner can read the home: it holds the token and the usage database."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return warn("home", f"{path} does not exist yet.", "The daemon creates it when it first starts.")
    except PermissionError:
        return fail("home", f"{path} cannot be read.", "Run fleetctl as the user that runs the daemon.")
    if not stat.S_ISDIR(found.st_mode):
        return fail("home", f"{path} is not a folder.", "Move it away or choose another --home.")
    if found.st_uid not in (user_id, 0) and user_id != 0:
        return fail(
            "home", f"{path} belongs to user id {found.st_uid}.", "Choose a home of your own with --home."
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return fail("home", f"Others can look into {path} (mode {mode:04o}).", f"chmod 700 {_quoted(path)}")
    if len(os.fsencode(path / "fleetd.sock")) > limits.SOCKET_PATH_BYTES:
        return fail("home", f"{path} is too long a path for a Unix socket.", "Use a shorter --home.")
    return ok("home", str(path))


def private_file(name: str, path: Path, *, kind: str, expected: bool) -> Finding:
    """Check that only the owner can use the token or the socket."""
    try:
        mode = stat.S_IMODE(path.lstat().st_mode)
    except PermissionError:
        return fail(name, f"{path} cannot be examined.", "Run fleetctl as the user that runs the daemon.")
    except OSError:
        if expected:
            return fail(name, f"{path} is missing.", "Restart the daemon: it makes a new one.")
        return ok(name, f"no {kind} yet: the daemon makes it when it starts")
    if mode & 0o077:
        return fail(
            name, f"Others may use the {kind} {path} (mode {mode:04o}).", f"chmod 600 {_quoted(path)}"
        )
    return ok(name, f"{path} is for its owner only")


def listen_address(home_path: Path, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The address at which a daemon of this home would listen; None if that is off or unknown."""
    value = environ.get("FLEETD_HTTP_LISTEN")
    if value is None:
        value = str(settings_file(home_path).get("http", {}).get("listen", DEFAULT_LISTEN))
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or port == "0":
        return None
    return host.strip("[]"), int(port)


def port_free(address: tuple[str, int] | None) -> Finding:
    """Check that no other program has the port. Only for a daemon that does not run."""
    if address is None:
        return ok("port", "no fixed HTTP port is configured")
    host, port = address
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            pass
    except OSError:
        return ok("port", f"{host}:{port} is free")
    find = f"lsof -nP -iTCP:{port}" if sys.platform == "darwin" else f"ss -ltnp sport = :{port}"
    return fail(
        "port",
        f"Another program (or a daemon with another home) listens on {host}:{port}.",
        f"Find it with `{find}`, or start fleetd with --http 127.0.0.1:0.",
    )


def port_answers(address: tuple[str, int]) -> Finding:
    """Check that the HTTP port of the running daemon takes connections."""
    host, port = address
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return ok("port", f"{host}:{port} takes connections")
    except OSError as error:
        return fail(
            "port",
            f"The daemon says it listens on {host}:{port}, but connecting fails: {error.strerror or error}.",
            "Look for a local firewall, or for too many open connections in the daemon's log.",
        )


def disk(path: Path) -> Finding:
    """Check the free space of the disk that holds the models."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    what = f"{size(free)} free for {path}"
    fix = "Free some space: `fleetctl models` lists what is installed, `fleetctl models remove NAME` deletes."
    if free < _DISK_FAIL_BYTES:
        return fail("disk", what, fix)
    return warn("disk", what, fix) if free < _DISK_WARN_BYTES else ok("disk", what)


def memory(available_bytes: int | None, total_bytes: int | None, pressure: str = "") -> Finding:
    """Check the memory that is free for a model. None for a figure reads it on this machine."""
    if available_bytes is None:
        import psutil

        try:
            found = psutil.virtual_memory()
        except Exception as error:  # psutil meets kernels that it does not know
            return ok("memory", f"unknown while no daemon runs: {one_line(str(error))}")
        available_bytes, total_bytes = found.available, found.total
    what = f"{size(available_bytes)} of {size(total_bytes)} available"
    fix = "Close other programs, or unload a model: `fleetctl models unload NAME`."
    if available_bytes < _MEMORY_FAIL_BYTES:
        return fail("memory", what, fix)
    if pressure in ("warning", "critical"):
        return warn("memory", f"{what}, but the system says that it is short (pressure: {pressure})", fix)
    return warn("memory", what, fix) if available_bytes < _MEMORY_WARN_BYTES else ok("memory", what)


def token(address: Address, *, running: bool) -> Finding:
    return private_file("token", address.home / "api-token", kind="API token", expected=running)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
