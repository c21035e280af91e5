"""A member's part of a group: its layers, run on what comes, frame by frame.

STAGE ─► changes of what is kept ─► layers ─► STAGED, in the order in which they came

Hidden states come with a STAGE, or as a HOP from the member before; they go back with the STAGED, or as a
HOP to the member behind. What a later frame undoes is not computed: it was guessed on from a draft that was
wrong.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from itertools import islice
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from fleetd import limits
from fleetd.engine.groups import messages
from fleetd.engine.groups.member_disk import PartDisk
from fleetd.engine.groups.member_hops import MemberHops
from fleetd.engine.groups.member_rows import MemberRows
from fleetd.engine.groups.messages import ALL, Change, HopLost, RunStage, StageRan, Trim
from fleetd.engine.layers.hidden_states import noted_states
from fleetd.engine.layers.layer_calls import PassInputs
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import STAGE
from fleetd.engine.sequence_state import growth
from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, of_bytes
from fleetd.engine.sequence_state.parts import kept_from
from fleetd.engine.streams.frames import Connect, Frame, FrameHeader, Kind
from fleetd.engine.streams.waiting import WaitingFrames
from fleetd.errors import FleetError, OutOfMemory, ProtocolError


class MemberStage:
    """``stage``: the member's layers. ``dtype``: of hidden states. ``most_bytes``: for all that is kept, as
    was promised for ``most_tokens``. ``disk``: where prompts are kept; None if they are not."""

    def __init__(
        self,
        stage: Stage,
        dtype: mx.Dtype,
        most_bytes: int,
        connect: Connect,
        disk: PartDisk | None = None,
        most_tokens: int = 1 << 31,
    ) -> None:
        self._stage, self._dtype, self._most_bytes = stage, dtype, most_bytes
        self._most_tokens = most_tokens
        self.disk = disk
        self.rows = MemberRows(stage, disk, most_bytes)
        # What came and was not run yet.
        self._due: deque[tuple[RunStage, Frame]] = deque()
        self._broken: FleetError | None = None
        self._most_hidden = limits.GROUP_TOKENS * stage.width * dtype.size
        self._waiting = WaitingFrames(
            limits.GROUP_AHEAD * self._most_hidden + limits.GROUP_STREAMS * limits.GROUP_MESSAGE_BYTES
        )
        self.hops = MemberHops(self._most_hidden)
        self._pipe = connect(STAGE, self._place)

    # ---- guest work ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        try:
            while self._broken is None and (frame := self._pipe.receive()) is not None:
                self._due.append((messages.decode(frame.buffers[0], RunStage), frame))
        except FleetError as error:
            self._broken = error
        return self._can_run or self._broken is not None or self.rows.disk.ready

    @property
    def due_s(self) -> float | None:
        """It waits for the machine that answers until the group ends; for its disk, and for a member before
        it that is silent, it does not."""
        due = [due_s for due_s in (self.rows.disk.due_s, self.hops.due_s) if due_s is not None]
        return min(due, default=None)

    @property
    def _can_run(self) -> bool:
        """True if all is there that what came first needs."""
        if not self._due:
            return False
        command, _ = self._due[0]
        if not _runs(command) or self._first_is_undone:
            return True
        try:
            there = not command.from_before or self.hops.look() is not None
        except FleetError:
            self._tell_lost(self.hops.lost(to_next=False))
            return False
        return there and (not command.to_next or self.hops.can_send)

    def step(self) -> None:
        """Run the layers on what came first. Raises what the stream broke with, and FleetError."""
        ready = self.ready
        self._tell_lost(self.hops.late())
        if not ready:
            return
        self._tell_kept()
        if not self._can_run:
            if self._broken is None:
                return
            raise self._broken
        skipped = self._first_is_undone
        command, frame = self._due.popleft()
        self._waiting.taken(frame)
        for change in command.changes:
            self.rows.change(change)
        self._tell_kept()
        if not _runs(command):
            return
        # What is told later may name it, run or not.
        caches = self.rows.caches(command.held)
        begun = time.monotonic()
        data = self._take_hidden(command, frame)
        skipped = skipped or data is None
        out, taps = (None, []) if skipped or data is None else self._run(command, data, caches)
        took_s = time.monotonic() - begun
        asked = not skipped and command.hash_from < ALL
        ran = StageRan(skipped, took_s, _hash(caches, command.hash_from) if asked else b"")
        if command.to_next and not self.hops.send(out):
            self._tell_lost(self.hops.lost(to_next=True))
        done = memoryview(messages.encode(ran))
        back = [*([] if out is None or command.to_next else [out]), *taps]
        payload = [buffer_of(as_bytes(states)) for states in back]
        sizes = done.nbytes, sum(part.nbytes for part in payload)
        head = FrameHeader(Kind.STAGED, count=command.tokens, sizes=sizes)
        self._pipe.send(head, done, *payload)

    def _tell_lost(self, lost: HopLost | None) -> None:
        if lost is not None:
            message = memoryview(messages.encode(lost))
            self._pipe.send(FrameHeader(Kind.HOP_LOST, sizes=(message.nbytes, 0)), message)

    def _tell_kept(self) -> None:
        for told in self.rows.disk.step():
            message = memoryview(messages.encode(told))
            self._pipe.send(FrameHeader(Kind.KEPT, sizes=(message.nbytes, 0)), message)

    def close(self) -> None:
        # First of all: the member whose stream to the machine that answers is gone is the one that is lost.
        self._pipe.close()
        self.hops.close()
        self.rows.disk.close()
        if self.disk is not None:
            self.disk.tier.close()

    # ---- the layers ------------------------------------------------------------------------------------

    @property
    def _first_is_undone(self) -> bool:
        """True if what came since undoes all of the first block, and nothing reads its rows before that."""
        command, _ = self._due[0]
        for later, _ in islice(self._due, 1, None):
            for change in later.changes:
                if isinstance(change, Trim) and change.held == command.held:
                    if change.tokens <= command.start:
                        return command.batch == 1
                elif _may_name(change, command.held):
                    return False
        return False

    def _take_hidden(self, command: RunStage, frame: Frame) -> memoryview | None:
        """The bytes of a block's hidden states; None if they never come, as the member before skipped it."""
        if not command.from_before:
            return frame.buffers[1]
        came = self.hops.taken()
        return came.buffers[0] if came is not None and came.head.nbytes else None

    def _run(
        self, command: RunStage, data: memoryview, caches: list[Any]
    ) -> tuple[mx.array | None, list[mx.array]]:
        """The hidden states behind the last layer, if they are wanted, and those of single layers that were
        asked for, (B, T, D) each."""
        hidden = self._hidden(command, data)
        ids = mx.array(command.ids).reshape(command.batch, -1) if command.ids else None
        inputs = PassInputs(command.start)
        if ids is not None:
            self._stage.check_tokens(command.ids, command.start + command.tokens)
            inputs = self._stage.inputs(ids, command.start)
        if command.positions:
            self._place_tokens(command, caches)
        own = [layer - self._stage.first for layer in command.taps]
        with (
            # Room for more than was promised is made step by step, and refused once it is too much.
            growth.at_once(caches, min(command.room, self._most_tokens) or command.tokens),
            noted_states(self._stage.weights, own) as noted,
        ):
            out = self._stage.run(hidden, self._stage.spread(caches), inputs)
        taps = [self._tap(noted.get(index, []), command) for index in own]
        mx.eval(out, taps, [cache.state for cache in caches])
        if not command.wanted:
            mx.clear_cache()
        if (kept := self.rows.nbytes) > self._most_bytes:
            raise OutOfMemory(f"A group keeps {kept} bytes here; {self._most_bytes} were promised.")
        return (out if command.wanted else None), taps

    def _tap(self, noted: list[mx.array], command: RunStage) -> mx.array:
        """What a layer that is asked for gave, (B, rows, D). Raises ProtocolError."""
        if not noted or noted[0].shape[-1] != self._stage.width:
            raise ProtocolError("Hidden states were asked for of a layer that is not here, or has none.")
        return noted[0][:, command.tokens - command.tapped :].astype(self._dtype)

    @staticmethod
    def _place_tokens(command: RunStage, caches: list[Any]) -> None:
        if len(command.positions) != command.tokens or not all(hasattr(cache, "expect") for cache in caches):
            raise ProtocolError("Positions came of tokens that have none of their own.")
        for cache in caches:
            cache.expect(command.positions)

    def _hidden(self, command: RunStage, data: memoryview) -> mx.array:
        expected = command.batch * command.tokens * self._stage.width * self._dtype.size
        if data.nbytes != expected:
            raise ProtocolError(f"Hidden states of {data.nbytes} bytes came where {expected} were due.")
        rows = np.frombuffer(data, np.uint8).reshape(command.batch, command.tokens, -1)
        return of_bytes(rows, self._dtype)

    # ---- what arrives ----------------------------------------------------------------------------------

    def _place(self, head: FrameHeader) -> list[memoryview]:
        first, second = head.sizes
        if head.kind is not Kind.STAGE or first > limits.GROUP_MESSAGE_BYTES or second > self._most_hidden:
            raise ProtocolError(
                f"A {head.kind.name} of {first} and {second} bytes came where a STAGE was due."
            )
        self._waiting.come(head)
        return [memoryview(bytearray(first)), memoryview(bytearray(second))]


def _runs(command: RunStage) -> bool:
    """False if there are changes alone."""
    return command.tokens > 0 and command.batch > 0


def _hash(caches: list[Any], first: int) -> bytes:
    """A hash of all that is kept of tokens from ``first`` on."""
    state = hashlib.sha256()
    for array in kept_from(caches, first):
        state.update(as_bytes(mx.contiguous(array)))
    return state.digest()


def _may_name(change: Change, held: int) -> bool:
    """False if the change surely has nothing to do with what is kept under this number."""
    values = msgspec.structs.astuple(change)
    return any(held in value if isinstance(value, list) else held == value for value in values)
