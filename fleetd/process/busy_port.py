"""The error for a port that is taken: whether a fleetd has it, and the line to type instead."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Sequence

import psutil

from fleetd.errors import PortInUse
from fleetd.text.host_port import host_port

# The options of `fleetd run`, by the setting that each stands for.
_OPTIONS = {"http.listen": ("--http",), "fleet.listen": ("--listen", "--peer-port")}
# Where each listens that was told nothing.
_DEFAULTS = {"http.listen": ("127.0.0.1", 8114), "fleet.listen": ("0.0.0.0", 8115)}  # noqa: S104
# How far above a taken port the next free one is looked for: other daemons of this host stand in between.
_STEP, _STEPS = 10, 20


def port_in_use(what: str, setting: str, host: str, port: int, *, argv: Sequence[str] = ()) -> PortInUse:
    """The error about ``what``, an address that ``setting`` names.

    ``argv``: the command line; this process's if it is empty.
    """
    option = _OPTIONS[setting][0]
    pid = fleetd_at(port)
    owner = "another program" if pid is None else f"another fleetd (process {pid})"
    line = other_line(list(argv or sys.argv), setting, host, port)
    choose = f"choose another with {option} HOST:PORT (port 0 picks a free one; the setting is {setting})"
    return PortInUse(
        f"{what} {host_port(host, port)} is already in use by {owner}.",
        hint=f"To run this one beside it:\n  {line}\nOr end the other program, or {choose}."
        if line
        else f"End it, or {choose}.",
        param=setting,
    )


def fleetd_at(port: int) -> int | None:
    """The process of this user that is a fleetd and listens at the port; None if none is known."""
    for process in psutil.process_iter(["pid", "uids", "cmdline"]):
        uids, command = process.info["uids"], process.info["cmdline"] or ()
        if uids is None or uids.real != os.getuid() or process.info["pid"] == os.getpid():
            continue
        if not any("fleetd" in os.path.basename(part) for part in command[:3]):
            continue
        try:
            if any(
                each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
                for each in process.net_connections("tcp")
            ):
                return int(process.info["pid"])
        except psutil.Error:
            continue
    return None


def other_line(argv: list[str], setting: str, host: str, port: int) -> str:
    """The command line of `fleetd run` with a free port in place of each taken one; "" for any other."""
    if argv[1:2] != ["run"]:
        return ""
    words = argv[2:]
    for each, default in _DEFAULTS.items():
        said = any(word.partition("=")[0] in _OPTIONS[each] for word in words)
        if each == setting:
            words = _at_free_port(words, each, host, port)
        elif not said and not _is_free(*default):
            # The first fleetd has taken this one too, if it has all that nobody chose.
            words = _at_free_port(words, each, *default)
    return shlex.join(["fleetd", "run", *words])


def _at_free_port(words: list[str], setting: str, host: str, port: int) -> list[str]:
    """The words with an address for the setting whose port is free; the same words if none is found."""
    free = next((at for at in range(port + _STEP, port + _STEP * _STEPS, _STEP) if _is_free(host, at)), None)
    if free is None:
        return words
    kept: list[str] = []
    given = iter(words)
    for word in given:
        name, is_whole, _ = word.partition("=")
        if name not in _OPTIONS[setting]:
            kept.append(word)
        elif not is_whole:
            next(given, None)
    wide = setting == "fleet.listen" and ipaddress.ip_address(host).is_unspecified
    return [*kept, _OPTIONS[setting][0], f"*:{free}" if wide else host_port(host, free)]


def _is_free(host: str, port: int) -> bool:
    """Whether a program could listen there now. Port 0 is a free one."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except (OSError, OverflowError):
        return False
