"""The network interfaces of this machine: the kind of each, and which of them lead to other machines.

``read`` asks the system; the rest is pure. Virtual interfaces (containers, virtual machines, Apple's
peer-to-peer Wi-Fi) are recognised, because their addresses are not announced: on another machine the same
address means another machine.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import psutil

from fleetd import limits
from fleetd.p2p.links import Kind, guess_kind
from fleetd.process.observe import get_logger

log = get_logger("fleetd.discovery")

_VIRTUAL = re.compile(
    r"(docker|br-|veth|virbr|vmnet|vboxnet|vnet|vmenet|lxc|lxd|incus|cni|flannel|cali|podman|kube|nerdctl"
    r"|tap|tun|utun|wg|zt|ppp|ipsec|gif|stf|sit|awdl|llw|anpi|ap\d|dummy|ifb|bridge1\d\d)"
)
_WIFI = re.compile(r"(wl|wlan|wifi|ath|ra)\w*\d")
_HARDWARE_PORT = re.compile(r"^Hardware Port: (.+)\nDevice: (\S+)$", re.MULTILINE)
_SYSFS = Path("/sys/class/net")


class Interface(msgspec.Struct, frozen=True):
    """``addresses`` as they are dialled: link-local IPv6 ones with their scope (``fe80::1%eth0``)."""

    name: str
    kind: Kind
    addresses: tuple[str, ...]
    networks: tuple[str, ...]
    mtu: int
    up: bool
    multicast: bool

    @property
    def is_shared(self) -> bool:
        """True if it may lead to other machines of a local network."""
        return self.up and self.multicast and self.kind not in ("loopback", "virtual", "tailscale")


def read() -> list[Interface]:
    """Read the interfaces; blocks for about a millisecond, on macOS for 0.1 s where one came or went."""
    try:
        stats, listed = psutil.net_if_stats(), psutil.net_if_addrs()
    except Exception as error:  # psutil meets kernels that it does not know
        _say_unread(f"{type(error).__name__}: {error}")
        return []
    ports = _hardware_ports(frozenset(listed))
    found = []
    for name, entries in listed.items():
        inet = [entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        stat = stats.get(name)
        flags = stat.flags.split(",") if stat is not None else []
        addresses = tuple(_dialled(entry.address, name) for entry in inet)
        found.append(
            Interface(
                name=name,
                kind=kind_of_interface(
                    name, addresses, port=ports.get(name, ""), wireless=_is_wireless(name)
                ),
                addresses=addresses,
                networks=tuple(
                    network for entry in inet if (network := _network(entry.address, entry.netmask))
                ),
                mtu=stat.mtu if stat is not None else 0,
                up=stat is not None and stat.isup,
                multicast="multicast" in flags,
            )
        )
    return found


def kind_of_interface(name: str, addresses: Sequence[str], *, port: str = "", wireless: bool = False) -> Kind:
    """Args:
    port: the name of the hardware port on macOS ("Wi-Fi", "Thunderbolt Bridge", "Ethernet").
    wireless: true if Linux lists it as wireless.
    """
    guesses = {guess_kind(address) for address in addresses}
    if name in ("lo", "lo0"):
        return "loopback"
    if name.startswith("tailscale") or "tailscale" in guesses:
        return "tailscale"
    if "Thunderbolt" in port or name.startswith("thunderbolt") or name == "bridge0":
        return "thunderbolt"
    if wireless or port == "Wi-Fi" or _WIFI.match(name):
        return "wifi"
    if _VIRTUAL.match(name):
        return "virtual"
    return "wired"


def kind_of(host: str, interfaces: Sequence[Interface]) -> Kind:
    """The kind of path to ``host``: that of the interface with the longest matching network."""
    bare, _, scope = host.partition("%")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return ""
    best: tuple[tuple[int, bool], Kind] | None = None
    for interface in interfaces:
        if scope and scope == interface.name:
            return interface.kind
        for text in interface.networks:
            network = ipaddress.ip_network(text)
            if not interface.up or scope or address not in network:
                continue
            # Several interfaces without a DHCP server have the network 169.254.0.0/16: among these an address
            # of it is most often at the other end of a Thunderbolt cable.
            rank = (network.prefixlen, interface.kind == "thunderbolt")
            if best is None or best[0] < rank:
                best = (rank, interface.kind)
    return best[1] if best is not None else guess_kind(host)


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Device to port name, from ``networksetup -listallhardwareports``."""
    return {device: port for port, device in _HARDWARE_PORT.findall(text)}


@cache
def _say_unread(error: str) -> None:
    """Once for each error: interfaces are read again and again."""
    log.warning("interfaces.unread", error=error, note="fleetd looks for no machines until they can be read")


@functools.lru_cache(maxsize=1)
def _hardware_ports(_interfaces: frozenset[str]) -> Mapping[str, str]:
    """Device to port name. Read again when an interface came or went: a dock or a Thunderbolt cable."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(
                ["networksetup", "-listallhardwareports"],  # noqa: S607  (a Mac's own; tests put theirs first)
                capture_output=True,
                text=True,
                timeout=limits.PROBE_S,
                check=False,
            )
            return parse_hardware_ports(listed.stdout)
    return {}


def _is_wireless(name: str) -> bool:
    return (_SYSFS / name / "wireless").exists() or (_SYSFS / name / "phy80211").exists()


def _dialled(address: str, name: str) -> str:
    bare = address.partition("%")[0]
    if ":" in bare and ipaddress.ip_address(bare).is_link_local:
        return f"{bare}%{name}"
    return bare


def _network(address: str, netmask: str | None) -> str:
    """The network of an address, or "" if the system has none for it, or a netmask with gaps."""
    bare = address.partition("%")[0]
    if netmask is None:
        return ""
    try:
        if ":" in netmask:
            netmask = str(int(ipaddress.IPv6Address(netmask)).bit_count())
        return str(ipaddress.ip_network(f"{bare}/{netmask}", strict=False))
    except ValueError:
        return ""
