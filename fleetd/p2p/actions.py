"""What the mesh decides: the actions that its owner carries out."""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.errors import FleetError
from fleetd.p2p.links import Address


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect, and report ``opened`` or ``dial_failed``. ``expected`` "": any member may answer."""

    address: Address
    expected: str


@dataclass(frozen=True, slots=True)
class SendNotify:
    """Send a notification on a session."""

    link: int
    topic: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a session; None closes it without a fault."""

    link: int
    error: FleetError | None


@dataclass(frozen=True, slots=True)
class Retire:
    """Close a session that another one replaced, unless a request runs on it. Repeated until it closes."""

    link: int


@dataclass(frozen=True, slots=True)
class Save:
    """The roster changed: write it to disk, and trust only the machines in it."""


Action = Dial | SendNotify | Drop | Retire | Save
