"""Checks for ``fleetctl doctor``: multicast, the peer port, firewalls, MTU, clock.

The functions ``probe_*`` and ``read_*`` block, are bounded by ``limits`` and need no privileges; the other
functions interpret the facts and are pure. ``None`` means that the system does not show the fact.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fleetd import limits
from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.discovery.unreachable import explain, explain_multicast

Firewall = Literal["off", "on", "blocks everything"]

# The group of mDNS, so that switches and filters treat the probe alike; on another port.
_GROUP_V4, _GROUP_V6 = "224.0.0.251", "ff02::fb"
_USUAL_MTU, _LEAST_MTU = 1500, 1280
_SOCKETFILTERFW = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_STATE = re.compile(r"State = (\d)")
_TIME_ERROR = 5  # the result of adjtimex(2) for a clock that is not synchronised
_TIMEX_BYTES = 512  # struct timex is 208 bytes on 64-bit Linux


class MulticastFact(msgspec.Struct, frozen=True):
    """Whether multicast on an interface returns to this machine; ``reason`` says why not."""

    interface: str
    works: bool
    reason: str = ""


class PortFact(msgspec.Struct, frozen=True):
    """Whether the peer port answers at one of this machine's own addresses."""

    address: str
    open: bool
    reason: str = ""
    hint: str = ""


class FirewallFact(msgspec.Struct, frozen=True):
    """A firewall of this machine. ``hint``: how to let the fleet through, where it may be in the way."""

    name: str
    state: Firewall
    hint: str = ""


# ---- Multicast -------------------------------------------------------------------------------------------


def probe_multicast(interface: Interface) -> MulticastFact:
    """Send one datagram to the mDNS group on an interface, and wait for its echo."""
    addresses = sorted(interface.addresses, key=lambda text: ":" in text)
    if not addresses:
        return MulticastFact(interface.name, False, "it has no address")
    token = os.urandom(16)
    try:
        with contextlib.closing(_joined(interface.name, addresses[0])) as sock:
            group = _GROUP_V6 if sock.family == socket.AF_INET6 else _GROUP_V4
            scope = socket.if_nametoindex(interface.name)
            port = sock.getsockname()[1]
            sock.sendto(token, (group, port, 0, scope) if group == _GROUP_V6 else (group, port))
            return _echo(interface.name, sock, token)
    except OSError as error:
        return MulticastFact(interface.name, False, explain_multicast(error, sys.platform))


def _joined(name: str, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            index = socket.if_nametoindex(name).to_bytes(4, sys.byteorder)
            sock.bind(("::", 0))
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
            group = socket.inet_pton(family, _GROUP_V6) + index
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        else:
            local = socket.inet_aton(address)
            sock.bind(("", 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, local)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP_V4) + local)
    except OSError:
        sock.close()
        raise
    return sock


def _echo(name: str, sock: socket.socket, token: bytes) -> MulticastFact:
    """Wait for the token; other datagrams are skipped and do not prolong the wait."""
    deadline = time.monotonic() + limits.MULTICAST_ECHO_S
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            if sock.recv(2048) == token:
                return MulticastFact(name, True)
        except TimeoutError:
            break
    return MulticastFact(
        name,
        False,
        "multicast that this machine sends does not come back to it; its firewall may drop UDP",
    )


# ---- The peer port ---------------------------------------------------------------------------------------


def probe_port(host: str, port: int) -> PortFact:
    """Connect to this machine's own peer port as another machine would; it closes the connection unread."""
    try:
        with socket.create_connection((host, port), timeout=limits.PROBE_S):
            return PortFact(host, True)
    except OSError as error:
        reason, hint = explain(error, host, port, sys.platform)
        return PortFact(host, False, reason, hint)


# ---- Firewalls -------------------------------------------------------------------------------------------


def read_firewalls(port: int) -> list[FirewallFact]:
    """The firewalls whose state can be read without privileges."""
    if sys.platform == "darwin":
        state = parse_socketfilterfw(_ask([_SOCKETFILTERFW, "--getglobalstate"]))
        return [] if state is None else [application_firewall(state)]
    return linux_firewalls(
        ufw_conf=_text(Path("/etc/ufw/ufw.conf")), firewalld=Path("/run/firewalld").exists(), port=port
    )


def parse_socketfilterfw(output: str) -> Firewall | None:
    """The state in the output of ``socketfilterfw --getglobalstate``, which ends in "(State = 1)"."""
    states: dict[str, Firewall] = {"0": "off", "1": "on", "2": "blocks everything"}
    found = _STATE.search(output)
    return states.get(found[1]) if found else None


def application_firewall(state: Firewall) -> FirewallFact:
    where = "System Settings, Network, Firewall"
    hints: dict[Firewall, str] = {
        "off": "",
        "on": f"If other machines cannot reach this one, allow fleetd's Python in {where}, Options.",
        "blocks everything": f"No other machine can reach this one: turn that off in {where}, Options.",
    }
    return FirewallFact("macOS application firewall", state, hints[state])


def linux_firewalls(*, ufw_conf: str, firewalld: bool, port: int) -> list[FirewallFact]:
    """Args:
    ufw_conf: the text of ufw's configuration, "" where there is none or it cannot be read.
    firewalld: whether firewalld runs.
    """
    found = []
    if ufw_conf:
        enabled = any(line.strip().lower() == "enabled=yes" for line in ufw_conf.splitlines())
        hint = f"sudo ufw allow {port}/tcp && sudo ufw allow 5353/udp" if enabled else ""
        found.append(FirewallFact("ufw", "on" if enabled else "off", hint))
    if firewalld:
        opened = f"--add-port={port}/tcp --add-service=mdns"
        hint = f"sudo firewall-cmd --permanent {opened} && sudo firewall-cmd --reload"
        found.append(FirewallFact("firewalld", "on", hint))
    return found


# ---- MTU and clock ---------------------------------------------------------------------------------------


def mtu_hints(interfaces: Sequence[Interface]) -> list[str]:
    """Sentences about interfaces whose packets other machines may not receive."""
    found = []
    for interface in interfaces:
        if not interface.is_shared or not interface.mtu:
            continue
        if interface.mtu > _USUAL_MTU and interface.kind != "thunderbolt":
            found.append(
                f"{interface.name} sends packets of {interface.mtu} bytes. Every machine and switch on that "
                f"network has to take them, or large transfers hang while small ones work."
            )
        elif interface.mtu < _LEAST_MTU:
            found.append(
                f"{interface.name} has an MTU of {interface.mtu}, less than the {_LEAST_MTU} that IPv6 needs."
            )
    return found


def read_clock_synchronised() -> bool | None:
    """Whether this machine's clock is synchronised; None except on Linux."""
    if sys.platform != "linux":
        return None
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _ask(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limits.PROBE_S, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
