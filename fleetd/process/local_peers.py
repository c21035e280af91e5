"""Whose the other end of a TCP connection within this machine is.

Any process of any user may connect to a port of the loopback interface. The kernel knows which process has
the other end; it is asked for that as it is of a Unix socket (``peercred``), by what each process has open.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import psutil

from fleetd.process.observe import get_logger

log = get_logger("fleetd.process.local_peers")

_LOOK_S = 1.0
#: Host and port of one end.
Address = tuple[str, int]


def is_of(daemon: int, far: Address, near: Address) -> bool:
    """True if the end at ``far`` of the connection to ``near`` is of the process ``daemon``, or of one that
    it or these have started.

    False if that cannot be known, as of another user's process. Reads the tables of these processes.
    """
    try:
        parent = psutil.Process(daemon)
        return any(_holds(process, far, near) for process in (parent, *parent.children(recursive=True)))
    except psutil.Error:
        return False


def accept(
    listener: socket.socket, daemon: int, within_s: float, ended: Callable[[], bool] = lambda: False
) -> socket.socket:
    """The connection of the first process that comes and is ``daemon`` or started by it; others are sent
    away.

    Args:
        ended: True once nobody waits for it any more. It is asked every second, as macOS does not wake who
            waits for connections at a socket that is shut down.

    Raises OSError, TimeoutError if none comes in time.
    """
    until_s = time.monotonic() + within_s
    while (left_s := until_s - time.monotonic()) > 0 and not ended():
        listener.settimeout(min(left_s, _LOOK_S))
        try:
            found, came_from = listener.accept()
        except TimeoutError:
            continue
        if is_of(daemon, came_from, found.getsockname()):
            return found
        log.warning("loopback.stranger", port=listener.getsockname()[1])
        found.close()
    raise TimeoutError("no process of fleetd came in")


def accepted(port: int) -> list[tuple[Address, Address]]:
    """The far and near ends of this process's connections that came in at a port of 127.0.0.1."""
    found = psutil.Process().net_connections("tcp4")
    return [
        (_address(each.raddr), _address(each.laddr))
        for each in found
        if each.laddr.port == port and each.raddr
    ]


def _holds(process: psutil.Process, far: Address, near: Address) -> bool:
    try:
        found = process.net_connections("tcp4")
    except psutil.Error:  # it has ended meanwhile, or is not ours to look into
        return False
    return any((_address(each.laddr), _address(each.raddr)) == (far, near) for each in found if each.raddr)


def _address(found: Any) -> Address:
    return str(found.ip), int(found.port)
