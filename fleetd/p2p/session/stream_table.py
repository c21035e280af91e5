"""All streams of a session: the numbers of either side, the effect of each frame, the bound on held bytes.

Sans-IO. Frames for the other side go to the outbox; what the reader of a stream must know becomes events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetd import limits
from fleetd.errors import (
    BY_CODE,
    AlreadyRunning,
    ConfigError,
    FleetError,
    HeadersTooLarge,
    NotOffered,
    Overloaded,
    PayloadTooLarge,
    PeerError,
    PortInUse,
    ProtocolError,
    RequestTimeout,
    SocketPathTooLong,
    Unauthorized,
    UnsupportedMediaType,
    from_code,
)
from fleetd.p2p.invariants import check
from fleetd.p2p.session.events import Cancelled, Ended, Event, MessageReceived, Requested
from fleetd.p2p.session.frames import CancelFrame, DataFrame, End, Open, WindowFrame
from fleetd.p2p.session.outbox import Outbox
from fleetd.p2p.session.states import STREAM_TABLE, Act, StreamState
from fleetd.p2p.session.stream import SessionStream

StreamFrame = Open | DataFrame | End | CancelFrame | WindowFrame

# The code of a Cancel without a fault: the answer is no longer wanted.
WITHDRAWN = "withdrawn"


class SessionStreams:
    """``peer`` names the other side in errors; the side that dialled opens the odd numbers."""

    def __init__(self, outbox: Outbox, *, initiator: bool) -> None:
        self.peer = "The other side"
        self.held_bytes = 0
        self._outbox = outbox
        self._open: dict[int, SessionStream] = {}
        # The last number that each side used, and how many streams of each are open.
        self._mine, self._theirs = (-1, 0) if initiator else (0, -1)
        self._mine_open = self._theirs_open = 0

    def __len__(self) -> int:
        return len(self._open)

    def get(self, number: int) -> SessionStream | None:
        """An open stream, or None."""
        return self._open.get(number)

    def numbers(self) -> list[int]:
        """The numbers of the open streams."""
        return list(self._open)

    # ---- This side's calls -------------------------------------------------------------------------------

    def open(self, method: str, body: bytes) -> int:
        if self._mine_open >= limits.SESSION_STREAMS:
            raise Overloaded(f"{limits.SESSION_STREAMS} requests to {self.peer} are open already.")
        self._must_fit(body)
        self._mine += 2
        self._mine_open += 1
        stream = self._open[self._mine] = SessionStream(self._mine)
        inline = len(body) <= limits.OPEN_BODY_BYTES
        self._outbox.open(Open(stream.number, method, body if inline else b"", not inline), stream)
        if not inline:
            self._outbox.put(stream, body)
        return stream.number

    def send(self, number: int, body: bytes) -> None:
        if (stream := self._known(number)) is not None:
            if stream.ending:
                raise ValueError(f"stream {number} was ended on this side")
            self._must_fit(body)
            self._outbox.put(stream, body)

    def end(self, number: int) -> None:
        if (stream := self._known(number)) is not None:
            stream.ending = True
            self._outbox.line_up(stream)

    def cancel(self, number: int, error: FleetError | None) -> None:
        if (stream := self._known(number)) is not None:
            if stream.state is not StreamState.IDLE:  # else its Open has not left
                self._outbox.urgent.append(_cancel(number, error))
            self._remove(stream)

    def consumed(self, number: int) -> None:
        if (stream := self._known(number)) is not None:
            self.held_bytes -= stream.held_bytes
            stream.consumed()
            self.held_bytes += stream.held_bytes
            self._give_back(stream)

    def queued(self, number: int) -> int:
        stream = self._known(number)
        return stream.queued_bytes if stream is not None else 0

    def clear(self) -> None:
        """Forget all streams."""
        self._outbox.clear()
        self._open.clear()
        self.held_bytes = self._mine_open = self._theirs_open = 0

    # ---- Frames of the other side ------------------------------------------------------------------------

    def on_frame(self, frame: StreamFrame, events: list[Event]) -> None:
        """Handle a frame from the other side. Raises ProtocolError."""
        state = self.state(frame.stream)
        _ACTS[STREAM_TABLE[state][type(frame)]](self, frame, events)

    def sent(self, frame: End) -> None:
        """This side's End of a stream has left."""
        stream = self._open[frame.stream]
        if stream.state is StreamState.CLOSED:
            self._remove(stream)

    def _refuse(self, frame: StreamFrame, events: list[Event]) -> None:
        raise ProtocolError(
            f"{self.peer} sent {type(frame).__name__} for stream {frame.stream}, which is "
            f"{self.state(frame.stream).value}."
        )

    def _ignore(self, frame: StreamFrame, events: list[Event]) -> None:
        pass

    def _accept(self, frame: Open, events: list[Event]) -> None:
        if self._is_mine(frame.stream):
            raise ProtocolError(f"{self.peer} opened stream {frame.stream}, a number of this side's.")
        self._theirs = frame.stream
        if self._theirs_open >= limits.SESSION_STREAMS:
            full = Overloaded(f"{limits.SESSION_STREAMS} requests of {self.peer} are open already.")
            self._outbox.urgent.append(_cancel(frame.stream, full))
            return
        self._theirs_open += 1
        stream = self._open[frame.stream] = SessionStream(frame.stream)
        stream.state = StreamState.OPEN
        stream.unannounced = frame.method
        self._gather(stream, stream.begin, frame, events)

    def _take(self, frame: DataFrame, events: list[Event]) -> None:
        stream = self._open[frame.stream]
        self._gather(stream, stream.take, frame, events)

    def _gather(
        self,
        stream: SessionStream,
        take: Callable[[bytes, bool], bytes | None],
        frame: Open | DataFrame,
        events: list[Event],
    ) -> None:
        before = stream.held_bytes
        try:
            message = take(frame.body, frame.more)
        except PayloadTooLarge as error:
            # Its traceback would hold ``events``, in which the error goes on, and so the whole session.
            self._give_up(stream, error.with_traceback(None), events)
            return
        self.held_bytes += stream.held_bytes - before
        if self.held_bytes > limits.SESSION_HELD_BYTES:
            full = Overloaded(
                f"{self.held_bytes} bytes of messages of {self.peer} are unread; the limit is "
                f"{limits.SESSION_HELD_BYTES}."
            )
            self._give_up(stream, full, events)
            return
        if message is not None and stream.unannounced is not None:
            events.append(Requested(stream.number, stream.unannounced, message))
            stream.unannounced = None
        elif message is not None:
            events.append(MessageReceived(stream.number, message))
        self._give_back(stream)

    def _end(self, frame: End, events: list[Event]) -> None:
        stream = self._open[frame.stream]
        if stream.midway:
            raise ProtocolError(f"{self.peer} ended stream {frame.stream} in the middle of a message.")
        events.append(Ended(frame.stream))
        if stream.state is StreamState.OPEN:
            stream.state = StreamState.REMOTE_ENDED
        else:
            self._remove(stream)

    def _drop(self, frame: CancelFrame, events: list[Event]) -> None:
        stream = self._open[frame.stream]
        self._remove(stream)
        if stream.unannounced is None:
            error = error_of(frame.code, frame.message, frame.hint, frame.param)
            events.append(Cancelled(frame.stream, error))

    def _credit(self, frame: WindowFrame, events: list[Event]) -> None:
        stream = self._open[frame.stream]
        stream.credited(frame.credit)
        self._outbox.line_up(stream)

    # ---- Inside ------------------------------------------------------------------------------------------

    def _is_mine(self, number: int) -> bool:
        return (number - self._mine) % 2 == 0

    def state(self, number: int) -> StreamState:
        """The state of a stream, also of one that is not open."""
        if (stream := self._open.get(number)) is not None:
            return stream.state
        # Numbers only grow, so those above the last one were never used.
        last = self._mine if self._is_mine(number) else self._theirs
        return StreamState.IDLE if number > last else StreamState.CLOSED

    def _known(self, number: int) -> SessionStream | None:
        """An open stream; None for one that is over, because the caller may not have its last event yet."""
        stream = self._open.get(number)
        if stream is None and self.state(number) is StreamState.IDLE:
            raise ValueError(f"stream {number} was never opened")
        return stream

    def _must_fit(self, body: bytes) -> None:
        if len(body) > limits.MESSAGE_BYTES:
            raise PayloadTooLarge(
                f"A message of {len(body)} bytes is over the limit of {limits.MESSAGE_BYTES} bytes."
            )
        self._outbox.must_fit(body, self.peer)

    def _give_back(self, stream: SessionStream) -> None:
        if credit := stream.give_back():
            self._outbox.urgent.append(WindowFrame(stream.number, credit))

    def _give_up(self, stream: SessionStream, error: FleetError, events: list[Event]) -> None:
        self._outbox.urgent.append(_cancel(stream.number, error))
        self._remove(stream)
        if stream.unannounced is None:
            events.append(Cancelled(stream.number, error))

    def _remove(self, stream: SessionStream) -> None:
        stream.state = StreamState.CLOSED
        del self._open[stream.number]
        self._outbox.drop(stream)
        self.held_bytes -= stream.held_bytes
        if self._is_mine(stream.number):
            self._mine_open -= 1
        else:
            self._theirs_open -= 1

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests."""
        streams = self._open.values()
        for stream in streams:
            stream.validate()
        mine = sum(self._is_mine(number) for number in self._open)
        check(self.held_bytes == sum(stream.held_bytes for stream in streams), "held bytes are all streams'")
        check(self.held_bytes <= limits.SESSION_HELD_BYTES, "held bytes are within their bound")
        check((mine, len(streams) - mine) == (self._mine_open, self._theirs_open), "open streams are counted")
        most = max(self._mine_open, self._theirs_open)
        check(most <= limits.SESSION_STREAMS, "open streams are within their bound")
        self._outbox.validate(streams)


_ACTS: dict[Act, Callable[[SessionStreams, Any, list[Event]], None]] = {
    Act.IGNORE: SessionStreams._ignore,
    Act.REFUSE: SessionStreams._refuse,
    Act.ACCEPT: SessionStreams._accept,
    Act.TAKE: SessionStreams._take,
    Act.END: SessionStreams._end,
    Act.CANCEL: SessionStreams._drop,
    Act.CREDIT: SessionStreams._credit,
}

# ---- Errors on the wire ------------------------------------------------------------------------------------


# Errors of a daemon with itself, with its own user or over HTTP; and those without a code of their own.
_NOT_OF_PEERS = frozenset(
    {FleetError, ConfigError, AlreadyRunning, PortInUse, SocketPathTooLong, Unauthorized, NotOffered}
    | {UnsupportedMediaType, HeadersTooLarge, RequestTimeout}
)


def wire_text(text: str) -> str:
    """``text`` cut to the bound, as valid Unicode: an error may quote the name of a file that is not."""
    return text[: limits.ERROR_TEXT_CHARS].encode(errors="replace").decode()


def error_of(code: str, message: str, hint: str = "", param: str | None = None) -> FleetError:
    """The error that the other side sent. A code that this version does not know, or that no request of a
    machine can end with, becomes a PeerError."""
    message, hint = message[: limits.ERROR_TEXT_CHARS], hint[: limits.ERROR_TEXT_CHARS]
    if BY_CODE.get(code, FleetError) in _NOT_OF_PEERS:
        return PeerError(message, hint=hint, param=param)
    return from_code(code, message, hint=hint, param=param)


def _cancel(stream: int, error: FleetError | None) -> CancelFrame:
    if error is None:
        return CancelFrame(stream, WITHDRAWN, "The answer is no longer wanted.")
    param = None if error.param is None else wire_text(error.param)
    return CancelFrame(stream, error.code, wire_text(error.message), wire_text(error.hint), param)
