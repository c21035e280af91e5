"""The body of GET /fleet/v1/diagnose: the network as the daemon's process sees it.

A fact that is None or "" is unknown.
"""

from __future__ import annotations

import msgspec


class InterfaceView(msgspec.Struct, frozen=True):
    """A network interface. ``multicast``: "ok", or why none passes; "" if it was not tried."""

    name: str = ""
    kind: str = ""
    mtu: int = 0
    addresses: list[str] = []
    multicast: str = ""


class PeerPortView(msgspec.Struct, frozen=True):
    """``reachable``: whether this machine's own address answers on the peer port; None is unknown."""

    host: str = ""
    port: int = 0
    reachable: bool | None = None
    reason: str = ""


class ClockOffset(msgspec.Struct, frozen=True):
    """How far the clock of a peer is ahead of this machine's, in seconds."""

    name: str = ""
    offset_s: float | None = None


class ClockOffsets(msgspec.Struct, frozen=True):
    peers: list[ClockOffset] | None = None


class NetworkDiagnosis(msgspec.Struct, frozen=True):
    """``firewall``: for each firewall that is on, how to open it. ``mtu``: sentences about unusual sizes."""

    interfaces: list[InterfaceView] | None = None
    port: PeerPortView | None = None
    firewall: list[str] | None = None
    mtu: list[str] | None = None
    clock_synchronised: bool | None = None
    clock: ClockOffsets | None = None
