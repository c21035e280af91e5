"""One stream of a session: its state, what it has yet to send, and what it is taking in.

Flow control is per stream and direction. A fragment costs its bytes and a little more. The receiving side
gives credit back at once for fragments of a message that it is still putting together, because a message may
be larger than the window; but only while nothing finished waits for its reader. So a reader that stops holds
one message and one window, and stops nobody else.
"""

from __future__ import annotations

from collections import deque

from fleetd import limits
from fleetd.errors import PayloadTooLarge, ProtocolError
from fleetd.p2p.session.frames import DataFrame, End
from fleetd.p2p.session.states import StreamState


def cost(body: bytes | memoryview) -> int:
    """The credit that a fragment takes."""
    return len(body) + limits.FRAGMENT_COST_BYTES


class SessionStream:
    """Bookkeeping for both directions; `Session` decides what may happen when."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = StreamState.IDLE
        # The method of a request whose body is still arriving: its reader has not heard of the stream yet.
        self.unannounced: str | None = None
        # Sending.
        self.in_line = False  # has a turn coming in the outbox
        self.ending = False
        self.queued_bytes = 0
        self._queue: deque[memoryview] = deque()
        self._credit = limits.STREAM_WINDOW_BYTES
        # Receiving.
        self.held_bytes = 0
        self._room = limits.STREAM_WINDOW_BYTES
        self._partial: bytearray | None = None
        self._unread: deque[tuple[int, int]] = deque()  # (credit, bytes) of each message at the reader
        self._owed = 0  # credit to give back
        self._withheld = 0  # credit of the unfinished message, while finished ones are unread

    # ---- Sending ---------------------------------------------------------------------------------------

    def put(self, body: bytes) -> None:
        self._queue.append(memoryview(body))
        self.queued_bytes += cost(body)

    @property
    def ready(self) -> bool:
        """Whether `pop` has a frame to give."""
        if self.state is not StreamState.OPEN and self.state is not StreamState.REMOTE_ENDED:
            return False
        if self._queue:
            return cost(self._queue[0][: limits.FRAGMENT_BYTES]) <= self._credit
        return self.ending

    def pop(self) -> DataFrame | End:
        """The next frame; a stream that is ready has one."""
        if not self._queue:
            over = self.state is StreamState.REMOTE_ENDED
            self.state = StreamState.CLOSED if over else StreamState.LOCAL_ENDED
            return End(self.number)
        body = self._queue[0]
        fragment, rest = body[: limits.FRAGMENT_BYTES], body[limits.FRAGMENT_BYTES :]
        self._credit -= cost(fragment)
        self.queued_bytes -= len(fragment)
        if rest:
            self._queue[0] = rest
        else:
            self._queue.popleft()
            self.queued_bytes -= limits.FRAGMENT_COST_BYTES
        return DataFrame(self.number, bytes(fragment), bool(rest))

    def credited(self, credit: int) -> None:
        """The other side gave credit back."""
        self._credit += credit
        if self._credit > limits.STREAM_WINDOW_BYTES:
            raise ProtocolError(
                f"Stream {self.number} was given credit for {self._credit} bytes; the window has "
                f"{limits.STREAM_WINDOW_BYTES}."
            )

    # ---- Receiving -------------------------------------------------------------------------------------

    def take(self, body: bytes, more: bool) -> bytes | None:
        """A fragment; the whole message with its last one.

        Raises:
            ProtocolError: it was sent without credit.
            PayloadTooLarge: the message is over the bound.
        """
        price = cost(body)
        self._room -= price
        if self._room < 0:
            raise ProtocolError(
                f"Stream {self.number} was sent {-self._room} bytes more than its window of "
                f"{limits.STREAM_WINDOW_BYTES} allows."
            )
        return self._gather(body, more, price)

    def begin(self, body: bytes, more: bool) -> bytes | None:
        """The first fragment, that came with the Open: as `take`, and free."""
        return self._gather(body, more, 0)

    def _gather(self, body: bytes, more: bool, price: int) -> bytes | None:
        size = len(body) + (len(self._partial) if self._partial else 0)
        if size > limits.MESSAGE_BYTES:
            raise PayloadTooLarge(
                f"A message is over the limit of {limits.MESSAGE_BYTES} bytes for one message."
            )
        self.held_bytes += len(body)
        if more:
            if self._partial is None:
                self._partial = bytearray()
            self._partial += body
            if self._unread:
                self._withheld += price
            else:
                self._owed += price
            return None
        if self._partial is not None:
            self._partial += body
            body, self._partial = bytes(self._partial), None
        self._unread.append((price + self._withheld, len(body)))
        self._withheld = 0
        return body

    @property
    def midway(self) -> bool:
        """Whether a message has begun and not ended."""
        return self._partial is not None

    def consumed(self) -> None:
        """The reader took the oldest message it was given."""
        price, size = self._unread.popleft()
        self._owed += price
        self.held_bytes -= size
        if not self._unread:
            self._owed += self._withheld
            self._withheld = 0

    def give_back(self) -> int:
        """Credit to return to the sender now; 0 until it is worth a frame."""
        if self._owed < limits.STREAM_WINDOW_BYTES // 2:
            return 0
        credit, self._owed = self._owed, 0
        self._room += credit
        return credit
