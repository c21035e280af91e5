"""What doctor says of RDMA over Thunderbolt, by what the programs of Macs were recorded to print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from finding_levels import level
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.doctor import checks_rdma
from fleetctl.doctor.findings import Finding
from fleetctl.service.managers import CommandResult
from fleetd.hardware import rdma
from fleetd.text import rdma_tools

# exo-explore/exo#1390: a Mac mini with a Mac Studio at its third port, shortened and as JSON.
LINKED: dict[str, Any] = {
    "_name": "thunderboltusb4_bus_2",
    "device_name_key": "Mac mini",
    "domain_uuid_key": "7F158861",
    "receptacle_1_tag": {
        "current_speed_key": "80 Gb/s",
        "link_status_key": "0x2",
        "receptacle_id_key": "3",
        "receptacle_status_key": "receptacle_connected",
    },
    "_items": [{"_name": "Mac Studio", "device_name_key": "Mac16,9", "domain_uuid_key": "88F10ACA"}],
}
# SirsiMaster/sirsi-pantheon: a port with nothing plugged in.
EMPTY: dict[str, Any] = {
    "_name": "thunderboltusb4_bus_1",
    "device_name_key": "Mac mini",
    "receptacle_1_tag": {
        "current_speed_key": "Up to 120 Gb/s",
        "link_status_key": "0x100",
        "receptacle_id_key": "2",
        "receptacle_status_key": "receptacle_no_devices_connected",
    },
}
# A disk is no Mac: it has no domain.
DISK: dict[str, Any] = {**LINKED, "_items": [{"_name": "Express 1M2 80G"}]}
# ml-explore/mlx#3207.
HARDWARE_PORTS = """\
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt 3
Device: en4
Ethernet Address: 00:00:00:00:00:03

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:04
"""
# Apple's TN3205, with a port that has no cable.
DEVINFO = """\
hca_id:\trdma_en4
\ttransport:\t\t\tThunderbolt (100)
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
hca_id:\trdma_en3
\ttransport:\t\t\tThunderbolt (100)
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
"""
# ml-explore/mlx#4191 has the addresses of a port before and after it was given one.
WITHOUT_ADDRESS = """\
en4: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 16384
\tether 00:00:00:00:00:03
\tinet6 fe80::347c:94ff:fecd:45c4%en4 prefixlen 64 secured scopeid 0xf
\tmedia: autoselect <full-duplex>
\tstatus: active
"""
WITH_ADDRESS = WITHOUT_ADDRESS.replace(
    "\tmedia", "\tinet 169.254.10.1 netmask 0xffff0000 broadcast 169.254.255.255\n\tmedia"
)


class MacRdma:
    """The programs of a Mac. ``missing``: those that it does not have."""

    def __init__(self, *buses: dict[str, Any], missing: Sequence[str] = (), **said: str) -> None:
        self.asked: list[str] = []
        self._missing = missing
        self._said = {
            "system_profiler": json.dumps({"SPThunderboltDataType": list(buses)}),
            "networksetup": HARDWARE_PORTS,
            "sw_vers": "26.5.1\n",
            "rdma_ctl": "enabled\n",
            "ibv_devinfo": DEVINFO,
            "ifconfig": WITH_ADDRESS,
            **said,
        }

    def __call__(self, arguments: Sequence[str]) -> CommandResult:
        self.asked.append(arguments[0])
        if arguments[0] in self._missing:
            return CommandResult(127, f"{arguments[0]}: not found")
        return CommandResult(0, self._said[arguments[0]])


def one(mac: MacRdma) -> Finding:
    (found,) = checks_rdma.rdma("darwin", mac)
    level(found)
    return found


def test_a_mac_that_has_all_it_needs_is_told_what_is_left_to_do() -> None:
    found = one(MacRdma(EMPTY, LINKED))
    assert found.level == "ok"
    assert "ready to Mac Studio" in found.what
    assert "fleet.plain_links" in found.what


@pytest.mark.parametrize(
    ("mac", "what", "fix"),
    [
        (MacRdma(LINKED, sw_vers="15.7.9\n"), "needs macOS 26.2, and this is 15.7.9", "softwareupdate"),
        (MacRdma(LINKED, sw_vers="26.1\n"), "needs macOS 26.2, and this is 26.1", "softwareupdate"),
        (MacRdma(LINKED, rdma_ctl="disabled\n"), "is off", "`rdma_ctl enable`"),
        (MacRdma(LINKED, missing=["rdma_ctl"]), "is off", "Utilities → Terminal"),
        (
            MacRdma(LINKED, ifconfig=WITHOUT_ADDRESS),
            "(en4) has no IPv4 address",
            "`sudo ifconfig en4 inet 169.254.10.1 netmask 255.255.0.0 alias`",
        ),
        # jundot/omlx#3037: the list of devices is empty.
        (MacRdma(LINKED, ibv_devinfo="No IB devices found\n"), "rdma_en4) is not linked", "Mac Studio says"),
        (MacRdma(LINKED, networksetup=""), "at which interface", "networksetup"),
    ],
)
def test_what_is_missing_comes_with_what_to_type(mac: MacRdma, what: str, fix: str) -> None:
    found = one(mac)
    assert found.level == "warn"
    assert what in found.what
    assert fix in found.fix


def test_a_cable_in_the_port_beside_ethernet_of_a_studio_has_to_be_moved() -> None:
    ports = HARDWARE_PORTS.replace("en4", "en2")
    studio = {**LINKED, "device_name_key": "Mac Studio"}
    found = one(MacRdma(studio, networksetup=ports))
    assert found.level == "warn"
    assert "beside Ethernet (en2)" in found.what
    # On another Mac en2 is a port like others.
    assert "beside Ethernet" not in one(MacRdma(LINKED, networksetup=ports)).what


def test_thunderbolt_4_is_nothing_to_repair() -> None:
    # jundot/omlx#3037: advice to enable RDMA would never end for it.
    slow = {**LINKED, "receptacle_1_tag": {**LINKED["receptacle_1_tag"], "current_speed_key": "40 Gb/s"}}
    found = one(MacRdma(slow, rdma_ctl="disabled\n"))
    assert found.level == "ok"
    assert "carries 40 Gbit/s" in found.what


@pytest.mark.parametrize("buses", [[], [EMPTY], [EMPTY, DISK]])
def test_without_another_mac_at_a_cable_nothing_is_said_and_little_is_asked(buses: list[Any]) -> None:
    mac = MacRdma(*buses)
    assert checks_rdma.rdma("darwin", mac) == []
    assert mac.asked == ["system_profiler"]


def test_other_systems_have_no_such_ports() -> None:
    mac = MacRdma(LINKED)
    assert checks_rdma.rdma("linux", mac) == []
    assert mac.asked == []


@given(st.text(max_size=300), st.text(max_size=300))
def test_whatever_programs_print_is_judged_without_an_error(profile: str, other: str) -> None:
    said = dict.fromkeys(("networksetup", "sw_vers", "rdma_ctl", "ibv_devinfo", "ifconfig"), other)
    checks_rdma.rdma("darwin", MacRdma(LINKED, **said))
    checks_rdma.rdma("darwin", MacRdma(system_profiler=profile))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["SPThunderboltDataType", "receptacle_1_tag", "_items", "receptacle_id_key"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_a_profile_of_any_form_is_read(profile: Any) -> None:
    for port in rdma_tools.thunderbolt_ports(json.dumps(profile)):
        assert 0 <= port.number < 1000


def test_the_daemon_asks_for_devices_on_a_mac_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rdma.active("linux") == []
    program = tmp_path / "ibv_devinfo"
    program.write_text(f"#!/bin/sh\ncat <<'end'\n{DEVINFO}end\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert rdma.active("darwin") == ["rdma_en4"]
    program.unlink()
    assert rdma.active("darwin") == []
