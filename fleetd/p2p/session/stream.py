"""One stream of a session: its state, its queue of bytes to send, and the message that it receives.

Flow control is per stream and direction. A fragment costs its bytes and a little more. The receiving side
returns credit at once for the fragments of an unfinished message, because a message may be larger than the
window; but only while no finished message waits for its reader. So a reader that stops holds one message and
one window, and delays no other stream.
"""

from __future__ import annotations

from collections import deque

from fleetd import limits
from fleetd.errors import PayloadTooLarge, ProtocolError
from fleetd.p2p.invariants import check
from fleetd.p2p.session.frames import DataFrame, End
from fleetd.p2p.session.states import StreamState


def cost(body: bytes | memoryview) -> int:
    """The credit that a fragment costs."""
    return len(body) + limits.FRAGMENT_COST_BYTES


class SessionStream:
    """The state of both directions. `SessionStreams` decides which frame is allowed when."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = StreamState.IDLE
        # The method of a request whose body is still arriving; its reader does not know the stream yet.
        self.unannounced: str | None = None
        # Sending.
        self.in_line = False  # for its turn in the outbox
        self.ending = False
        self.queued_bytes = 0
        self._queue: deque[memoryview] = deque()
        self.credit = limits.STREAM_WINDOW_BYTES
        # Receiving.
        self.held_bytes = 0
        self.room = limits.STREAM_WINDOW_BYTES
        self._partial: bytearray | None = None
        self.unread: deque[tuple[int, int]] = deque()  # (credit, bytes) of each message at the reader
        self._owed = 0  # credit to give back
        self._withheld = 0  # credit of the unfinished message, while finished ones are unread

    # ---- Sending ---------------------------------------------------------------------------------------

    def put(self, body: bytes) -> None:
        self._queue.append(memoryview(body))
        self.queued_bytes += cost(body)

    @property
    def ready(self) -> bool:
        """True if `pop` would return a frame."""
        if self.state is not StreamState.OPEN and self.state is not StreamState.REMOTE_ENDED:
            return False
        if self._queue:
            return cost(self._queue[0][: limits.FRAGMENT_BYTES]) <= self.credit
        return self.ending

    def pop(self) -> DataFrame | End:
        """The next frame of a stream that is `ready`."""
        if not self._queue:
            over = self.state is StreamState.REMOTE_ENDED
            self.state = StreamState.CLOSED if over else StreamState.LOCAL_ENDED
            return End(self.number)
        body = self._queue[0]
        fragment, rest = body[: limits.FRAGMENT_BYTES], body[limits.FRAGMENT_BYTES :]
        self.credit -= cost(fragment)
        self.queued_bytes -= len(fragment)
        if rest:
            self._queue[0] = rest
        else:
            self._queue.popleft()
            self.queued_bytes -= limits.FRAGMENT_COST_BYTES
        return DataFrame(self.number, bytes(fragment), bool(rest))

    def credited(self, credit: int) -> None:
        """Add credit that the other side returned. Raises ProtocolError for more than the window."""
        self.credit += credit
        if self.credit > limits.STREAM_WINDOW_BYTES:
            raise ProtocolError(
                f"Stream {self.number} was given credit for {self.credit} bytes; the window has "
                f"{limits.STREAM_WINDOW_BYTES}."
            )

    # ---- Receiving -------------------------------------------------------------------------------------

    def take(self, body: bytes, more: bool) -> bytes | None:
        """Add a fragment; returns the whole message with the last one.

        Raises:
            ProtocolError: the fragment was sent without credit.
            PayloadTooLarge: the message is over the bound.
        """
        price = cost(body)
        self.room -= price
        if self.room < 0:
            raise ProtocolError(
                f"Stream {self.number} was sent {-self.room} bytes more than its window of "
                f"{limits.STREAM_WINDOW_BYTES} allows."
            )
        return self._gather(body, more, price)

    def begin(self, body: bytes, more: bool) -> bytes | None:
        """Add the fragment in the Open frame: as `take`, without cost."""
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
            if self.unread:
                self._withheld += price
            else:
                self._owed += price
            return None
        if self._partial is not None:
            self._partial += body
            body, self._partial = bytes(self._partial), None
        self.unread.append((price + self._withheld, len(body)))
        self._withheld = 0
        return body

    @property
    def midway(self) -> bool:
        """True if a message has begun and not ended."""
        return self._partial is not None

    def consumed(self) -> None:
        """The reader took the oldest message that it had not taken yet."""
        price, size = self.unread.popleft()
        self._owed += price
        self.held_bytes -= size
        if not self.unread:
            self._owed += self._withheld
            self._withheld = 0

    def give_back(self) -> int:
        """Credit to return to the sender now; 0 until there is enough for a frame."""
        if self._owed < limits.STREAM_WINDOW_BYTES // 2:
            return 0
        credit, self._owed = self._owed, 0
        self.room += credit
        return credit

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests."""
        unread = sum(price for price, _ in self.unread)
        check(self.state is not StreamState.CLOSED, "a closed stream is forgotten")
        check(self.in_line == self.ready, "a stream is in line if and only if it is ready")
        check(self.queued_bytes == sum(map(cost, self._queue)), "queued bytes are those of the queue")
        check(0 <= self.credit <= limits.STREAM_WINDOW_BYTES, "credit is within the window")
        held = self.room + self._owed + self._withheld + unread
        check(held == limits.STREAM_WINDOW_BYTES, "no credit is lost")
        check(self._withheld == 0 or self.unread, "credit is withheld only while messages are unread")
        check(self._owed < limits.STREAM_WINDOW_BYTES // 2, "enough credit for a frame is returned at once")
