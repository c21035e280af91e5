"""The events of a session, for its owner."""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.errors import FleetError
from fleetd.p2p.session.frames import Hello


@dataclass(frozen=True, slots=True)
class Opened:
    """Both sides have sent Hello: the first event of a session that works."""

    hello: Hello
    version: int


@dataclass(frozen=True, slots=True)
class Requested:
    """A request of the other side. Counts as a message: call `consumed` when its body is taken."""

    stream: int
    method: str
    body: bytes


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """One whole message. Call `consumed` when it is taken."""

    stream: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The other side sends no more on this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The stream is over: the other side, or a bound, ended it."""

    stream: int
    error: FleetError


@dataclass(frozen=True, slots=True)
class Notified:
    topic: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Measured:
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing arrived for limits.SUSPECT_S: do not rely on this peer until Resumed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The other side sent something after Quiet."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The last event: all streams are over. None after a goodbye of either side."""

    error: FleetError | None


Event = (
    Opened | Requested | MessageReceived | Ended | Cancelled | Notified | Measured | Quiet | Resumed | Closed
)
