"""The packet of Wake on LAN, where it goes, and which addresses a machine says it listens at."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from fleetd.p2p import wake_on_lan
from fleetd.p2p.discovery import interfaces
from fleetd.p2p.discovery.interfaces import Interface

MAC = "3c:22:fb:01:02:03"


def test_the_packet() -> None:
    made = wake_on_lan.packet(MAC)
    assert made == b"\xff" * 6 + b"\x3c\x22\xfb\x01\x02\x03" * 16
    assert len(made) == 102


@pytest.mark.parametrize(
    "address", ["", "3c:22:fb:01:02", MAC + ":04", "zz:22:fb:01:02:03", "ff:ff:ff:ff:ff:ff"]
)
def test_what_a_card_may_not_make_this_machine_send(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        wake_on_lan.packet(address)


def test_it_is_sent_for_each_address_that_is_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(60)
        wake_on_lan.send(["nonsense", MAC], [("256.0.0.1", 9), listener.getsockname()])
        assert listener.recv(200) == wake_on_lan.packet(MAC)


def test_addresses_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(family: int, address: str, broadcast: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address, broadcast=broadcast)

    found = {
        "lo0": [entry(psutil.AF_LINK, "00:00:00:00:00:00"), entry(socket.AF_INET, "127.0.0.1")],
        "en0": [entry(psutil.AF_LINK, MAC.upper()), entry(socket.AF_INET, "10.0.0.5", "10.0.0.255")],
        "utun3": [entry(socket.AF_INET, "10.8.0.2")],
        "awdl0": [entry(psutil.AF_LINK, "ae:00:00:00:00:01")],
        "en1": [entry(psutil.AF_LINK, "too short"), entry(socket.AF_INET6, "fe80::1", "fe80::ff")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    kinds = {"lo0": "loopback", "en0": "wired", "utun3": "virtual", "awdl0": "virtual", "en1": "wifi"}
    listed = [Interface(name, kind, (), (), 1500, True, True) for name, kind in kinds.items()]  # type: ignore[arg-type]
    monkeypatch.setattr(interfaces, "read", lambda: listed)
    assert wake_on_lan.own_addresses() == [MAC]
    assert wake_on_lan.targets() == [("10.0.0.255", 9), ("255.255.255.255", 9)]


def test_a_kernel_that_psutil_does_not_know_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("sysctl failed")

    monkeypatch.setattr(psutil, "net_if_addrs", broken)
    assert wake_on_lan.own_addresses() == []
    assert wake_on_lan.targets() == [("255.255.255.255", 9)]
