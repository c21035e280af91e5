"""A member's streams to the members before and behind it, which hidden states take between them.

    member before ─► HOP ─► this member's layers ─► HOP ─► member behind

Both ends count blocks: one that this member skipped before its hidden states came is passed over when they
come. A stream that breaks does not end the member: the machine that answers is told, and knows which of the
two machines is gone.
"""

from __future__ import annotations

import time

import mlx.core as mx

from fleetd import limits
from fleetd.engine.groups.messages import HopLost
from fleetd.engine.protocol import HOP_IN, HOP_OUT
from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of
from fleetd.engine.streams.frames import Connect, Frame, FrameHeader, FramePipe, Kind
from fleetd.engine.streams.waiting import WaitingFrames
from fleetd.errors import FleetError, ProtocolError

# A header counts blocks by so many numbers.
_NUMBERS = 1 << 32


class MemberHops:
    """``most_bytes``: of the hidden states of one block."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting = WaitingFrames(limits.GROUP_AHEAD * most_bytes)
        self._before: FramePipe | None = None
        self._behind: FramePipe | None = None
        # Of the block that is run next, and of the one that is sent next.
        self._in, self._out = 0, 0
        self._came: Frame | None = None
        # Since when the member before, or the stream to the one behind, is waited for.
        self._waits_since_s: float | None = None
        self._waits_for_next = False
        # Of which stream the machine that answers was told that it is lost.
        self._told: set[bool] = set()

    def open(self, name: str, connect: Connect) -> None:
        """Take the stream ``name``, HOP_IN or HOP_OUT; a second one is closed."""
        pipe = connect(name, self._place)
        if name == HOP_IN and self._before is None:
            self._before = pipe
        elif name == HOP_OUT and self._behind is None:
            self._behind = pipe
        else:
            pipe.close()

    # ---- from the member before ------------------------------------------------------------------------

    def look(self) -> Frame | None:
        """What came for the block that is next; None if nothing has. It stays until ``taken``.

        Raises FleetError: what the stream broke with.
        """
        while self._before is not None and (self._came is None or self._ahead(self._came) < 0):
            if (frame := self._before.receive()) is None:
                break
            self._waiting.taken(frame)
            self._came = frame
        if self._came is None or (ahead := self._ahead(self._came)) < 0:
            self._wait(to_next=False)
            return None
        if ahead:
            raise ProtocolError("A member sent hidden states of a block that is not due.")
        return self._came

    def taken(self) -> Frame | None:
        """What came for the block that was next, which is run or skipped now; None if nothing did."""
        came = self._came if self._came is not None and not self._ahead(self._came) else None
        self._in += 1
        self._waits_since_s = None
        return came

    def _wait(self, *, to_next: bool) -> None:
        self._waits_since_s, self._waits_for_next = self._waits_since_s or time.monotonic(), to_next

    def _ahead(self, frame: Frame) -> int:
        """How many blocks the frame is ahead of the one that is next."""
        return (frame.head.index - self._in + _NUMBERS // 2) % _NUMBERS - _NUMBERS // 2

    @property
    def waits(self) -> bool:
        """True while another member is waited for, and once one is lost."""
        return self._waits_since_s is not None or bool(self._told)

    @property
    def due_s(self) -> float | None:
        """When the member that is waited for was silent for too long; None while none is."""
        if self._waits_since_s is None or self._waits_for_next in self._told:
            return None
        pipe = None if self._waits_for_next else self._before
        heard_s = pipe.heard_s if pipe is not None else 0.0
        return max(self._waits_since_s, heard_s) + limits.GROUP_SILENT_S

    def lost(self, *, to_next: bool, silent: bool = False) -> HopLost | None:
        """What the machine that answers is to be told of a stream that broke; None if it was told."""
        if to_next in self._told:
            return None
        self._told.add(to_next)
        return HopLost(to_next, silent)

    def late(self) -> HopLost | None:
        """The same of one on which nothing was heard for too long."""
        if (due_s := self.due_s) is None or time.monotonic() < due_s:
            return None
        return self.lost(to_next=self._waits_for_next, silent=True)

    # ---- to the member behind --------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """False while the stream to the member behind has not come; it is waited for as hidden states are."""
        if self._behind is None:
            self._wait(to_next=True)
        return self._behind is not None

    def send(self, out: mx.array | None) -> bool:
        """Pass on what came out of a block, or that it was skipped. False if the stream is broken."""
        payload = [] if out is None else [buffer_of(as_bytes(out))]
        sizes = sum(part.nbytes for part in payload), 0
        number, self._out = self._out % _NUMBERS, self._out + 1
        self._waits_since_s = None
        if self._behind is None:
            return False
        try:
            if self._behind.receive() is not None:
                return False
        except FleetError:
            return False
        self._behind.send(FrameHeader(Kind.HOP, sizes=sizes, index=number), *payload)
        return True

    def close(self) -> None:
        for pipe in (self._before, self._behind):
            if pipe is not None:
                pipe.close()

    def _place(self, head: FrameHeader) -> list[memoryview]:
        if head.kind is not Kind.HOP or head.sizes[0] > self._most_bytes or head.sizes[1]:
            raise ProtocolError(f"A {head.kind.name} of {head.nbytes} bytes came where a HOP was due.")
        self._waiting.come(head)
        return [memoryview(bytearray(head.sizes[0]))]
