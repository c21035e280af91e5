"""The events of a session, for its owner."""

from __future__ import annotations

import msgspec

from fleetd.errors import FleetError
from fleetd.p2p.session.frames import Hello


class Opened(msgspec.Struct, frozen=True):
    """Both sides have sent Hello: the first event of a session that works."""

    hello: Hello
    version: int


class Requested(msgspec.Struct, frozen=True):
    """A request of the other side. Counts as a message: call `consumed` when its body is taken."""

    stream: int
    method: str
    body: bytes


class MessageReceived(msgspec.Struct, frozen=True):
    """One whole message. Call `consumed` when it is taken."""

    stream: int
    body: bytes


class Ended(msgspec.Struct, frozen=True):
    """The other side sends no more on this stream."""

    stream: int


class Cancelled(msgspec.Struct, frozen=True):
    """The stream is over: the other side, or a bound, ended it."""

    stream: int
    error: FleetError


class Notified(msgspec.Struct, frozen=True):
    topic: str
    body: bytes


class Measured(msgspec.Struct, frozen=True):
    rtt_s: float


class Quiet(msgspec.Struct, frozen=True):
    """Nothing arrived for limits.SUSPECT_S: do not rely on this peer until Resumed."""


class Resumed(msgspec.Struct, frozen=True):
    """The other side sent something after Quiet."""


class Closed(msgspec.Struct, frozen=True):
    """The last event: all streams are over. None after a goodbye of either side."""

    error: FleetError | None


Event = (
    Opened | Requested | MessageReceived | Ended | Cancelled | Notified | Measured | Quiet | Resumed | Closed
)
