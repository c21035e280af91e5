"""One control session between two paired daemons, as a state machine.

Sans-IO: bytes and the time go in, bytes and events come out; TLS, sockets and clocks are the caller's. Both
sides run the same machine. After any call, send the bytes of `data_to_send` and call `tick` at
`next_deadline`. All bounds are in limits.py, all rules in states.py.

A request opens a stream; both sides send messages on it until each has ended its direction or one cancels.
Notifications are single messages without an answer. The messages of a stream arrive in order; between streams
and notifications there is no order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetd import limits
from fleetd.errors import FleetError, PayloadTooLarge, PeerLost, ProtocolError, VersionMismatch
from fleetd.p2p.invariants import check
from fleetd.p2p.session.events import (
    Cancelled,
    Closed,
    Ended,
    Event,
    Measured,
    MessageReceived,
    Notified,
    Opened,
    Quiet,
    Requested,
    Resumed,
)
from fleetd.p2p.session.frames import (
    Bye,
    CancelFrame,
    End,
    Frame,
    FrameBuffer,
    Hello,
    NotifyFrame,
    Open,
    Ping,
    Pong,
    encode,
)
from fleetd.p2p.session.liveness import Liveness, LivenessVerdict
from fleetd.p2p.session.outbox import Outbox
from fleetd.p2p.session.states import SESSION_TABLE, Act, SessionState
from fleetd.p2p.session.stream_table import SessionStreams, StreamFrame, error_of, wire_text
from fleetd.p2p.token_bucket import TokenBucket

__all__ = [
    "Cancelled",
    "Closed",
    "Ended",
    "Event",
    "Measured",
    "MessageReceived",
    "Notified",
    "Opened",
    "Quiet",
    "Requested",
    "Resumed",
    "Session",
    "SessionState",
]

# The code of a Bye without a fault: the daemon stops.
GOODBYE = "goodbye"
# What costs this side work without using up any credit.
_ASKS = (Open, CancelFrame, Ping)


class Session:
    """See the module. ``initiator``: this side dialled. ``hello``: the first frame of this side."""

    def __init__(self, *, hello: Hello, initiator: bool, now: float) -> None:
        self.state = SessionState.NEW
        self.hello = hello
        self.peer: Hello | None = None
        self.version = 0
        self.life = Liveness(now)
        self._began = now
        self._in = FrameBuffer()
        self.outbox = Outbox()
        self.outbox.urgent.append(hello)
        self._unsent = b""
        self._asks = TokenBucket(limits.SESSION_ASKS_AT_ONCE, limits.SESSION_ASKS_PER_S)
        self.streams = SessionStreams(self.outbox, initiator=initiator)

    # ---- Bytes -------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Handle bytes of the other side, in any pieces."""
        events: list[Event] = []
        if not data or not self._is_listening():
            return events
        if self.life.received(now):
            events.append(Resumed())
        try:
            for frame in self._in.feed(data):
                if isinstance(frame, _ASKS) and not self._asks.take(1, now):
                    raise ProtocolError(f"{self._who} asks and cancels without end.")
                _ACTS[SESSION_TABLE[self.state][type(frame)]](self, frame, now, events)
                if not self._is_listening():
                    break
                if len(self.outbox.urgent) > limits.SESSION_ANSWERS:
                    raise ProtocolError(
                        f"{self._who} asks, but has left {limits.SESSION_ANSWERS} answers unread."
                    )
        except (ProtocolError, VersionMismatch) as error:
            # Its traceback, or that of what caused it, would hold this very call and all that came with it.
            error.__cause__ = error.__context__ = None
            events += self.close(error.with_traceback(None))
        return events

    def data_to_send(self, limit: int = limits.PEER_WRITE_BUFFER_BYTES) -> bytes:
        """The next bytes to write, at most ``limit``; none if no frame may be sent now."""
        parts, size = [self._unsent], len(self._unsent)
        while size < limit and (frame := self.outbox.pop()) is not None:
            parts.append(encode(frame))
            size += len(parts[-1])
            if type(frame) is End:
                self.streams.sent(frame)
        data = b"".join(parts)
        self._unsent = data[limit:]
        if self.state is SessionState.CLOSING and not self._unsent:
            self.state = SessionState.CLOSED
        return data[:limit]

    # ---- Time --------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The time at which to call `tick`, or None."""
        if self.state is SessionState.NEW:
            return self._began + limits.HELLO_S
        return self.life.next_deadline() if self.state is SessionState.OPEN else None

    def tick(self, now: float) -> list[Event]:
        """Do what is due: send a ping, or find the other side quiet or gone."""
        due = self.next_deadline()
        if due is None or now < due:
            return []
        if self.state is SessionState.NEW:
            return self.close(PeerLost(f"{self._who} did not say hello within {limits.HELLO_S:g} s."))
        pinging = now >= self.life.ping_due
        verdict = self.life.judge(now)
        if verdict is LivenessVerdict.SILENT:
            return self._over(PeerLost(f"{self._who} has been silent for {limits.DEAD_S:g} s."))
        if verdict is LivenessVerdict.UNANSWERING:
            return self.close(PeerLost(f"{self._who} left {limits.PINGS_UNANSWERED} pings unanswered."))
        if pinging:
            self.ping(now)
        return [Quiet()] if verdict is LivenessVerdict.QUIET else []

    def ping(self, now: float) -> int:
        """Send a ping; returns its nonce. The answer becomes Measured."""
        nonce = self.life.ping(now)
        self.outbox.urgent.append(Ping(nonce))
        return nonce

    # ---- This side's calls -------------------------------------------------------------------------------

    def open(self, method: str, body: bytes) -> int:
        """Send a request; returns the number of its stream.

        Raises:
            PeerLost: the session is not open.
            Overloaded: too many requests are open, or too many bytes are queued.
            PayloadTooLarge: the body is over limits.MESSAGE_BYTES.
        """
        self._must_be_open()
        return self.streams.open(method, body)

    def send(self, stream: int, body: bytes) -> None:
        """Send a message; dropped if the stream is over, because its last event may not be read yet.

        Raises:
            Overloaded: too many bytes are queued.
            PayloadTooLarge: over limits.MESSAGE_BYTES.
        """
        self.streams.send(stream, body)

    def end(self, stream: int) -> None:
        """End this side's direction of a stream, after the queued messages."""
        self.streams.end(stream)

    def cancel(self, stream: int, error: FleetError | None = None) -> None:
        """End a stream at once, in both directions. None: the answer is no longer wanted."""
        self.streams.cancel(stream, error)

    def consumed(self, stream: int) -> None:
        """The reader took the oldest message (or request) of a stream that it had not taken yet."""
        self.streams.consumed(stream)

    def queued(self, stream: int) -> int:
        """The number of queued bytes of a stream."""
        return self.streams.queued(stream)

    def notify(self, topic: str, body: bytes) -> None:
        """Send a notification; it is not acknowledged.

        Raises:
            PeerLost, Overloaded: as `open`.
            PayloadTooLarge: over limits.NOTIFY_BYTES.
        """
        self._must_be_open()
        if len(body) > limits.NOTIFY_BYTES:
            raise PayloadTooLarge(
                f"News of {len(body)} bytes are over the limit of {limits.NOTIFY_BYTES} bytes."
            )
        self.outbox.must_fit(body, self._who)
        self.outbox.notify(NotifyFrame(topic, body))

    def close(self, error: FleetError | None = None) -> list[Event]:
        """End the session with a goodbye or an error; `data_to_send` has the last frame."""
        if not self._is_listening():
            return []
        self._forget()
        self.state = SessionState.CLOSING
        self.outbox.urgent.append(
            Bye(GOODBYE) if error is None else Bye(error.code, wire_text(error.message))
        )
        return [Closed(error)]

    # ---- Frames of the other side ------------------------------------------------------------------------

    def _refuse(self, frame: Frame, now: float, events: list[Event]) -> None:
        raise ProtocolError(
            f"{self._who} sent {type(frame).__name__} while the session is {self.state.value}."
        )

    def _greet(self, frame: Hello, now: float, events: list[Event]) -> None:
        self.peer = frame
        self.streams.peer = self._who
        oldest, newest = frame.versions
        own_oldest, own_newest = self.hello.versions
        if oldest > newest:
            raise ProtocolError(f"{self._who} speaks no protocol version: {oldest} to {newest}.")
        version = min(newest, own_newest)
        if version < max(oldest, own_oldest):
            behind = frame.name if newest < own_oldest else self.hello.name
            raise VersionMismatch(
                f"{frame.name} speaks protocol versions {oldest} to {newest}, {self.hello.name} "
                f"{own_oldest} to {own_newest}.",
                hint=f"Update fleetd on {behind}.",
            )
        self.version = version
        self.state = SessionState.OPEN
        events.append(Opened(frame, version))
        self.ping(now)

    def _answer(self, frame: Ping, now: float, events: list[Event]) -> None:
        self.outbox.urgent.append(Pong(frame.nonce, max(0.0, now)))

    def _measure(self, frame: Pong, now: float, events: list[Event]) -> None:
        try:
            rtt_s = self.life.pong(frame.nonce, now, frame.at_s)
        except ValueError as error:
            raise ProtocolError(f"{self._who} answered a ping in advance: {error}.") from error
        if rtt_s is not None:
            events.append(Measured(rtt_s))

    def _deliver(self, frame: NotifyFrame, now: float, events: list[Event]) -> None:
        events.append(Notified(frame.topic, frame.body))

    def _stream(self, frame: StreamFrame, now: float, events: list[Event]) -> None:
        self.streams.on_frame(frame, events)

    def _leave(self, frame: Bye, now: float, events: list[Event]) -> None:
        polite = frame.code == GOODBYE
        events += self._over(
            None if polite else error_of(frame.code, f"{self._who} ended the session: {frame.message}")
        )

    # ---- Inside ------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests."""
        self.streams.validate()
        check(self.buffered_bytes <= limits.FRAME_BYTES + 4, "at most one unfinished frame is buffered")
        if not self._is_listening():
            check(not self.streams and not self.outbox.queued_bytes, "a closed session has no streams")

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an unfinished frame of the other side."""
        return len(self._in)

    @property
    def _who(self) -> str:
        return f"{self.peer.name} ({self.peer.node_id[:7]})" if self.peer else "The other side"

    def _is_listening(self) -> bool:
        return self.state is SessionState.NEW or self.state is SessionState.OPEN

    def _must_be_open(self) -> None:
        if self.state is not SessionState.OPEN:
            raise PeerLost(f"The session is {self.state.value}.")

    def _forget(self) -> None:
        self._in = FrameBuffer()
        self.streams.clear()

    def _over(self, error: FleetError | None) -> list[Event]:
        """End the session without a last frame: the other side is gone."""
        self.state = SessionState.CLOSED
        self._forget()
        self.outbox.urgent.clear()
        self._unsent = b""
        return [Closed(error)]


_ACTS: dict[Act, Callable[[Session, Any, float, list[Event]], None]] = {
    Act.REFUSE: Session._refuse,
    Act.GREET: Session._greet,
    Act.LEAVE: Session._leave,
    Act.ANSWER: Session._answer,
    Act.MEASURE: Session._measure,
    Act.STREAM: Session._stream,
    Act.DELIVER: Session._deliver,
}
