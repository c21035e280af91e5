"""Wake on LAN: where this machine listens for it while it sleeps, and the packet that wakes another one.

6 bytes FF | 16 times the hardware address     as a UDP broadcast, to port 9 by custom
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

from fleetd import limits
from fleetd.p2p.discovery import interfaces
from fleetd.process.observe import get_logger

log = get_logger("fleetd.p2p")

_PORT = 9
_ADDRESS = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


def _listed() -> dict[str, list[Any]]:
    """psutil's addresses by interface; none if it cannot read them."""
    try:
        return psutil.net_if_addrs()
    except Exception as error:  # psutil meets kernels that it does not know
        log.debug("wake.no_addresses", error=str(error))
        return {}


def own_addresses() -> list[str]:
    """Hardware addresses of the interfaces that lead to other machines; blocks for a millisecond."""
    shared = {found.name for found in interfaces.read() if found.is_shared}
    found = [
        entry.address.lower().replace("-", ":")
        for name, entries in _listed().items()
        for entry in entries
        if name in shared and entry.family == psutil.AF_LINK
    ]
    return [address for address in found if _ADDRESS.fullmatch(address)][: limits.WAKE_ADDRESSES]


def packet(address: str) -> bytes:
    """Raises ValueError for what is no hardware address of one machine."""
    if not _ADDRESS.fullmatch(address):
        raise ValueError("a hardware address is six pairs of hexadecimal digits")
    raw = bytes.fromhex(address.replace(":", ""))
    if raw[0] & 1:
        raise ValueError("that address is one of many machines")
    return b"\xff" * 6 + raw * 16


def targets() -> list[tuple[str, int]]:
    """The broadcast addresses of all local networks: the general one leaves by one interface alone."""
    networks = [entry.broadcast for entries in _listed().values() for entry in entries]
    found = [host for host in networks if host is not None and re.fullmatch(r"[0-9.]+", host)]
    return [(host, _PORT) for host in dict.fromkeys([*found, "255.255.255.255"])]


def send(addresses: Iterable[str], to: Sequence[tuple[str, int]] | None = None) -> None:
    """Send the packet for each address. What cannot be sent is logged: the machine does not wake then."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.setblocking(False)
        for address in addresses:
            for target in targets() if to is None else to:
                try:
                    sock.sendto(packet(address), target)
                except (OSError, ValueError) as error:
                    log.debug("wake.not_sent", to=target[0], reason=str(error))
