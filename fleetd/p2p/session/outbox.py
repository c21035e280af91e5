"""The frames that a session has yet to send, most urgent first.

    0  Hello, Ping, Pong, Window, Cancel, Bye
    1  Open, Notify, Data and End

Within 1, streams take turns by fragments, and Open and Notify together count as one stream, so no stream
blocks another. Opens leave in the order of their numbers, which only grow on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from fleetd import limits
from fleetd.errors import Overloaded
from fleetd.p2p.invariants import check
from fleetd.p2p.session.frames import Frame, NotifyFrame, Open
from fleetd.p2p.session.states import StreamState
from fleetd.p2p.session.stream import SessionStream, cost


class Outbox:
    """Queued frames, and the streams that have frames to send."""

    def __init__(self) -> None:
        self.urgent: deque[Frame] = deque()
        # Opens and notifications; an Open with its stream.
        self._singles: deque[tuple[Open | NotifyFrame, SessionStream | None]] = deque()
        # Streams in the order of their turns; None stands for the Opens and notifications.
        self._turns: deque[SessionStream | None] = deque()
        self.queued_bytes = 0

    def must_fit(self, body: bytes, peer: str) -> None:
        """Raise Overloaded if the queue has no room for ``body``. ``peer`` names the other side."""
        queued = self.queued_bytes + cost(body)
        if queued > limits.SESSION_QUEUED_BYTES:
            raise Overloaded(
                f"{queued} bytes would wait to be sent to {peer}; the limit is {limits.SESSION_QUEUED_BYTES}."
            )

    def notify(self, frame: NotifyFrame) -> None:
        self._add(frame, None)

    def open(self, frame: Open, stream: SessionStream) -> None:
        """Queue the Open of a stream; its messages leave after it."""
        self._add(frame, stream)

    def _add(self, frame: Open | NotifyFrame, stream: SessionStream | None) -> None:
        if not self._singles:
            self._turns.append(None)
        self._singles.append((frame, stream))
        self.queued_bytes += cost(frame.body)

    def put(self, stream: SessionStream, body: bytes) -> None:
        """Queue a message of a stream."""
        stream.put(body)
        self.queued_bytes += cost(body)
        self.line_up(stream)

    def line_up(self, stream: SessionStream) -> None:
        """Add a stream to the turns, if it is ready."""
        if stream.ready and not stream.in_line:
            stream.in_line = True
            self._turns.append(stream)

    def drop(self, stream: SessionStream) -> None:
        """Forget the queue of a closed stream. `pop` skips its Open, if that has not left."""
        self.queued_bytes -= stream.queued_bytes
        if stream.in_line:
            self._turns.remove(stream)

    def clear(self) -> None:
        """Forget every frame that is not urgent."""
        self._singles.clear()
        self._turns.clear()
        self.queued_bytes = 0

    def pop(self) -> Frame | None:
        """The next frame to send, or None if there is none that may be sent now."""
        if self.urgent:
            return self.urgent.popleft()
        while self._turns:
            stream = self._turns.popleft()
            frame = self._pop_single() if stream is None else self._pop(stream)
            if frame is not None:
                return frame
        return None

    def _pop(self, stream: SessionStream) -> Frame:
        before = stream.queued_bytes
        frame = stream.pop()
        self.queued_bytes -= before - stream.queued_bytes
        stream.in_line = False
        self.line_up(stream)
        return frame

    def _pop_single(self) -> Frame | None:
        frame, stream = self._singles.popleft()
        self.queued_bytes -= cost(frame.body)
        if self._singles:
            self._turns.append(None)
        if stream is None:
            return frame
        if stream.state is StreamState.CLOSED:
            return None
        stream.state = StreamState.OPEN
        self.line_up(stream)
        return frame

    def validate(self, streams: Collection[SessionStream]) -> None:
        """Raise AssertionError if the state contradicts itself. ``streams``: all that are open. For tests."""
        turns = list(self._turns)
        singles = sum(cost(frame.body) for frame, _ in self._singles)
        queued = singles + sum(stream.queued_bytes for stream in streams)
        check(self.queued_bytes == queued, "queued bytes are those of all streams and single frames")
        check(len(turns) == len(set(turns)), "nothing has two turns")
        check((None in turns) == bool(self._singles), "single frames have a turn if there are any")
        lined_up = sum(stream.in_line for stream in streams) + bool(self._singles)
        check(len(turns) == lined_up, "only open streams have turns")
        check(all(stream.in_line == (stream in turns) for stream in streams), "turns are those in line")
