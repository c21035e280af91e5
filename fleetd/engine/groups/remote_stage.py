"""A member's layers as the worker that answers sees them.

Nothing is asked of a member: what becomes of its caches is told with the next run.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import mlx.core as mx
import numpy as np

from fleetd import limits
from fleetd.engine.failures import MemberLost
from fleetd.engine.groups import messages
from fleetd.engine.groups.messages import Change, RunStage, StageRan
from fleetd.engine.groups.remote_rows import CachesThere, KeptThere, RemoteRows
from fleetd.engine.protocol import STAGE
from fleetd.engine.sequence_state.array_bytes import as_bytes, buffer_of, of_bytes
from fleetd.engine.streams.frames import Connect, Frame, FrameHeader, Kind
from fleetd.errors import FleetError, GroupLost, ProtocolError


class RemoteStage:
    """Layers [first, last), on another machine.

    Args:
        connect: opens the stream to it.
        moved: set whenever something came on any member's stream.
        width, dtype: of the hidden states.
        kept: what the layers keep of sequences.
        ids: whether the layers take the tokens themselves.
        name: of the machine, for people.
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
    ) -> None:
        self.first, self.last, self.name, self.takes_ids = first, last, name, ids
        self._caches = CachesThere(kept or KeptThere())
        # Seconds that the member's layers took of the last run that was wanted.
        self.took_s = 0.0
        self._width, self._dtype = width, dtype
        # Of each frame that was sent and not answered: the sequences that come back, 0 for none, and tokens.
        self._due: deque[tuple[int, int]] = deque()
        self._moved = moved
        self._pipe = connect(STAGE, self._place)

    def rows(self) -> RemoteRows:
        """What the layers keep of a sequence of which no token came yet."""
        return RemoteRows(self._caches)

    def run(self, hidden: mx.array, rows: RemoteRows, tokens: mx.array, *, room: int = 0) -> mx.array:
        """Hidden states (B, T, D) of ``tokens`` (B, T) to those behind the last layer. Raises MemberLost."""
        self._begin(hidden, rows, tokens, wanted=True, room=room)
        while len(self._due) > 1:
            self._take()
        found = self._take()
        if found is None:
            raise MemberLost(ProtocolError(f"{self.name} sent no hidden states."))
        return found

    def read(self, hidden: mx.array, rows: RemoteRows, tokens: mx.array, *, room: int = 0) -> None:
        """The same with nothing coming back. Nothing is waited for but what was sent
        ``limits.GROUP_FRAMES`` before. Raises MemberLost."""
        self._begin(hidden, rows, tokens, wanted=False, room=room)
        while len(self._due) > limits.GROUP_FRAMES:
            self._take()

    def _begin(
        self, hidden: mx.array, rows: RemoteRows, tokens: mx.array, *, wanted: bool, room: int
    ) -> None:
        batch, count = tokens.shape
        ids = np.array(tokens).reshape(-1).tolist() if self.takes_ids else []
        start = rows.tokens if batch == 1 else 0
        self._send(RunStage(self._told(), rows.number, batch, count, wanted, room, start, ids), hidden)
        rows.grow(count)
        self._due.append((batch if wanted else 0, count))

    def _told(self) -> list[Change]:
        """The changes that were not sent yet, the last of which go with a run."""
        untold = self._caches.untold
        while len(untold) > limits.GROUP_CHANGES:
            self._send(RunStage([untold.popleft() for _ in range(limits.GROUP_CHANGES)]))
        # Others may be added meanwhile, of caches that are thrown away.
        return [untold.popleft() for _ in range(len(untold))]

    def _send(self, command: RunStage, hidden: mx.array | None = None) -> None:
        message = memoryview(messages.encode(command))
        payload = [] if hidden is None else [buffer_of(as_bytes(hidden))]
        sizes = message.nbytes, sum(part.nbytes for part in payload)
        self._pipe.send(FrameHeader(Kind.STAGE, count=command.tokens, sizes=sizes), message, *payload)

    def settle(self) -> None:
        """Wait until the layers have run on all that was sent. Raises MemberLost."""
        while self._due:
            self._take()

    def close(self) -> None:
        self._pipe.close()

    # ---- what comes back -------------------------------------------------------------------------------

    def _take(self) -> mx.array | None:
        batch, count = self._due[0]
        frame = self._wait()
        self._due.popleft()
        try:
            done = messages.decode(frame.buffers[0], StageRan)
        except ProtocolError as error:
            raise MemberLost(error) from error
        if not batch:
            return None
        self.took_s = done.seconds
        data = np.frombuffer(frame.buffers[1], np.uint8).reshape(batch, count, -1)
        return of_bytes(data, self._dtype)

    def _wait(self) -> Frame:
        began_s = time.monotonic()
        while True:
            self._moved.clear()
            try:
                if (frame := self._pipe.receive()) is not None:
                    return frame
            except FleetError as error:
                raise MemberLost(GroupLost(f"{self.name} left the group: {error.message}")) from error
            self._moved.wait(limits.GROUP_BEAT_S)
            now_s = time.monotonic()
            silent_s = now_s - max(began_s, self._pipe.heard_s)
            if silent_s > limits.GROUP_SILENT_S:
                raise MemberLost(GroupLost(f"{self.name} was silent for {silent_s:.1f} s."))
            if now_s - began_s > limits.GROUP_STEP_S:
                raise MemberLost(GroupLost(f"{self.name} took {limits.GROUP_STEP_S:.0f} s for a step."))

    def _place(self, head: FrameHeader) -> list[memoryview]:
        first, second = head.sizes
        # The thread that reads may be ahead of what was taken, never of what was sent.
        most = limits.GROUP_STREAMS * limits.GROUP_TOKENS * self._width * self._dtype.size
        if head.kind is not Kind.STAGED or first > limits.GROUP_MESSAGE_BYTES or second > most:
            raise ProtocolError(
                f"A {head.kind.name} of {first} and {second} bytes came where a STAGED was due."
            )
        return [memoryview(bytearray(first)), memoryview(bytearray(second))]
