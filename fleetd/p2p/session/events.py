"""What a session tells whoever owns it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.errors import FleetError
from fleetd.p2p.session.frames import Hello


@dataclass(frozen=True, slots=True)
class Opened:
    """Both sides have said hello. The first event of a session that works."""

    hello: Hello
    version: int


@dataclass(frozen=True, slots=True)
class Requested:
    """The other side asks for something. Counts as a message: say `consumed` when its body is taken."""

    stream: int
    method: str
    body: bytes


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """One message, whole. Say `consumed` when it is taken."""

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
    """Nothing came for limits.SUSPECT_S: do not rely on this peer until Heard."""


@dataclass(frozen=True, slots=True)
class Heard:
    """It is back after Quiet."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The last event: all streams are over. None after a goodbye of either side."""

    error: FleetError | None


Event = (
    Opened | Requested | MessageReceived | Ended | Cancelled | Notified | Measured | Quiet | Heard | Closed
)
