"""Interfaces of this machine: kinds, networks, and what macOS and Linux say about them."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from machines import machine

from fleetd.p2p.discovery import interfaces
from fleetd.p2p.discovery.interfaces import Interface, kind_of, kind_of_interface, parse_hardware_ports
from fleetd.p2p.links import PeerPaths
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.mesh import Mesh

HARDWARE_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:11:22:33:44:55

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:11:22:33:44:56

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:11:22:33:44:57

VLAN Configurations
===================
"""


@pytest.mark.parametrize(
    ("name", "addresses", "port", "wireless", "kind"),
    [
        ("lo", ["127.0.0.1"], "", False, "loopback"),
        ("lo0", ["127.0.0.1", "::1"], "", False, "loopback"),
        ("en0", ["192.168.1.5"], "Ethernet", False, "wired"),
        ("en0", ["192.168.1.5"], "Wi-Fi", False, "wifi"),
        ("en1", [], "Thunderbolt 1", False, "thunderbolt"),
        ("bridge0", ["169.254.1.1"], "Thunderbolt Bridge", False, "thunderbolt"),
        ("bridge0", ["10.0.9.1"], "", False, "thunderbolt"),
        ("bridge100", ["192.168.64.1"], "", False, "virtual"),
        ("thunderbolt0", ["10.0.9.1"], "", False, "thunderbolt"),
        ("eth0", ["169.254.1.1"], "", False, "wired"),
        ("enp3s0", ["10.0.0.1"], "", False, "wired"),
        ("br0", ["10.0.0.1"], "", False, "wired"),
        ("wlp2s0", ["10.0.0.1"], "", False, "wifi"),
        ("enx00", ["10.0.0.1"], "", True, "wifi"),
        ("tailscale0", [], "", False, "tailscale"),
        ("utun4", ["100.70.0.1"], "", False, "tailscale"),
        ("utun3", ["10.8.0.2"], "", False, "virtual"),
        ("docker0", ["172.17.0.1"], "", False, "virtual"),
        ("br-8f3a", ["172.18.0.1"], "", False, "virtual"),
        ("veth12", [], "", False, "virtual"),
        ("awdl0", ["fe80::1%awdl0"], "", False, "virtual"),
        ("ap1", [], "", False, "virtual"),
    ],
)
def test_kinds(name: str, addresses: list[str], port: str, wireless: bool, kind: str) -> None:
    assert kind_of_interface(name, addresses, port=port, wireless=wireless) == kind


def test_what_macos_calls_its_ports_is_read() -> None:
    assert parse_hardware_ports(HARDWARE_PORTS) == {
        "en0": "Ethernet",
        "en1": "Wi-Fi",
        "bridge0": "Thunderbolt Bridge",
    }
    assert parse_hardware_ports("") == parse_hardware_ports("You need administrator access.") == {}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A Mac with these ports, each with an address; networksetup is a fake on the PATH."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "networksetup"

    def plug(**ports: str) -> None:
        listed = "".join(f"Hardware Port: {port}\nDevice: {name}\n\n" for name, port in ports.items())
        program.write_text(f"#!/bin/sh\ncat <<'end'\n{listed}end\n")
        program.chmod(0o755)
        addresses = {
            name: [
                SimpleNamespace(family=socket.AF_INET, address=f"10.0.{number}.1", netmask="255.255.255.0")
            ]
            for number, name in enumerate(ports)
        }
        stats = dict.fromkeys(ports, SimpleNamespace(isup=True, mtu=1500, flags="up,broadcast,multicast"))
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)

    yield plug
    interfaces._hardware_ports.cache_clear()


def test_a_port_that_is_plugged_in_later_is_looked_at(mac: Callable[..., None]) -> None:
    mac(en0="Ethernet", en1="Wi-Fi")
    assert {found.name: found.kind for found in interfaces.read()} == {"en0": "wired", "en1": "wifi"}
    mac(en0="Ethernet", en1="Wi-Fi", en5="Thunderbolt Ethernet Slot 1", bridge0="Thunderbolt Bridge")
    found = {found.name: found.kind for found in interfaces.read()}
    assert (found["en5"], found["bridge0"], found["en1"]) == ("thunderbolt", "thunderbolt", "wifi")


def test_a_known_address_is_of_the_kind_of_the_new_path(mac: Callable[..., None]) -> None:
    mac(en0="Ethernet")
    roster, other = Roster(machine(0)), machine(1).node_id
    roster.admit(machine(1).certificate, "studio", True)
    known = [interfaces.read()]
    mesh = Mesh(
        machine(0).node_id, roster, random=lambda: 0.5, now=0.0, kind_of=lambda host: kind_of(host, known[0])
    )
    mesh.address_seen(other, [("10.0.1.7", 8115)], "mdns", 0.0)
    assert [path.kind for path in mesh.peers[other].paths] == [""]
    mac(en0="Ethernet", en5="Thunderbolt Ethernet Slot 1")
    known[0] = interfaces.read()
    mesh.interfaces_changed()
    assert [path.kind for path in mesh.peers[other].paths] == ["thunderbolt"]


@pytest.mark.parametrize(
    ("address", "netmask", "network"),
    [
        ("10.1.2.3", "255.255.255.0", "10.1.2.0/24"),
        ("fe80::1%en0", "ffff:ffff:ffff:ffff::", "fe80::/64"),
        ("10.1.2.3", None, ""),
        ("10.1.2.3", "255.0.255.0", ""),
        ("10.1.2.3", "no mask", ""),
        ("no address", "255.255.255.0", ""),
    ],
)
def test_a_netmask_that_makes_no_network_costs_no_start(
    address: str, netmask: str | None, network: str
) -> None:
    assert interfaces._network(address, netmask) == network


def test_the_kind_of_a_way_is_that_of_the_narrowest_network_around_the_address() -> None:
    def interface(name: str, kind: str, *networks: str, up: bool = True) -> Interface:
        return Interface(name, kind, (), networks, 1500, up, True)  # type: ignore[arg-type]

    found = [
        interface("en0", "wired", "10.0.0.0/8", "fe80::/64"),
        interface("en1", "wifi", "10.1.0.0/16", "fe80::/64"),
        interface("en7", "thunderbolt", "10.1.2.0/24", up=False),
    ]
    ways = {host: kind_of(host, found) for host in ("10.9.9.9", "10.1.2.3", "fe80::9%en1", "fe80::9%en0")}
    assert ways == {"10.9.9.9": "wired", "10.1.2.3": "wifi", "fe80::9%en1": "wifi", "fe80::9%en0": "wired"}
    assert kind_of("100.70.0.9", found) == "tailscale"
    assert kind_of("8.8.8.8", found) == kind_of("studio.local", found) == ""


def test_this_machine_has_a_loopback_interface_that_is_not_shared() -> None:
    found = {interface.name: interface for interface in interfaces.read()}
    local = next(interface for interface in found.values() if "127.0.0.1" in interface.addresses)
    assert (local.kind, local.up, local.is_shared) == ("loopback", True, False)
    assert any(ipaddress.ip_address("127.0.0.1") in ipaddress.ip_network(text) for text in local.networks)
    for interface in found.values():
        for address in interface.addresses:
            scoped = ipaddress.ip_address(address)
            assert not (scoped.is_link_local and scoped.version == 6) or address.endswith(
                f"%{interface.name}"
            )


def test_an_address_without_a_dhcp_server_is_at_the_end_of_the_thunderbolt_cable() -> None:
    own = "169.254.0.0/16"
    found = [
        Interface("en0", "wifi", ("169.254.7.1",), (own,), 1500, True, True),
        Interface("bridge0", "thunderbolt", ("169.254.3.1",), (own,), 1500, True, True),
        Interface("en9", "wired", ("169.254.8.1",), (own,), 1500, True, True),
    ]
    assert kind_of("169.254.9.9", found) == "thunderbolt"
    assert kind_of("169.254.9.9", found[:1]) == "wifi"


def test_between_a_cable_and_wifi_streams_take_the_cable_until_it_is_measured_to_be_slower() -> None:
    found = [
        Interface("en0", "wifi", ("192.168.1.2",), ("192.168.1.0/24",), 1500, True, True),
        Interface("bridge0", "thunderbolt", ("169.254.3.1",), ("169.254.0.0/16",), 1500, True, True),
    ]
    paths = PeerPaths(lambda host: kind_of(host, found))
    wifi, cable = ("192.168.1.9", 8115), ("169.254.9.9", 8115)
    for address in (wifi, cable):
        paths.add(address, "mdns", 0.0)
        paths.succeeded(address, 0.0)
    assert paths.order(0.0) == [cable, wifi]
    # Wi-Fi is measured first, and is faster than most.
    paths.transferred(wifi, 8 << 20, 0.05, 1.0)
    assert paths.best_for_bulk() == cable
    for at_s in (2.0, 3.0, 4.0):
        paths.transferred(cable, 8 << 20, 1.0, at_s)
    assert paths.best_for_bulk() == wifi
