"""What the mesh decides: the actions that its owner carries out."""

from __future__ import annotations

import msgspec

from fleetd.errors import FleetError
from fleetd.p2p.links import Address


class Dial(msgspec.Struct, frozen=True):
    """Connect, and report ``opened`` or ``dial_failed``. ``expected`` "": any member may answer."""

    address: Address
    expected: str


class SendNotify(msgspec.Struct, frozen=True):
    """Send a notification on a session."""

    link: int
    topic: str
    body: bytes


class Drop(msgspec.Struct, frozen=True):
    """Close a session; None closes it without a fault."""

    link: int
    error: FleetError | None


class Retire(msgspec.Struct, frozen=True):
    """Close a session that another one replaced, unless a request runs on it. Repeated until it closes."""

    link: int


class Save(msgspec.Struct, frozen=True):
    """The roster changed: write it to disk, and trust only the machines in it."""


Action = Dial | SendNotify | Drop | Retire | Save
