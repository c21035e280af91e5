"""A member's layers as the worker that answers sees them.

Nothing is asked of a member: what becomes of its caches is told with the next block of tokens. A block gets
its place in the member's stream when it begins its way through the group, which may be before its hidden
states are known: they come from the machine before, straight or through this one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx
import numpy as np

from fleetd import limits
from fleetd.engine.failures import MemberLost
from fleetd.engine.groups import messages
from fleetd.engine.groups.disk_there import DiskThere
from fleetd.engine.groups.messages import Change, HopLost, KeptTold, RunStage, StageRan
from fleetd.engine.groups.remote_rows import CachesThere, KeptThere, RemoteRows
from fleetd.engine.groups.step_times import StepTimes
from fleetd.engine.layers.hidden_states import NO_TAPS, Taps
from fleetd.engine.protocol import STAGE
from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, of_bytes
from fleetd.engine.streams.frames import Connect, Frame, FrameHeader, Kind
from fleetd.engine.streams.waiting import WaitingFrames
from fleetd.errors import FleetError, GroupLost, MemberGone, ProtocolError

_T = TypeVar("_T", StageRan, KeptTold, HopLost)


@dataclass(slots=True, eq=False)
class StagePass:
    """A block's way through one member's layers, or changes alone, which need no hidden states."""

    command: RunStage
    # What goes in, (B, T, D); None until it is known.
    hidden: mx.array | None = None
    # What came out, (B, T, D), if it was wanted.
    out: mx.array | None = None
    # Hidden states of the layers that were asked for, (B, rows, D) each.
    taps: dict[int, mx.array] = field(default_factory=dict)
    # The hash of what it keeps, if that was asked for.
    kept: bytes = b""
    # True once the member has answered.
    done: bool = False
    # When it was sent, by the monotonic clock; 0 if others were under way then.
    sent_s: float = 0.0
    # True if what comes out is of no use any more.
    dropped: bool = False
    # The next member, and the block's way through its layers, if hidden states go there through this machine.
    after: tuple[RemoteStage, StagePass] | None = None
    # Its way through the layers of the member before, if they come straight from there.
    before: StagePass | None = None
    # When it was answered, by the monotonic clock.
    done_s: float = 0.0

    @property
    def runs(self) -> bool:
        """False if there are changes alone."""
        return self.command.tokens > 0


class RemoteStage:
    """Layers [first, last), on another machine.

    Args:
        connect: opens the stream to it.
        moved: set whenever something came on any member's stream; one for all members of a group.
        width, dtype: of the hidden states.
        kept: what the layers keep of sequences.
        ids: whether the layers take the tokens themselves.
        name: of the machine, for people.
        from_before: hidden states come to it from the member before.
        to_next: what comes out of its layers goes to the member behind it.
        relayed: hidden states of the member before come through this machine.
    """

    def __init__(
        self,
        connect: Connect,
        moved: threading.Event,
        *,
        first: int,
        last: int,
        width: int,
        dtype: mx.Dtype,
        kept: KeptThere | None = None,
        ids: bool = False,
        name: str = "",
        from_before: bool = False,
        to_next: bool = False,
        relayed: bool = False,
    ) -> None:
        self.first, self.last, self.name, self.takes_ids, self.moved = first, last, name, ids, moved
        self.from_before, self.to_next = from_before, to_next
        self.times = StepTimes(name, first, last, relayed)
        # What it told of its streams to other members, and when that came, by the monotonic clock.
        self.hops_lost: list[tuple[HopLost, float]] = []
        self._caches = CachesThere(kept or KeptThere())
        self._width, self._dtype = width, dtype
        # Bytes of one hidden state.
        self._row = width * dtype.size
        # What has a place in the stream and was not sent, and what was sent and not answered.
        self._unsent: deque[StagePass] = deque()
        self._due: deque[StagePass] = deque()
        # Bytes of hidden states in the largest answer that was asked for.
        self._largest = 0
        self._waiting = WaitingFrames(0)
        self._expect(0)
        self._pipe = connect(STAGE, self._place)
        self.disk = DiskThere(self._caches, self.tell)

    def rows(self) -> RemoteRows:
        """What the layers keep of a sequence of which no token came yet."""
        return RemoteRows(self._caches)

    # ---- what is sent ----------------------------------------------------------------------------------

    def enter(
        self,
        rows: RemoteRows,
        tokens: mx.array,
        *,
        wanted: bool,
        room: int,
        taps: Taps = NO_TAPS,
        hash_from: int = messages.ALL,
    ) -> StagePass:
        """A place for a block of ``tokens`` (B, T), with all changes of caches so far; ``give`` sends it, or
        ``send_on`` if its hidden states come from the member before.

        ``wanted``: what comes out of the layers is sent back. ``room``: as many tokens follow, with these.
        ``taps``: hidden states that are sent back too, of those of the layers that are the member's.
        ``hash_from``: of what it keeps from this token on a hash is sent back.
        """
        batch, count = tokens.shape
        ids = np.array(tokens).reshape(-1).tolist() if self.takes_ids else []
        start = rows.tokens if batch == 1 else 0
        where = rows.next_positions()
        own = [layer for layer in taps.layers if self.first <= layer < self.last]
        command = RunStage(
            self._told(),
            rows.number,
            batch,
            count,
            wanted,
            room,
            start,
            ids,
            where,
            own,
            taps.rows,
            self.from_before,
            self.to_next,
            hash_from,
        )
        rows.grow(count)
        self._unsent.append(StagePass(command))
        return self._unsent[-1]

    def give(self, entered: StagePass, hidden: mx.array) -> None:
        """The hidden states (B, T, D) of a block that has its place."""
        entered.hidden = hidden
        self._flush()

    def send_on(self) -> None:
        """Send all that can be sent: blocks whose hidden states do not come from here, too."""
        self._flush()

    def drop(self, entered: StagePass) -> None:
        """What comes out of this block is of no use; its rows are taken back by what is told next."""
        entered.dropped = True
        if entered in self._unsent and entered.hidden is None and not self.from_before:
            entered.command = RunStage(entered.command.changes)
        self._flush()

    def tell(self) -> None:
        """Send changes that there are now, without waiting for a block to send them with."""
        if changes := self._told():
            self._unsent.append(StagePass(RunStage(changes)))
            self._flush()

    def _told(self) -> list[Change]:
        """The changes that were not sent yet, the last of which go with a run."""
        return self._caches.take_untold(lambda changes: self._unsent.append(StagePass(RunStage(changes))))

    def _flush(self) -> None:
        while self._unsent and self._can_be_sent(self._unsent[0]):
            entered, begun = self._unsent.popleft(), time.monotonic()
            self._expect(sum(self._answered(entered.command)))
            self._send(entered.command, entered.hidden if entered.runs else None)
            entered.hidden = None
            if entered.runs:
                entered.sent_s = 0.0 if self._due else begun
                self._due.append(entered)

    def _can_be_sent(self, entered: StagePass) -> bool:
        return self.from_before or entered.hidden is not None or not entered.runs

    def _answered(self, command: RunStage) -> list[int]:
        """Bytes of what is sent back: of what comes out of the layers, then of each that is tapped."""
        comes = command.wanted and not self.to_next
        rows = [command.tokens] * comes + [command.tapped] * len(command.taps)
        return [command.batch * count * self._row for count in rows]

    def _expect(self, nbytes: int) -> None:
        """Before an answer of so many bytes is asked for: the thread that reads refuses larger ones, and more
        than there can be of them."""
        self._largest = max(self._largest, nbytes)
        self._waiting.most_bytes = limits.GROUP_STREAMS * (self._largest + 2 * limits.GROUP_MESSAGE_BYTES)

    def _send(self, command: RunStage, hidden: mx.array | None) -> None:
        message = memoryview(messages.encode(command))
        payload = [] if hidden is None else [buffer_of(as_bytes(hidden))]
        sizes = message.nbytes, sum(part.nbytes for part in payload)
        self._pipe.send(FrameHeader(Kind.STAGE, count=command.tokens, sizes=sizes), message, *payload)

    def close(self) -> None:
        self._pipe.close()

    # ---- what comes back -------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """Blocks that have begun and were not answered."""
        return len(self._due) + sum(entered.runs for entered in self._unsent)

    def collect(self) -> bool:
        """Take one answer and pass its hidden states on to the next member. False if none has come.

        Raises MemberLost.
        """
        if not self._due and not self.disk.asked:
            return False
        try:
            frame = self._pipe.receive()
        except FleetError as error:
            raise MemberLost(MemberGone(f"{self.name} left the group: {error.message}")) from error
        if frame is None:
            return False
        self._waiting.taken(frame)
        if frame.head.kind is Kind.KEPT:
            self.disk.take(self._decoded(frame, KeptTold))
        elif frame.head.kind is Kind.HOP_LOST:
            self.hops_lost.append((self._decoded(frame, HopLost), time.monotonic()))
        elif self._due:
            self._take(self._due.popleft(), frame)
        else:
            raise MemberLost(ProtocolError(f"{self.name} sent what nothing asked for."))
        return True

    def check(self, since_s: float, now_s: float) -> None:
        """Raises MemberLost if the member answers nothing for too long. ``since_s``: when it was last known
        to be at work, by the monotonic clock."""
        if not self._due:
            return
        silent_s = now_s - max(since_s, self._pipe.heard_s)
        if silent_s > limits.GROUP_SILENT_S:
            raise MemberLost(GroupLost(f"{self.name} was silent for {silent_s:.1f} s."))
        if now_s - since_s > limits.GROUP_STEP_S:
            raise MemberLost(GroupLost(f"{self.name} took {limits.GROUP_STEP_S:.0f} s for a step."))

    def silent_s(self, now_s: float) -> float:
        """Since when nothing came of the member."""
        return now_s - self._pipe.heard_s

    def _take(self, entered: StagePass, frame: Frame) -> None:
        ran = self._decoded(frame, StageRan)
        entered.done, entered.done_s, entered.kept = True, time.monotonic(), ran.kept
        if entered.sent_s and entered.command.wanted and not ran.skipped:
            self._note_times(entered, ran.seconds)
        command = entered.command
        # What comes out of the layers may go to the member behind.
        comes = command.wanted and not self.to_next
        # A chunk of a prompt that was given up may be skipped, and its taps with it.
        if entered.dropped or (ran.skipped and not comes):
            return
        sizes = self._answered(command)
        if ran.skipped or frame.head.sizes[1] != sum(sizes):
            raise MemberLost(ProtocolError(f"{self.name} sent no hidden states of {sum(sizes)} bytes."))
        if command.hash_from < messages.ALL and not ran.kept:
            raise MemberLost(ProtocolError(f"{self.name} sent no hash of what it keeps."))
        found, begins = [], 0
        for nbytes in sizes:
            data = np.frombuffer(frame.buffers[1], np.uint8, nbytes, begins)
            found.append(of_bytes(data.reshape(command.batch, -1, self._row), self._dtype))
            begins += nbytes
        entered.taps = dict(zip(command.taps, found[comes:], strict=True))
        if not comes:
            return
        entered.out = found[0]
        if entered.after is not None:
            stage, then = entered.after
            stage.give(then, entered.out)
            entered.out = None

    def _note_times(self, entered: StagePass, computed_s: float) -> None:
        """Note the times of a block that had the member to itself.

        Hidden states that come straight from the member before begin their way about when that one answers.
        So the ways to all members add up to the whole way of the block.
        """
        began_s = entered.sent_s
        if entered.before is not None:
            if not entered.before.done:
                return
            began_s = max(began_s, entered.before.done_s)
        self.times.add(entered.command.tokens, computed_s, entered.done_s - began_s - computed_s)

    @staticmethod
    def _decoded(frame: Frame, kind: type[_T]) -> _T:
        try:
            return messages.decode(frame.buffers[0], kind)
        except ProtocolError as error:
            raise MemberLost(error) from error

    def _place(self, head: FrameHeader) -> list[memoryview]:
        first, second = head.sizes
        # The thread that reads may be ahead of what was taken, never of what was sent.
        due = Kind.STAGED, Kind.KEPT, Kind.HOP_LOST
        if head.kind not in due or first > limits.GROUP_MESSAGE_BYTES or second > self._largest:
            raise ProtocolError(
                f"A {head.kind.name} of {first} and {second} bytes came where a STAGED was due."
            )
        self._waiting.come(head)
        return [memoryview(bytearray(first)), memoryview(bytearray(second))]
