"""Interfaces of this machine: kinds, networks, and what macOS and Linux say about them."""

from __future__ import annotations

import ipaddress

import pytest

from fleetd.p2p.discovery import interfaces
from fleetd.p2p.discovery.interfaces import Interface, kind_of, kind_of_interface, parse_hardware_ports

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
