"""Another rank as the worker that answers sees it: it is told of each pass before that begins here.

Nothing comes back. That a rank computes is shown by the sums that need its part.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from fleetd.engine.failures import MemberLost
from fleetd.engine.groups import messages
from fleetd.engine.groups.messages import RunStage
from fleetd.engine.groups.remote_rows import CachesThere, KeptThere, RemoteRows
from fleetd.engine.protocol import STAGE
from fleetd.engine.streams.frames import Connect, FrameHeader, Kind
from fleetd.errors import FleetError, MemberGone, ProtocolError


class RemoteRank:
    """``connect`` opens the stream to it. ``kept``: what its layers keep. ``name``: of its machine."""

    def __init__(self, connect: Connect, kept: KeptThere, name: str) -> None:
        self.name = name
        self._caches = CachesThere(kept)
        self._pipe = connect(STAGE, _nothing_comes)

    def rows(self) -> RemoteRows:
        """What its layers keep of a sequence of which no token came yet."""
        return RemoteRows(self._caches)

    def announce(self, rows: RemoteRows, tokens: mx.array) -> None:
        """Have it compute a pass over ``tokens`` (B, T), after all changes of caches so far.

        Raises MemberLost.
        """
        batch, count = tokens.shape
        start = rows.tokens if batch == 1 else 0
        ids = np.array(tokens).reshape(-1).tolist()
        changes = self._caches.take_untold(lambda early: self._send(RunStage(early)))
        self._send(RunStage(changes, rows.number, batch, count, start=start, ids=ids))
        rows.grow(count)
        try:
            self._pipe.receive()
        except FleetError as error:
            raise MemberLost(MemberGone(f"{self.name} left the group: {error.message}")) from error

    def close(self) -> None:
        self._pipe.close()

    def _send(self, command: RunStage) -> None:
        message = memoryview(messages.encode(command))
        self._pipe.send(FrameHeader(Kind.STAGE, count=command.tokens, sizes=(message.nbytes, 0)), message)


def _nothing_comes(head: FrameHeader) -> list[memoryview]:
    raise ProtocolError(f"A {head.kind.name} came from a rank, which has nothing to say.")
