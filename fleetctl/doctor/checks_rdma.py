"""Doctor's check of what a Mac needs so that models divided with another Mac can use RDMA over Thunderbolt.

It says nothing of Macs that have no other Mac at the end of a cable: they need none of this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from fleetctl.doctor.findings import Finding, ok, warn
from fleetctl.render.text import listed, one_line
from fleetctl.service.managers import RequestRunner, run_command
from fleetd.text import rdma_tools
from fleetd.text.rdma_tools import ThunderboltPort

# RDMA over Thunderbolt came with this version of macOS, for links of Thunderbolt 5.
FIRST_MACOS = (26, 2)
THUNDERBOLT_5_GBPS = 80
# The port beside Ethernet of a Mac Studio, which has no RDMA (exo-explore/exo#1551).
_STUDIO, _BESIDE_ETHERNET = "Mac Studio", "en2"
_RECOVERY = (
    "Shut the Mac down, hold its power button until it shows options, choose Options, then Utilities → "
    "Terminal, type `rdma_ctl enable` there, and restart. The other Mac needs the same."
)


class RdmaFacts(msgspec.Struct, frozen=True):
    """What the programs of this Mac say. ``interfaces``: by number of a Thunderbolt port. ``addresses``: of
    IPv4, by interface. ``enabled``: None if ``rdma_ctl`` is not there. ``active``: RDMA devices that are
    linked."""

    version: str
    enabled: bool | None
    active: list[str]
    ports: list[ThunderboltPort]
    interfaces: Mapping[int, str]
    addresses: Mapping[str, list[str]]


def rdma(platform: str = sys.platform, run: RequestRunner = run_command) -> list[Finding]:
    """Check this Mac if a cable leads to another one."""
    return judge(facts(run)) if platform == "darwin" else []


def facts(run: RequestRunner) -> RdmaFacts:
    """Ask the programs of this Mac; no more than which ports there are if no other Mac is at one."""
    ports = rdma_tools.thunderbolt_ports(run(["system_profiler", "-json", "SPThunderboltDataType"]).output)
    if not any(port.machine for port in ports):
        return RdmaFacts("", None, [], ports, {}, {})
    interfaces = rdma_tools.interfaces_of_ports(run(["networksetup", "-listallhardwareports"]).output)
    names = [interfaces[port.number] for port in ports if port.machine and port.number in interfaces]
    return RdmaFacts(
        one_line(run(["sw_vers", "-productVersion"]).output),
        rdma_tools.enabled(run(["rdma_ctl", "status"]).output),
        rdma_tools.active_devices(run(["ibv_devinfo"]).output),
        ports,
        interfaces,
        {name: rdma_tools.ipv4_addresses(run(["ifconfig", name]).output) for name in names},
    )


def judge(found: RdmaFacts) -> list[Finding]:
    """The first thing that is missing, or a finding for each cable to another Mac."""
    cables = [port for port in found.ports if port.machine]
    if not cables:
        return []
    fast = [port for port in cables if port.gbps >= THUNDERBOLT_5_GBPS]
    if not fast:
        to = one_line(listed([port.machine for port in cables]))
        what = f"the cable to {to} carries {max(port.gbps for port in cables)} Gbit/s; RDMA has Thunderbolt 5"
        return [ok("RDMA", f"{what} only, so models are divided over TCP")]
    if rdma_tools.is_before(found.version, FIRST_MACOS):
        first = ".".join(map(str, FIRST_MACOS))
        what = f"RDMA over Thunderbolt needs macOS {first}, and this is {found.version}."
        return [warn("RDMA", what, "Update macOS: `softwareupdate --list` shows what there is.")]
    if found.enabled is not True:
        what = "RDMA over Thunderbolt is off (`rdma_ctl status`), so divided models use TCP."
        return [warn("RDMA", what, _RECOVERY)]
    return [_cable(port, found) for port in fast]


def _cable(port: ThunderboltPort, found: RdmaFacts) -> Finding:
    """The finding for one cable of a Mac on which RDMA is on."""
    to, name = one_line(port.machine), one_line(found.interfaces.get(port.number, ""))
    if not name:
        what = f"macOS does not say at which interface the cable to {to} is."
        return warn("RDMA", what, "`networksetup -listallhardwareports` lists them; plug the cable in again.")
    if port.product == _STUDIO and name == _BESIDE_ETHERNET:
        what = f"The cable to {to} is in the port beside Ethernet ({name}), which has no RDMA."
        return warn("RDMA", what, "Plug it into another Thunderbolt port.")
    if not found.addresses.get(name):
        what = f"The port of the cable to {to} ({name}) has no IPv4 address, which RDMA needs to find {to}."
        fix = (
            f"`sudo ifconfig {name} inet 169.254.10.1 netmask 255.255.0.0 alias`; on {to} with another last "
            "number. If the port belongs to the Thunderbolt Bridge, remove that in System Settings first."
        )
        return warn("RDMA", what, fix)
    if f"rdma_{name}" not in found.active:
        what = f"RDMA is on, and its device at the cable to {to} (rdma_{name}) is not linked (`ibv_devinfo`)."
        return warn("RDMA", what, f"See that `rdma_ctl status` on {to} says enabled, too.")
    return ok("RDMA", f"ready to {to}; if both Macs have {name}'s link in fleet.plain_links, it is used")
