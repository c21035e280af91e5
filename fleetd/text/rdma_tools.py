"""What the tools of macOS for RDMA over Thunderbolt print, and what its list of Thunderbolt ports says. Pure.

The forms are those of public reports: jundot/omlx#3037 (``rdma_ctl status``, ``ibv_devices`` without any),
Apple's TN3205 (``ibv_devinfo``), exo-explore/exo#1390 (``system_profiler SPThunderboltDataType``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_DEVICE = re.compile(r"^\s*hca_id:\s*(\S+)", re.MULTILINE)
_ACTIVE = re.compile(r"^\s*state:\s*PORT_ACTIVE\b", re.MULTILINE)
_GBPS = re.compile(r"(\d+)\s*Gb/s")
_HARDWARE_PORT = re.compile(r"^Hardware Port: Thunderbolt (\d{1,3})\nDevice: (\S+)$", re.MULTILINE)
_IPV4 = re.compile(r"^\s*inet (\d+\.\d+\.\d+\.\d+)\b", re.MULTILINE)
_PORTS = 32


class ThunderboltPort(msgspec.Struct, frozen=True):
    """A Thunderbolt port of a Mac. ``number``: as macOS counts, 0 if it does not say. ``machine``: the Mac at
    the other end of the cable, "" if there is none. ``gbps``: of the link, or what the port can do without
    one; 0 if unknown. ``product``: the Mac that has the port."""

    number: int
    machine: str
    gbps: int
    product: str = ""


def enabled(status: str) -> bool | None:
    """Whether ``rdma_ctl status`` says that RDMA is on; None if it says neither."""
    words = status.lower().split()
    if "enabled" in words:
        return True
    return False if "disabled" in words else None


def active_devices(devinfo: str) -> list[str]:
    """The devices (``rdma_en3``) whose port ``ibv_devinfo`` calls active."""
    starts = [*_DEVICE.finditer(devinfo)]
    ends = [*(found.start() for found in starts), len(devinfo)][1:]
    return [
        found[1] for found, end in zip(starts, ends, strict=True) if _ACTIVE.search(devinfo, found.end(), end)
    ]


def thunderbolt_ports(profile: str) -> list[ThunderboltPort]:
    """The ports in ``system_profiler -json SPThunderboltDataType``; none if it cannot be read."""
    try:
        listed = json.loads(profile)["SPThunderboltDataType"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    buses = [bus for bus in listed if isinstance(bus, dict)] if isinstance(listed, list) else []
    return [_port(bus) for bus in buses[:_PORTS]]


def interfaces_of_ports(listed: str) -> dict[int, str]:
    """The interface of each Thunderbolt port, by its number, in ``networksetup -listallhardwareports``."""
    return {int(number): device for number, device in _HARDWARE_PORT.findall(listed)}


def ipv4_addresses(shown: str) -> list[str]:
    """The IPv4 addresses of an interface, as ``ifconfig NAME`` shows it."""
    return _IPV4.findall(shown)


def is_before(version: str, first: tuple[int, int]) -> bool:
    """True if a version ("26.1.2") comes before another one; False if it cannot be read."""
    parts = version.strip().split(".")
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        return False
    return tuple(map(int, (*parts, "0")))[:2] < first


def _port(bus: dict[str, Any]) -> ThunderboltPort:
    tag = bus.get("receptacle_1_tag")
    told = tag if isinstance(tag, dict) else {}
    number = str(told.get("receptacle_id_key", ""))
    speed = _GBPS.search(str(told.get("current_speed_key", "")))
    items = bus.get("_items")
    macs = [
        str(item.get("_name", ""))
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and item.get("domain_uuid_key")
    ]
    return ThunderboltPort(
        int(number) if number.isdecimal() and len(number) < 4 else 0,
        macs[0] if macs else "",
        int(speed[1][:4]) if speed else 0,
        str(bus.get("device_name_key", "")),
    )
