"""Frames between the workers that share a prefill: tokens, hidden states, keys and values.

Sans-IO. A frame is a head of fixed size and a payload of raw numbers, in the byte order of the machines that
compute (little endian):

    kind u8 | layer u16 | part u8 | start, count, index u32 | prefix 8 bytes | sizes u64 u64 | payload

A receiver knows every head in advance: which frame comes when, and its size, follow from the split
(``frame_schedule``). A head other than the expected one is refused before its payload is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import msgspec

from fleetd.errors import ProtocolError


class Kind(IntEnum):
    # The prompt's tokens, int32 (count,); where some are left out, each with its position, int32 (count, 2).
    TOKENS = 1
    # Keys (heads, count, key width) and values (heads, count, value width) of one layer's tokens.
    ROWS = 2
    # What has no row per token: all rows that a cache which rotates holds, in the order in which it holds
    # them, or the arrays of a running state.
    STATE = 3
    # What tokens have on their way into ``layer``: hidden states, and all else of it, (count, width).
    HIDDEN = 4
    # Nothing more follows.
    DONE = 5
    # Between an answer and its drafter (``draft_messages``): how the text went on.
    COMMIT = 6
    # How it may go on.
    DRAFT = 7
    # In a group of machines (``groups.messages``): hidden states for a member's layers.
    STAGE = 8
    # What came out of them.
    STAGED = 9
    # What its disk has of a prompt.
    KEPT = 11
    # From one member to the one behind it: hidden states of block ``index``, or nothing if it was skipped.
    HOP = 12
    # To the machine that answers: the stream between two members broke.
    HOP_LOST = 13
    # Nothing, but that the process on the other side runs.
    ALIVE = 10


_HEAD = struct.Struct("<BHBIII8sQQ")
HEAD_BYTES = _HEAD.size
_LARGEST = 1 << 40
NO_PREFIX = bytes(8)


class FrameHeader(msgspec.Struct, frozen=True):
    """``start`` and ``count`` are tokens, as the split counts them; ``sizes`` the bytes of the payload's two
    halves: keys and values. ``part``: which of the caches of ``layer``, if it has several.

    A STATE's ``start`` is 0 and its ``count`` all tokens that its cache has seen; ``index`` is where a cache
    that rotates writes next. A running state's arrays are its first half. ``prefix`` is
    ``plan.split.prefix_hashes`` at ``start + count``.
    """

    kind: Kind
    layer: int = 0
    start: int = 0
    count: int = 0
    sizes: tuple[int, int] = (0, 0)
    index: int = 0
    prefix: bytes = NO_PREFIX
    part: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(self.sizes)

    @property
    def end(self) -> int:
        return self.start + self.count

    def pack(self) -> bytes:
        """``HEAD_BYTES`` bytes."""
        places = (self.kind, self.layer, self.part, self.start, self.count, self.index)
        return _HEAD.pack(*places, self.prefix, *self.sizes)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        """The header in ``HEAD_BYTES`` bytes. Raises ProtocolError if they are none."""
        if len(data) != HEAD_BYTES:
            raise ProtocolError(f"A frame's head of {len(data)} bytes came where {HEAD_BYTES} were due.")
        kind, layer, part, start, count, index, prefix, first, second = _HEAD.unpack(data)
        if kind not in Kind._value2member_map_ or max(first, second) > _LARGEST:
            raise ProtocolError(
                f"A frame of unknown kind {kind} or absurd size ({first} and {second} bytes)."
            )
        return cls(Kind(kind), layer, start, count, (first, second), index, prefix, part)


class Frame(msgspec.Struct, frozen=True):
    """A head and the buffers that now hold its payload, as ``Place`` named them."""

    head: FrameHeader
    buffers: list[memoryview]


# Where a frame's payload is to be written: any number of buffers, ``head.nbytes`` together, in the payload's
# order. Called before the payload is read, on whatever thread reads. Raises ProtocolError for a frame that is
# not due.
Place = Callable[[FrameHeader], list[memoryview]]


class FramePipe(Protocol):
    """One stream to one other worker. No method waits."""

    # When anything came from the other side last, by the monotonic clock.
    heard_s: float

    def send(self, head: FrameHeader, *payload: memoryview) -> None:
        """Queue a frame. ``payload`` is any number of buffers, ``head.nbytes`` together; they must not change
        until they are sent."""

    @property
    def backlog(self) -> int:
        """Bytes queued and not yet written."""

    def receive(self) -> Frame | None:
        """The next frame; None if none has come.

        Raises:
            FleetError: the stream broke, or carried what is not due. Frames before that come first.
        """

    def finish(self) -> None:
        """Nothing more will be sent."""

    def close(self) -> None:
        """Close at once, whatever is still queued. Idempotent. No buffer is read or written afterwards."""


# Opens the stream of that name ("home", "in", "out", "helper0", …) of one share or assist. Its pipe wakes the
# compute thread whenever something came, was sent, or broke.
Connect = Callable[[str, Place], FramePipe]
