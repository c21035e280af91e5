"""Drafts from another worker, here or on another machine: a source that never waits.

    committed(tokens) ──► COMMIT, unless the last one is still unsent: then the next one carries both
    propose(text)     ◄── whatever has come that goes on from just this text

A drafter that dies, stalls, is late or is wrong costs its drafts and nothing else: what it sent is compared
with the text, and verified like any other draft. A breach of the protocol ends the stream.

Whatever a drafter does, one answer's source holds at most ``DRAFT_WAITING`` frames of 4 KiB, ``DRAFT_PATHS``
paths and the tokens that were not sent yet: about a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fleetd import limits
from fleetd.engine.speculation import draft_messages as wire
from fleetd.engine.speculation.sources import Context
from fleetd.engine.streams.frames import Frame, FrameHeader, FramePipe, Place
from fleetd.errors import FleetError, PeerLost, ProtocolError


class _DraftPath(msgspec.Struct, frozen=True):
    """Tokens that may follow a text."""

    # The length of that text.
    base: int
    tokens: list[int]

    def rest(self, text: Sequence[int]) -> list[int]:
        """The tokens that go on from ``text``; none if the path belongs to another text."""
        known = len(text) - self.base
        if known < 0 or list(text[self.base :]) != self.tokens[:known]:
            return []
        return self.tokens[known:]


class RemoteSource:
    """A ``DraftSource`` on a pipe to a drafter.

    Args:
        connect: opens the pipe, given where its frames are to be written.
        text: the prompt's tokens; sent at once.
        vocab_size: of the model that verifies; ids beyond it must never reach it.
        begun: True if some of the answer is there already. The next ``propose`` tells which tokens.

    ``error``: why no more drafts arrive; None while they do.
    """

    name = "drafter"
    hidden_layers = ()

    def __init__(
        self,
        connect: Callable[[Place], FramePipe],
        text: Sequence[int],
        vocab_size: int,
        *,
        begun: bool = False,
    ) -> None:
        self.error: FleetError | None = None
        self._vocab_size = vocab_size
        self._sent = wire.TextHash()
        self._unsent = list(text)
        # True if no token of the text was missed.
        self._aligned = not begun
        # Texts that the drafter may know, by length.
        self._bases: dict[int, bytes] = {}
        self._paths: list[_DraftPath] = []
        # Both only ever grow, each on its own thread.
        self._placed = self._taken = 0
        self._pipe = connect(self._place)
        self._flush()

    # ---- a source --------------------------------------------------------------------------------------

    def propose(self, context: Context) -> list[int]:
        """The rest of a path that goes on from this text: the longest, of equally long ones the newest."""
        tokens = context.tokens
        known = self._sent.length + len(self._unsent)
        if self.error is None and len(tokens) > known:
            self._unsent += tokens[known:]
        self._aligned = True
        self._receive()
        self._flush()
        best: list[int] = []
        live = []
        for path in self._paths:
            rest = path.rest(tokens)
            if rest:
                live.append(path)
                # Of two equally long ones the newer: it was drafted from a longer text.
                if len(rest) >= len(best):
                    best = rest
        self._paths = live
        return best[: context.width]

    def committed(self, tokens: Sequence[int]) -> None:
        """The text went on with these tokens."""
        if self._aligned:
            self._unsent += tokens
            self._flush()

    def close(self) -> None:
        """Idempotent."""
        self._end(PeerLost("The text has ended."))

    # ---- the stream ------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self.error is not None:
            self._unsent.clear()
            return
        # A drafter that does not read must not make anything here grow but one list of numbers.
        if not self._unsent or self._pipe.backlog:
            return
        self._bases[self._sent.length] = self._sent.hash
        self._pipe.send(*wire.commit(self._sent, self._unsent))
        self._sent.extend(self._unsent)
        self._unsent.clear()
        self._bases[self._sent.length] = self._sent.hash
        while len(self._bases) > limits.DRAFT_BASES:
            del self._bases[next(iter(self._bases))]

    def _place(self, head: FrameHeader) -> list[memoryview]:
        # On the pipe's thread. What piles up unread is bounded here.
        self._placed += 1
        if self._placed - self._taken > limits.DRAFT_WAITING:
            raise ProtocolError(f"A drafter sent {limits.DRAFT_WAITING} frames that were not read.")
        return wire.place_draft(head)

    def _receive(self) -> None:
        try:
            # Frames that come while these are taken wait for the next call: decoding does not.
            for _ in range(limits.DRAFT_WAITING):
                if self.error is not None or (frame := self._pipe.receive()) is None:
                    return
                self._taken += 1
                self._take_draft(frame)
        except FleetError as error:
            self._end(error)

    def _take_draft(self, frame: Frame) -> None:
        head = frame.head
        known = self._bases.get(head.start)
        if known is None and head.start < next(iter(self._bases)):
            return  # under way for very long
        if known != head.prefix:
            raise ProtocolError(f"A drafter goes on from a text of {head.start} tokens that is not this one.")
        for tokens in wire.branches_of(frame, self._vocab_size):
            self._keep(_DraftPath(head.start, tokens))

    def _keep(self, path: _DraftPath) -> None:
        """Add the newest path. Older paths that it begins with say nothing more, and go."""
        self._paths = [
            old
            for old in self._paths
            if old.base != path.base or old.tokens != path.tokens[: len(old.tokens)]
        ]
        self._paths.append(path)
        del self._paths[: -limits.DRAFT_PATHS]

    def _end(self, error: FleetError) -> None:
        if self.error is None:
            self.error = error
            self._pipe.close()
