"""What a session has yet to send, most urgent first.

    0  Hello, Ping, Pong, Window, Cancel, Bye
    1  Open, Notify, Data and End

Within 1, streams take turns by fragments, and Open and Notify together count as one stream, so no stream
starves another. Opens leave in the order of their numbers, which only grow on the wire.
"""

from __future__ import annotations

from collections import deque

from fleetd import limits
from fleetd.errors import Overloaded
from fleetd.p2p.session.frames import Frame, NotifyFrame, Open
from fleetd.p2p.session.states import StreamState
from fleetd.p2p.session.stream import SessionStream, cost


class Outbox:
    """Frames and streams in line."""

    def __init__(self) -> None:
        self.urgent: deque[Frame] = deque()
        self._news: deque[tuple[Open | NotifyFrame, SessionStream | None]] = deque()
        # Whose turn comes; None stands for the news.
        self._turns: deque[SessionStream | None] = deque()
        self.queued_bytes = 0

    def must_fit(self, body: bytes, peer: str) -> None:
        """Raise Overloaded if so many more bytes are too many."""
        queued = self.queued_bytes + cost(body)
        if queued > limits.SESSION_QUEUED_BYTES:
            raise Overloaded(
                f"{queued} bytes would wait to be sent to {peer}; the limit is {limits.SESSION_QUEUED_BYTES}."
            )

    def notify(self, frame: NotifyFrame) -> None:
        self._add(frame, None)

    def open(self, frame: Open, stream: SessionStream) -> None:
        """What is put on the stream leaves after its Open."""
        self._add(frame, stream)

    def _add(self, frame: Open | NotifyFrame, stream: SessionStream | None) -> None:
        if not self._news:
            self._turns.append(None)
        self._news.append((frame, stream))
        self.queued_bytes += cost(frame.body)

    def put(self, stream: SessionStream, body: bytes) -> None:
        """One message."""
        stream.put(body)
        self.queued_bytes += cost(body)
        self.line_up(stream)

    def line_up(self, stream: SessionStream) -> None:
        """Give a stream its turns, if it has something to send and may."""
        if stream.ready and not stream.in_line:
            stream.in_line = True
            self._turns.append(stream)

    def drop(self, stream: SessionStream) -> None:
        """Forget what a closed stream had yet to send. An Open that waits is passed over when it is due."""
        self.queued_bytes -= stream.queued_bytes
        if stream.in_line:
            self._turns.remove(stream)

    def clear(self) -> None:
        """Forget what is not urgent."""
        self._news.clear()
        self._turns.clear()
        self.queued_bytes = 0

    def pop(self) -> Frame | None:
        """The next frame to send, or None when nothing may be sent now."""
        if self.urgent:
            return self.urgent.popleft()
        while self._turns:
            stream = self._turns.popleft()
            frame = self._pop_news() if stream is None else self._pop(stream)
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

    def _pop_news(self) -> Frame | None:
        frame, stream = self._news.popleft()
        self.queued_bytes -= cost(frame.body)
        if self._news:
            self._turns.append(None)
        if stream is None:
            return frame
        if stream.state is StreamState.CLOSED:
            return None
        stream.state = StreamState.OPEN
        self.line_up(stream)
        return frame
