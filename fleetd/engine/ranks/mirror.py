"""A rank that answers nothing: it repeats what the worker that answers computes, pass by pass."""

from __future__ import annotations

from collections import deque
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.groups import messages
from fleetd.engine.groups.member_rows import MemberRows
from fleetd.engine.groups.messages import RunStage
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.protocol import STAGE
from fleetd.engine.ranks.rank_pass import run_pass
from fleetd.engine.streams.frames import Connect, FrameHeader, Kind
from fleetd.errors import FleetError, OutOfMemory, ProtocolError


class Mirror:
    """``stage``: all layers, divided. ``ring``: the group of all ranks. ``most_bytes``: for all it keeps."""

    def __init__(
        self, stage: Stage, ring: Any, progress: PassProgress, most_bytes: int, connect: Connect
    ) -> None:
        self._stage, self._ring, self._progress, self._most_bytes = stage, ring, progress, most_bytes
        self.rows = MemberRows(stage, most_bytes=most_bytes)
        self._due: deque[RunStage] = deque()
        self._broken: FleetError | None = None
        self._pipe = connect(STAGE, _place)

    @property
    def ready(self) -> bool:
        try:
            while self._broken is None and (frame := self._pipe.receive()) is not None:
                self._due.append(messages.decode(frame.buffers[0], RunStage))
        except FleetError as error:
            self._broken = error
        return bool(self._due) or self._broken is not None

    @property
    def due_s(self) -> None:
        """It waits until the group ends."""
        return None

    def step(self) -> None:
        """The next pass. Raises what the stream broke with, FleetError, and MemberLost."""
        if not self.ready:
            return
        if not self._due:
            if self._broken is None:
                return
            raise self._broken
        command = self._due.popleft()
        for change in command.changes:
            self.rows.change(change)
        if not command.tokens or not command.batch:
            return
        if len(command.ids) != command.batch * command.tokens:
            raise ProtocolError(
                f"{len(command.ids)} tokens came for a pass of {command.batch} by {command.tokens}."
            )
        self._stage.check_tokens(command.ids, command.start + command.tokens)
        if (kept := self.rows.nbytes) > self._most_bytes:
            raise OutOfMemory(f"A group keeps {kept} bytes here; {self._most_bytes} were promised.")
        tokens = mx.array(command.ids).reshape(command.batch, command.tokens)
        caches = self.rows.caches(command.held)
        run_pass(self._stage, tokens, caches, command.start, self._ring, self._progress)
        mx.eval([cache.state for cache in caches])
        if command.tokens > limits.RANK_SHORT_TOKENS:
            mx.clear_cache()

    def close(self) -> None:
        self._pipe.close()


def _place(head: FrameHeader) -> list[memoryview]:
    first, second = head.sizes
    if head.kind is not Kind.STAGE or first > limits.GROUP_MESSAGE_BYTES or second:
        raise ProtocolError(f"A {head.kind.name} of {first} and {second} bytes came where a STAGE was due.")
    return [memoryview(bytearray(first))]
