"""Two sessions joined by a wire that the test controls; both are validated after every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.p2p.session.events import Cancelled, Closed, Event, Opened, Requested
from fleetd.p2p.session.frames import Frame, FrameBuffer, Hello, encode
from fleetd.p2p.session.session import Session
from fleetd.p2p.session.states import StreamState

Events = list[Event]


def hello(letter: str, versions: tuple[int, int] = (1, 1)) -> Hello:
    return Hello(versions, letter * 56, f"mac-{letter}", 7, "fleetd 0.1", b"r" * 16, 8115, ["x"])


def frames(data: bytes) -> list[Frame]:
    return list(FrameBuffer().feed(data))


def sent(session: Session) -> list[Frame]:
    """Everything that a session has to say now, as frames. Nothing of it may have been taken in part."""
    return frames(drain(session))


def drain(session: Session) -> bytes:
    return b"".join(iter(session.data_to_send, b""))


def feed(session: Session, *said: Frame, now: float = 0.0) -> Events:
    return session.receive(b"".join(map(encode, said)), now)


def opened(*, initiator: bool = True, now: float = 0.0) -> Session:
    """A session that has shaken hands with nobody in particular and has nothing left to say."""
    session = Session(hello=hello("a"), initiator=initiator, now=now)
    feed(session, hello("b"), now=now)
    drain(session)
    return session


class SessionWire:
    """``a`` dialled ``b``. Bytes move when asked; all times are the test's."""

    def __init__(self, a: Hello | None = None, b: Hello | None = None) -> None:
        self.a = Session(hello=a or hello("a"), initiator=True, now=0.0)
        self.b = Session(hello=b or hello("b"), initiator=False, now=0.0)
        self.at_a: Events = []
        self.at_b: Events = []
        self.bytes = 0

    def step(self, now: float = 0.0, limit: int = limits.PEER_WRITE_BUFFER_BYTES) -> bool:
        """One write of each side; whether there was any."""
        forth, back = self.a.data_to_send(limit), self.b.data_to_send(limit)
        self.bytes += len(forth) + len(back)
        self.at_b += self.b.receive(forth, now)
        self.at_a += self.a.receive(back, now)
        self.a.validate()
        self.b.validate()
        return bool(forth or back)

    def settle(self, now: float = 0.0) -> SessionWire:
        while self.step(now):
            pass
        return self

    def take(self) -> tuple[Events, Events]:
        """Events at both sides since the last time."""
        taken = self.at_a, self.at_b
        self.at_a, self.at_b = [], []
        return taken


def wired() -> SessionWire:
    wire = SessionWire().settle()
    events = wire.take()
    assert all(type(side[0]) is Opened for side in events)
    return wire


def request(wire: SessionWire, body: bytes = b"") -> int:
    """A stream from a to b whose request has arrived and been taken."""
    number = wire.a.open("m", body)
    wire.settle()
    assert Requested(number, "m", body) in wire.at_b
    wire.b.consumed(number)
    wire.take()
    return number


def credit_is_conserved(wire: SessionWire) -> None:
    """With nothing on the wire, what one side may not send the other has not given back."""
    for sender, reader in ((wire.a, wire.b), (wire.b, wire.a)):
        for number in sender.streams.numbers():
            stream, other = sender.streams.get(number), reader.streams.get(number)
            if stream is not None and other is not None and stream.state is not StreamState.IDLE:
                assert stream.credit == other.room


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The stream cut at these places."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def closed_with(events: list[Event], kind: type[FleetError]) -> FleetError:
    """The error of the last event, which must be of exactly this kind."""
    last = events[-1]
    assert isinstance(last, Closed)
    assert type(last.error) is kind
    return last.error


def cancelled_with(events: list[Event], stream: int, kind: type[FleetError]) -> FleetError:
    (event,) = [e for e in events if isinstance(e, Cancelled)]
    assert event.stream == stream
    assert type(event.error) is kind
    return event.error
