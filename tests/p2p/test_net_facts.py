"""What doctor finds out about this machine's network: probes on loopback, and what their findings mean."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from typing import Any

import pytest
from msgspec.structs import replace

from fleetd import limits
from fleetd.p2p.discovery import interfaces, network_checks
from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.discovery.network_checks import (
    linux_firewalls,
    mtu_hints,
    parse_socketfilterfw,
    probe_multicast,
    probe_port,
    read_clock_synchronised,
    read_firewalls,
)


@pytest.fixture
def local() -> Interface:
    return next(found for found in interfaces.read() if "127.0.0.1" in found.addresses)


# ---- Multicast -------------------------------------------------------------------------------------------


def test_multicast_on_the_loopback_interface_comes_back(local: Interface) -> None:
    fact = probe_multicast(local)
    assert (fact.interface, fact.works, fact.reason) == (local.name, True, "")


def test_multicast_works_over_ipv6_alone() -> None:
    able = [
        found for found in interfaces.read() if found.is_shared and any("%" in a for a in found.addresses)
    ]
    if not able:
        pytest.skip("this machine has no network interface with IPv6")
    scoped = tuple(address for address in able[0].addresses if "%" in address)
    assert probe_multicast(replace(able[0], addresses=scoped)).works


def test_an_interface_without_an_address_or_with_one_that_is_gone_says_so(local: Interface) -> None:
    assert "no address" in probe_multicast(replace(local, addresses=())).reason
    gone = probe_multicast(replace(local, addresses=("192.0.2.254",)))
    assert not gone.works
    assert "no network interface" in gone.reason


def test_a_system_that_refuses_multicast_is_named(local: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*parts: Any) -> int:
        raise OSError(65, "No route to host")

    monkeypatch.setattr(network_checks, "_joined", refuse)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Local Network" in probe_multicast(local).reason


def test_an_echo_that_never_comes_is_waited_for_for_half_a_second_whatever_else_arrives(
    local: Interface, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who sends to the port neither passes for the echo nor prolongs the wait."""
    here, stranger = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with here, stranger:
        stranger.setblocking(False)
        real = here.recv

        class Noisy:
            family = socket.AF_INET

            def settimeout(self, seconds: float) -> None:
                assert 0 < seconds <= limits.MULTICAST_ECHO_S
                here.settimeout(min(seconds, 0.05))

            def recv(self, count: int) -> bytes:
                stranger.send(b"not the token")
                return real(count)

        began = time.monotonic()
        fact = network_checks._echo(local.name, Noisy(), b"token")  # type: ignore[arg-type]
        waited_s = time.monotonic() - began
    assert not fact.works
    assert "firewall" in fact.reason
    assert waited_s >= limits.MULTICAST_ECHO_S


# ---- The port --------------------------------------------------------------------------------------------


def test_a_port_that_answers_and_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe_port("127.0.0.1", port).open
    closed = probe_port("127.0.0.1", port)
    assert not closed.open
    assert f"127.0.0.1:{port} refused" in closed.reason
    assert "Start fleetd" in closed.hint


def test_a_port_behind_a_firewall_that_drops_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []

    def drop(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        asked.append(timeout)
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(socket, "create_connection", drop)
    fact = probe_port("192.168.1.7", 8115)
    assert asked == [limits.PROBE_S]
    assert "firewall drops" in fact.reason
    assert "TCP port 8115" in fact.hint


# ---- Firewalls, MTU, clock -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("Firewall is disabled. (State = 0)\n", "off"),
        ("Firewall is enabled. (State = 1)\n", "on"),
        ("Firewall is blocking all non-essential incoming connections. (State = 2)\n", "blocks everything"),
        ("", None),
        ("socketfilterfw: command not found", None),
        ("(State = 9)", None),
    ],
)
def test_the_firewall_of_macos_is_read(said: str, state: str | None) -> None:
    assert parse_socketfilterfw(said) == state


def test_what_the_firewall_of_macos_means_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(network_checks, "_ask", lambda command: "(State = 2)")
    (fact,) = read_firewalls(8115)
    assert (fact.state, "No other machine" in fact.hint) == ("blocks everything", True)
    monkeypatch.setattr(network_checks, "_ask", lambda command: "")
    assert read_firewalls(8115) == []


def test_firewalls_of_linux_are_told_with_the_commands_that_open_them() -> None:
    (ufw,) = linux_firewalls(ufw_conf="# x\nENABLED=yes\nLOGLEVEL=low\n", firewalld=False, port=9000)
    assert (ufw.state, "9000/tcp" in ufw.hint, "5353/udp" in ufw.hint) == ("on", True, True)
    (ufw,) = linux_firewalls(ufw_conf="ENABLED=no\n", firewalld=False, port=9000)
    assert (ufw.state, ufw.hint) == ("off", "")
    (firewalld,) = linux_firewalls(ufw_conf="", firewalld=True, port=9000)
    assert (firewalld.state, "--add-port=9000/tcp" in firewalld.hint) == ("on", True)
    assert linux_firewalls(ufw_conf="", firewalld=False, port=9000) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mtu": 1500}, ""),
        ({"mtu": 1400}, ""),
        ({"mtu": 1280}, ""),
        ({"mtu": 1279}, "less than the 1280"),
        ({"mtu": 1501}, "1501 bytes"),
        ({"mtu": 9000, "kind": "thunderbolt"}, ""),
        ({"mtu": 65536, "kind": "loopback"}, ""),
        ({"mtu": 9000, "up": False}, ""),
        ({"mtu": 0}, ""),
    ],
)
def test_unusual_packet_sizes_are_pointed_out(changes: dict[str, Any], said: str) -> None:
    usual = Interface("en0", "wired", ("10.0.0.1",), ("10.0.0.0/8",), 1500, True, True)
    hints = mtu_hints([replace(usual, **changes)])
    assert len(hints) == bool(said)
    assert said in "".join(hints)


def test_whether_the_clock_is_kept_right_is_told_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_clock_synchronised() in ((True, False) if sys.platform == "linux" else (None,))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert read_clock_synchronised() is None
