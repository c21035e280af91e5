"""A member's part of a group: its layers, run on what comes, frame by frame.

STAGE ─► changes of what is kept ─► layers ─► STAGED, in the order in which they came

What a later frame undoes is not computed: it was guessed on from a draft that was wrong.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from fleetd import limits
from fleetd.engine.groups import messages
from fleetd.engine.groups.member_disk import PartDisk
from fleetd.engine.groups.member_rows import MemberRows
from fleetd.engine.groups.messages import Change, RunStage, StageRan, Trim
from fleetd.engine.layers.hidden_states import noted_states
from fleetd.engine.layers.layer_calls import PassInputs
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import STAGE
from fleetd.engine.sequence_state import growth
from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, of_bytes
from fleetd.engine.streams.frames import Connect, Frame, FrameHeader, Kind
from fleetd.errors import FleetError, OutOfMemory, ProtocolError


class MemberStage:
    """``stage``: the member's layers. ``dtype``: of hidden states. ``most_bytes``: for all that is kept.
    ``disk``: where prompts are kept; None if they are not."""

    def __init__(
        self,
        stage: Stage,
        dtype: mx.Dtype,
        most_bytes: int,
        connect: Connect,
        disk: PartDisk | None = None,
    ) -> None:
        self._stage, self._dtype, self._most_bytes = stage, dtype, most_bytes
        self.disk = disk
        self.rows = MemberRows(stage, disk, most_bytes)
        # What came and was not run yet.
        self._due: deque[tuple[RunStage, Frame]] = deque()
        self._broken: FleetError | None = None
        self._pipe = connect(STAGE, self._place)

    # ---- guest work ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        try:
            while self._broken is None and (frame := self._pipe.receive()) is not None:
                self._due.append((messages.decode(frame.buffers[0], RunStage), frame))
        except FleetError as error:
            self._broken = error
        return bool(self._due) or self._broken is not None or self.rows.disk.ready

    @property
    def due_s(self) -> float | None:
        """It waits for the other machines until the group ends; for its disk it does not."""
        return self.rows.disk.due_s

    def step(self) -> None:
        """Run the layers on what came first. Raises what the stream broke with, and FleetError."""
        if not self.ready:
            return
        self._tell_kept()
        if not self._due:
            if self._broken is None:
                return
            raise self._broken
        command, frame = self._due.popleft()
        for change in command.changes:
            self.rows.change(change)
        self._tell_kept()
        if not command.tokens or not command.batch:
            return
        skipped = self._is_undone(command)
        # What is told later may name it, run or not.
        caches = self.rows.caches(command.held)
        begun = time.monotonic()
        out = [] if skipped else self._run(command, frame, caches)
        ran = StageRan(skipped, time.monotonic() - begun)
        done = memoryview(messages.encode(ran))
        payload = [buffer_of(as_bytes(states)) for states in out]
        sizes = done.nbytes, sum(part.nbytes for part in payload)
        head = FrameHeader(Kind.STAGED, count=command.tokens, sizes=sizes)
        self._pipe.send(head, done, *payload)

    def _tell_kept(self) -> None:
        for told in self.rows.disk.step():
            message = memoryview(messages.encode(told))
            self._pipe.send(FrameHeader(Kind.KEPT, sizes=(message.nbytes, 0)), message)

    def close(self) -> None:
        self._pipe.close()
        self.rows.disk.close()
        if self.disk is not None:
            self.disk.tier.close()

    # ---- the layers ------------------------------------------------------------------------------------

    def _is_undone(self, command: RunStage) -> bool:
        """True if what came since undoes all of this block, and nothing reads its rows before that."""
        for later, _ in self._due:
            for change in later.changes:
                if isinstance(change, Trim) and change.held == command.held:
                    if change.tokens <= command.start:
                        return command.batch == 1
                elif _may_name(change, command.held):
                    return False
        return False

    def _run(self, command: RunStage, frame: Frame, caches: list[Any]) -> list[mx.array]:
        """The hidden states that are sent back, (B, T, D) each."""
        hidden = self._hidden(command, frame)
        ids = mx.array(command.ids).reshape(command.batch, -1) if command.ids else None
        inputs = PassInputs(command.start)
        if ids is not None:
            inputs = self._stage.inputs(ids, command.start)
        if command.positions:
            self._place_tokens(command, caches)
        own = [layer - self._stage.first for layer in command.taps]
        with (
            growth.at_once(caches, command.room or command.tokens),
            noted_states(self._stage.weights, own) as noted,
        ):
            out = self._stage.run(hidden, self._stage.spread(caches), inputs)
        taps = [self._tap(noted.get(index, []), command) for index in own]
        mx.eval(out, taps, [cache.state for cache in caches])
        if not command.wanted:
            mx.clear_cache()
        if (kept := self.rows.nbytes) > self._most_bytes:
            raise OutOfMemory(f"A group keeps {kept} bytes here; {self._most_bytes} were promised.")
        return [out, *taps] if command.wanted else taps

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

    def _hidden(self, command: RunStage, frame: Frame) -> mx.array:
        shape = (command.batch, command.tokens, self._stage.width)
        expected = command.batch * command.tokens * self._stage.width * self._dtype.size
        if frame.head.sizes[1] != expected:
            raise ProtocolError(
                f"Hidden states of {frame.head.sizes[1]} bytes came where {expected} were due."
            )
        data = np.frombuffer(frame.buffers[1], np.uint8).reshape(*shape[:2], -1)
        return of_bytes(data, self._dtype)

    # ---- what arrives ----------------------------------------------------------------------------------

    def _place(self, head: FrameHeader) -> list[memoryview]:
        first, second = head.sizes
        most = limits.GROUP_TOKENS * self._stage.width * self._dtype.size
        if head.kind is not Kind.STAGE or first > limits.GROUP_MESSAGE_BYTES or second > most:
            raise ProtocolError(
                f"A {head.kind.name} of {first} and {second} bytes came where a STAGE was due."
            )
        return [memoryview(bytearray(first)), memoryview(bytearray(second))]


def _may_name(change: Change, held: int) -> bool:
    """False if the change surely has nothing to do with what is kept under this number."""
    values = msgspec.structs.astuple(change)
    return any(held in value if isinstance(value, list) else held == value for value in values)
