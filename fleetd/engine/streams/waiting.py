"""What has come on a stream and waits to be taken: a sender must not fill this machine's memory with it."""

from __future__ import annotations

from fleetd.engine.streams.frames import HEAD_BYTES, Frame, FrameHeader
from fleetd.errors import ProtocolError


class WaitingFrames:
    """``most_bytes``: of frames that wait, heads included. The thread that reads calls ``come``, the one that
    computes ``taken``: each has a count of its own, which only grows."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._come = self._taken = 0

    def come(self, head: FrameHeader) -> None:
        """A frame begins to come. Raises ProtocolError if too much would wait."""
        self._come += HEAD_BYTES + head.nbytes
        if self._come - self._taken > self.most_bytes:
            raise ProtocolError(f"More than {self.most_bytes} bytes were sent before any of it was due.")

    def taken(self, frame: Frame) -> None:
        """A frame is used, and freed."""
        self._taken += HEAD_BYTES + frame.head.nbytes
